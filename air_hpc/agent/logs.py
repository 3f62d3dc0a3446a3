"""The log of one node in one generation: the lines of all its ranks in one file, in order.

One file a node, not one a rank: a run's number of files is bounded, since inodes are a quota too.
Each line begins with its rank, `r3 | …`; `logs --rank 3` picks them out again.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from queue import SimpleQueue

from air_hpc.rundir.atomic import make_dir, open_file, write_all

CLOSE_S = 2.0
_LONGEST_LINE = 64 * 1024
_MOST_QUEUED_BYTES = 16 * 1024 * 1024


def node_log_path(generation_dir: Path, node: str) -> Path:
    """Where the log of a node is."""
    return generation_dir / f"node-{node}.log"


class NodeLog:
    """Appends lines of ranks, in a thread of its own.

    An append to a network file system that hangs must not hold up the agent: its heartbeats would
    stop, and a healthy node would be given up. What cannot be written, or does not fit into the
    queue meanwhile, is dropped and counted in `lost_bytes`: training goes on.
    """

    def __init__(self, path: Path) -> None:
        self._fd = -1
        try:
            make_dir(path.parent.parent, exist_ok=True)
            make_dir(path.parent, exist_ok=True)
            self._fd = open_file(path, os.O_WRONLY | os.O_APPEND)
        except OSError:
            pass
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        # Each counter has one writer: this thread the first two, the log's own the others.
        self._queued_bytes = self._dropped_bytes = 0
        self._taken_bytes = self._refused_bytes = 0
        self._writer = threading.Thread(target=self._write_all, daemon=True)
        self._writer.start()

    @property
    def lost_bytes(self) -> int:
        """What did not reach the file."""
        return self._dropped_bytes + self._refused_bytes

    def write(self, rank: int, lines: list[bytes]) -> None:
        """Append whole lines (without their ends) of one rank; returns at once."""
        data = b"".join(b"r%d | %s\n" % (rank, line) for line in lines)
        if self._queued_bytes - self._taken_bytes > _MOST_QUEUED_BYTES:
            self._dropped_bytes += len(data)
            return
        self._queued_bytes += len(data)
        self._queue.put(data)

    def _write_all(self) -> None:
        while (data := self._queue.get()) is not None:
            try:
                write_all(self._fd, data)
            except OSError:
                self._refused_bytes += len(data)
            self._taken_bytes += len(data)

    def close(self) -> None:
        """Write what is queued, for at most CLOSE_S, and close; a second call does nothing."""
        self._queue.put(None)
        self._writer.join(CLOSE_S)
        if self._fd >= 0 and not self._writer.is_alive():
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
