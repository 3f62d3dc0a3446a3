"""How far a run is, read from the end of its newest spool: a few kilobytes, whatever its length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from air_hpc.rundir.fence import Token
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.spool import Sample, read_spool, spool_files

TAIL_BYTES = 16 * 1024


@dataclass(frozen=True)
class Progress:
    """The last step in the spool and its metrics (by their MLflow names)."""

    token: Token
    step: int
    time: float
    metrics: Mapping[str, float]


def tail_samples(path: Path, size: int = TAIL_BYTES) -> list[Sample]:
    """The last samples of one spool file."""
    try:
        length = path.stat().st_size
    except OSError:
        return []
    # The first line may be cut: the reader skips what is no sample.
    return read_spool(path, max(0, length - size))[0]


def last_progress(run: RunDir) -> Progress | None:
    """The newest step that was logged, or None before the first.

    A metric that is not logged at every step has its last value of the tail.
    """
    for path in reversed(spool_files(run)):
        samples = tail_samples(path)
        if samples:
            metrics: dict[str, float] = {}
            for sample in samples:
                metrics.update(sample.metrics)
            last = samples[-1]
            return Progress(last.token, last.step, last.time, metrics)
    return None
