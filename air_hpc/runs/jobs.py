"""The jobs and the process that a run's ledger names: what to ask Slurm and the machine about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from air_hpc.rundir.events import Event, Kind
from air_hpc.runs.process import ProcessIdentity


@dataclass(frozen=True)
class RunJobs:
    """Where a run was put.

    `kind` is the cluster's: `slurm`, `local`, `allocation`. `ids` are its Slurm jobs as commands
    name them (`123`, `123_4`), oldest first: a chain has several. `agent` is the process of the
    last attempt's coordinator; `starter` what starts it on this machine, for all runs of a sweep.
    """

    kind: str | None = None
    ids: tuple[str, ...] = ()
    array_ids: tuple[str, ...] = ()
    agent: ProcessIdentity | None = None
    starter: ProcessIdentity | None = None

    @property
    def local(self) -> bool:
        """Whether the run is this machine's, without Slurm."""
        return self.kind == "local"

    @property
    def process(self) -> ProcessIdentity | None:
        """The process that the run stands or falls with: its agent's, before that the starter's."""
        return self.agent or self.starter

    def alive(self) -> bool | None:
        """Whether anything of this machine runs the run; None where that cannot be seen."""
        told = [p.alive() for p in (self.agent, self.starter) if p is not None]
        # An agent that is gone has ended its run, whatever else its starter does.
        return next((word for word in told if word is not None), None)

    @property
    def last(self) -> str | None:
        """The job that was named last."""
        return self.ids[-1] if self.ids else None


def jobs_of(events: Sequence[Event]) -> RunJobs:
    """The jobs and the processes that the events name; facts of another type are skipped."""
    kind: str | None = None
    ids: list[str] = []
    arrays: list[str] = []
    agent: ProcessIdentity | None = None
    starter: ProcessIdentity | None = None
    for event in events:
        facts = event.facts
        if event.kind == Kind.SUBMITTED:
            kind = str(facts.get("cluster") or "slurm")
            starter = ProcessIdentity.from_facts(facts) or starter
            # Without sbatch the "job" of a submission is a process of this machine.
            slurm = kind == "slurm"
        elif event.kind == Kind.ATTEMPT_STARTED:
            scheduler = str(facts.get("scheduler") or kind or "slurm")
            kind = kind or scheduler
            agent = ProcessIdentity.from_facts(facts) or agent
            slurm = scheduler != "local"
        else:
            continue
        name = _job_name(facts) if slurm else None
        if name is None or name in ids:
            continue
        ids.append(name)
        array, underscore, _ = name.partition("_")
        if underscore and array not in arrays:
            arrays.append(array)
    return RunJobs(kind, tuple(ids), tuple(arrays), agent, starter)


def _job_name(facts: Mapping[str, Any]) -> str | None:
    """An element of an array by the array's id: its own is for Slurm alone."""
    job, array, task = (facts.get(key) for key in ("job_id", "array_job_id", "array_task_id"))
    if isinstance(task, int) and not isinstance(task, bool) and (array or job) is not None:
        return f"{array if array is not None else job}_{task}"
    return None if job is None else str(job)
