"""The log of one node in one generation: the lines of all its ranks in one file, in order.

One file a node, not one a rank: a run's number of files is bounded, since inodes are a quota too.
Each line begins with its rank, `r3 | …`; `logs --rank 3` picks them out again.
"""

from __future__ import annotations

import os
from pathlib import Path

from air_hpc.rundir.atomic import make_dir, open_file, write_all

_LONGEST_LINE = 64 * 1024


def node_log_path(generation_dir: Path, node: str) -> Path:
    """Where the log of a node is."""
    return generation_dir / f"node-{node}.log"


class NodeLog:
    """Appends lines of ranks. A log that cannot be written is dropped: training goes on."""

    def __init__(self, path: Path) -> None:
        self._fd = -1
        self.lost_bytes = 0
        try:
            make_dir(path.parent.parent, exist_ok=True)
            make_dir(path.parent, exist_ok=True)
            self._fd = open_file(path, os.O_WRONLY | os.O_APPEND)
        except OSError:
            pass

    def write(self, rank: int, lines: list[bytes]) -> None:
        """Append whole lines (without their ends) of one rank."""
        data = b"".join(b"r%d | %s\n" % (rank, line) for line in lines)
        try:
            write_all(self._fd, data)
        except OSError:
            self.lost_bytes += len(data)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LineBuffer:
    """Cuts a byte stream into lines; a very long one is cut where it gets too long."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are complete now."""
        *lines, rest = (self._rest + data).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines.append(rest)
            rest = b""
        self._rest = rest
        return lines

    def end(self) -> list[bytes]:
        """What is left at the end of the stream."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []
