"""The log files of a run: chosen by attempt, generation and node, read whole, by tail, or followed.

One file holds what all ranks of a node printed, `attempts/<attempt>/<generation>/node-<node>.log`;
the agent puts `r<rank> | ` in front of each line. What the batch script itself printed is in the
submission's own log. Following goes on through restarts: a new generation's files are read as they
come. A line is given out whole, or, once the run has ended, as far as it was written.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from air_hpc.rundir.events import read_ledger
from air_hpc.rundir.fence import Token
from air_hpc.rundir.layout import RunDir
from air_hpc.runs.jobs import jobs_of

POLL_S = 0.5
_NODE_LOG = re.compile(r"node-(.+)\.log")
_RANK = re.compile(r"r(\d+) \| ?")
_BLOCK_BYTES = 64 * 1024


@dataclass(frozen=True)
class LogFile:
    """One file; a batch script's log has no token and no node."""

    path: Path
    token: Token | None = None
    node: str | None = None

    @property
    def label(self) -> str:
        """What stands above its lines."""
        if self.token is None:
            return f"batch log {self.path.name}"
        return f"attempt {self.token.attempt}, generation {self.token.generation}, node {self.node}"


@dataclass(frozen=True)
class LogLine:
    """One line of a log, without its end; `rank` is None for a line of the agent or the script."""

    file: LogFile
    rank: int | None
    text: str


@dataclass(frozen=True)
class Selection:
    """Which logs are wanted; None takes all. A rank leaves out what no rank said."""

    rank: int | None = None
    attempt: int | None = None
    generation: int | None = None
    node: str | None = None

    def takes(self, file: LogFile) -> bool:
        """Whether a file can hold wanted lines."""
        if file.token is None:
            return (self.rank, self.attempt, self.generation, self.node) == (None,) * 4
        return (
            self.attempt in (None, file.token.attempt)
            and self.generation in (None, file.token.generation)
            and self.node in (None, file.node)
        )

    def wants(self, line: LogLine) -> bool:
        """Whether a line of a wanted file is wanted."""
        return self.rank is None or self.rank == line.rank


def log_files(run: RunDir, selection: Selection | None = None) -> list[LogFile]:
    """The files there are now: the batch logs, then node logs by attempt, generation and node."""
    wanted = selection or Selection()
    files = [LogFile(path) for path in _batch_logs(run)]
    found: list[tuple[Token, str, Path]] = []
    for path in run.attempts_dir.glob("*/*/node-*.log"):
        match = _NODE_LOG.fullmatch(path.name)
        attempt, generation = path.parts[-3], path.parts[-2]
        if match and attempt.isdecimal() and generation.isdecimal():
            found.append((Token(int(attempt), int(generation)), match[1], path))
    files += [LogFile(path, token, node) for token, node, path in sorted(found)]
    return [file for file in files if wanted.takes(file)]


def _batch_logs(run: RunDir) -> list[Path]:
    """What the script or the agent printed: one file for each job, beside the submission."""
    paths = sorted(run.submit_dir.glob("*.log"))
    folder = submission_folder(run)
    if folder is not None:
        jobs = jobs_of(read_ledger(run).events)
        named = [folder / f"{job}.log" for job in jobs.ids]
        if jobs.starter is not None:
            # What submitit's local controller calls it; shared by the runs of a sweep.
            named.append(folder / f"{jobs.starter.pid}_0_log.out")
        paths += [path for path in named if path.is_file()]
    return paths


def submission_folder(run: RunDir) -> Path | None:
    """The folder of the submission that the run came from; the run holds a pointer to it."""
    try:
        pointer = json.loads((run.submit_dir / "submission.json").read_bytes())
        return run.shared_dir / "submissions" / str(pointer["submission"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def parse_line(file: LogFile, text: str) -> LogLine:
    """Split the rank off a line."""
    match = _RANK.match(text) if file.token is not None else None
    if match is None:
        return LogLine(file, None, text)
    return LogLine(file, int(match[1]), text[match.end() :])


def read_lines(file: LogFile) -> Iterator[LogLine]:
    """Every line of a file, also a last one without its end."""
    reader = _Reader(file)
    yield from reader.more()
    yield from reader.rest()


def last_lines(file: LogFile, selection: Selection, count: int) -> list[LogLine]:
    """The last `count` wanted lines of a file, read from its end."""
    lines: list[LogLine] = []
    for text in _backwards(file.path):
        line = parse_line(file, text)
        if selection.wants(line):
            lines.append(line)
            if len(lines) >= count:
                break
    return lines[::-1]


def _backwards(path: Path) -> Iterator[str]:
    """The lines of a file from its last to its first."""
    try:
        with path.open("rb") as source:
            position = source.seek(0, os.SEEK_END)
            rest = b""
            first = True
            while position > 0:
                size = min(_BLOCK_BYTES, position)
                position -= size
                source.seek(position)
                block = source.read(size) + rest
                if first:
                    block = block.removesuffix(b"\n")
                    first = False
                rest, *lines = block.split(b"\n")
                for line in reversed(lines):
                    yield _decode(line)
            if not first:
                yield _decode(rest)
    except FileNotFoundError:
        return


def tail(run: RunDir, selection: Selection, count: int) -> list[LogLine]:
    """The last `count` wanted lines of the run, counted back over its files."""
    lines: list[LogLine] = []
    for file in reversed(log_files(run, selection)):
        if len(lines) >= count:
            break
        lines = last_lines(file, selection, count - len(lines)) + lines
    return lines


def follow(
    run: RunDir,
    selection: Selection,
    *,
    ended: Callable[[], bool],
    count: int | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[LogLine | None]:
    """Every wanted line as it comes, until `ended()` and all is given out.

    `count` begins with the last so many lines (None: from the beginning). None is given out at each
    pause, so that the caller can flush.
    """
    readers: dict[Path, _Reader] = {}
    if count is not None:
        for file in log_files(run, selection):
            readers[file.path] = _Reader.at_end(file)
        starts = {path: reader.offset for path, reader in readers.items()}
        yield from _tail_before(run, selection, count, starts)
    while True:
        # Asked before the files are read: what was written before the end is then read after it.
        over = ended()
        for file in log_files(run, selection):
            reader = readers.setdefault(file.path, _Reader(file))
            yield from _wanted(selection, reader.more())
        if over:
            for reader in readers.values():
                yield from _wanted(selection, reader.rest())
            return
        yield None
        pause(POLL_S)


def _tail_before(
    run: RunDir, selection: Selection, count: int, starts: dict[Path, int]
) -> list[LogLine]:
    """The last lines up to where following starts: what came since is not given out twice."""
    lines: list[LogLine] = []
    for file in reversed(log_files(run, selection)):
        if len(lines) >= count or file.path not in starts:
            continue
        reader = _Reader(file, limit=starts[file.path])
        missing = count - len(lines)
        lines = list(_wanted(selection, reader.more()))[-missing:] + lines
    return lines[-count:] if count else []


def _wanted(selection: Selection, lines: Iterable[LogLine]) -> Iterator[LogLine]:
    return (line for line in lines if selection.wants(line))


def _decode(line: bytes) -> str:
    return line.decode("utf-8", errors="replace").rstrip("\r")


@dataclass
class _Reader:
    """Reads one file on from where it was; keeps the piece of a line that has no end yet."""

    file: LogFile
    offset: int = 0
    limit: int | None = None
    piece: bytes = field(default=b"", repr=False)

    @classmethod
    def at_end(cls, file: LogFile) -> _Reader:
        """A reader that begins after the last whole line there is now."""
        reader = cls(file)
        try:
            size = file.path.stat().st_size
            with file.path.open("rb") as source:
                position = size
                while position > 0:
                    start = max(0, position - _BLOCK_BYTES)
                    source.seek(start)
                    found = source.read(position - start).rfind(b"\n")
                    if found >= 0:
                        reader.offset = start + found + 1
                        break
                    position = start
        except OSError:
            return reader
        return reader

    def more(self) -> Iterator[LogLine]:
        """The lines that were completed since."""
        try:
            with self.file.path.open("rb") as source:
                source.seek(self.offset)
                while block := source.read(self._size()):
                    self.offset += len(block)
                    *lines, self.piece = (self.piece + block).split(b"\n")
                    for line in lines:
                        yield parse_line(self.file, _decode(line))
        except FileNotFoundError:
            return

    def _size(self) -> int:
        if self.limit is None:
            return _BLOCK_BYTES
        return max(0, min(_BLOCK_BYTES, self.limit - self.offset))

    def rest(self) -> Iterator[LogLine]:
        """A last line that never got its end."""
        if self.piece:
            yield parse_line(self.file, _decode(self.piece))
            self.piece = b""
