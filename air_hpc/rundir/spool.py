"""The spool: metrics of a generation on their way to MLflow, one JSON object a line, one file a
token. Rank 0 appends; the shipper, `status` and the progress bar read.

The writer buffers and writes at most once an interval, so that a step costs one append to a list.
`flush` and `sync` come before every commit: a committed step has its metrics on disk.

A metric has the name that MLflow shows. Those that the writer and a reader agree on stand here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from air_hpc.rundir.atomic import fsync_dir, open_file
from air_hpc.rundir.fence import Token
from air_hpc.rundir.layout import RunDir

LOSS = "train/loss"
TOKENS_PER_S = "perf/tokens_per_second"
MFU = "perf/mfu"
"""By the causal convention (`plan.flops`)."""
MFU_PALM = "perf/mfu_palm"


@dataclass(frozen=True)
class Sample:
    """The metrics of one step. `time` is seconds since the epoch; NaN and Inf are kept."""

    token: Token
    step: int
    time: float
    metrics: Mapping[str, float]


def spool_path(run: RunDir, token: Token) -> Path:
    """Where the spool of one generation is."""
    return run.metrics_dir / f"{token}.jsonl"


class SpoolWriter:
    """Appends the metrics of steps to the spool of one token."""

    def __init__(
        self,
        run: RunDir,
        token: Token,
        *,
        interval_s: float = 0.5,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open (create) the file; at most one write an `interval_s` unless flushed."""
        self._clock = clock
        self._interval_s = interval_s
        self._fd = open_file(spool_path(run, token), os.O_WRONLY | os.O_APPEND)
        fsync_dir(run.metrics_dir)  # the name must not be lost either
        self._lines: list[str] = []
        self._unwritten = b""
        self._flushed = clock()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of a step; written when the interval has passed.

        A file system that takes nothing now (full, quota) does not end the step: the metrics are
        kept, and the `flush` before the next save says so.
        """
        now = self._clock()
        values = {
            key: value if math.isfinite(value) else str(value) for key, value in metrics.items()
        }
        self._lines.append(json.dumps({"step": step, "time": now, "metrics": values}))
        if now - self._flushed >= self._interval_s:
            with contextlib.suppress(OSError):
                self.flush()

    def flush(self) -> None:
        """Write what is buffered; `sync` makes it durable.

        Raises OSError when the file system does not take it; what it took is not written again.
        """
        self._flushed = self._clock()
        if self._lines:
            self._unwritten += ("\n".join(self._lines) + "\n").encode()
            self._lines.clear()
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._fd, self._unwritten) :]

    def sync(self) -> None:
        """Wait until what was written is on disk. Safe to call from another thread than `log`."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Write what is left, make it durable and close; a second call does nothing."""
        if self._fd >= 0:
            try:
                self.flush()
                self.sync()
            finally:
                os.close(self._fd)
                self._fd = -1


def read_spool(
    path: Path, offset: int = 0, max_bytes: int | None = None
) -> tuple[list[Sample], int]:
    """The samples from a byte offset on, and the offset to read from next.

    `max_bytes` bounds one reading of a long spool; it must exceed the length of a line.

    A last line without its end is left for the next reading; a line that is no sample is skipped.
    """
    token = Token.parse(path.stem)
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(-1 if max_bytes is None else max_bytes)
    except FileNotFoundError:
        return [], offset
    end = data.rfind(b"\n") + 1
    samples = [
        sample for line in data[:end].split(b"\n") if (sample := _parse(line, token)) is not None
    ]
    return samples, offset + end


def _parse(line: bytes, token: Token) -> Sample | None:
    try:
        body = json.loads(line)
        metrics = {str(key): float(value) for key, value in body["metrics"].items()}
        return Sample(token, int(body["step"]), float(body["time"]), metrics)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def spool_files(run: RunDir) -> list[Path]:
    """The spools of a run, oldest token first."""
    named = []
    for path in run.metrics_dir.glob("*.jsonl"):
        try:
            named.append((Token.parse(path.stem), path))
        except ValueError:
            continue
    return [path for _, path in sorted(named)]


def iterate_samples(run: RunDir) -> Iterator[Sample]:
    """Every sample of every generation, in the order of the tokens."""
    for path in spool_files(run):
        yield from read_spool(path)[0]


def effective_samples(run: RunDir) -> dict[int, Sample]:
    """For each step the sample that counts.

    A generation that begins at a step rolls back what older ones trained from that step on.
    """
    kept: dict[int, Sample] = {}
    for path in spool_files(run):
        samples, _ = read_spool(path)
        if samples:
            first = min(sample.step for sample in samples)
            kept = {step: sample for step, sample in kept.items() if step < first}
            kept.update((sample.step, sample) for sample in samples)
    return dict(sorted(kept.items()))
