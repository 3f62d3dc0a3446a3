"""What a submission came to, for whoever asked for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from air_hpc.errors import Problem
from air_hpc.launch.submission import Submission


@dataclass(frozen=True)
class Submitted:
    """One run as submitted. `job_id` is None while its part waits for room in the queue.

    `job_id` is the array's for an element; `job_ids` are those of all links of a chain. A run
    that was started without sbatch has none: `pid` is the process that started it.
    """

    run_id: str
    run_dir: Path
    job_id: str | None
    array_task: int | None
    job_ids: tuple[str, ...] = ()
    pid: int | None = None

    @property
    def job(self) -> str | None:
        """How Slurm's commands name it."""
        if self.job_id is None or self.array_task is None:
            return self.job_id
        return f"{self.job_id}_{self.array_task}"


@dataclass(frozen=True)
class Result:
    """What a submission came to; `complete` is false when parts wait for room in the queue."""

    submission_id: str
    runs: tuple[Submitted, ...]
    warnings: tuple[Problem, ...] = ()
    complete: bool = True


def result_of(current: Submission, warnings: tuple[Problem, ...]) -> Result:
    """The result that a submission's record amounts to."""
    runs = {}
    for number, part in enumerate(current.chunks):
        ids = tuple(a.job_id for a in current.asks if a.chunk == number and a.job_id is not None)
        pid = None
        if current.kind != "slurm":
            pid, ids = (int(ids[0]) if ids else None), ()
        for index, run_id in enumerate(part.runs):
            runs[run_id] = Submitted(
                run_id=run_id,
                run_dir=Path(current.runs_dir) / run_id,
                job_id=ids[0] if ids else None,
                array_task=index if part.array else None,
                job_ids=ids,
                pid=pid,
            )
    ordered = tuple(runs[run_id] for run_id in current.run_ids)
    return Result(current.id, ordered, warnings, current.complete)
