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

    `ids` are its jobs as Slurm's commands name them (`123`, `123_4`), oldest first: a chain has
    several. `process` is the agent, or the starter, of a run on this machine.
    """

    ids: tuple[str, ...] = ()
    array_ids: tuple[str, ...] = ()
    process: ProcessIdentity | None = None
    local: bool = False

    @property
    def last(self) -> str | None:
        """The job that was named last."""
        return self.ids[-1] if self.ids else None


def jobs_of(events: Sequence[Event]) -> RunJobs:
    """The jobs and the process that the events name; facts of another type are skipped."""
    ids: list[str] = []
    arrays: list[str] = []
    process: ProcessIdentity | None = None
    local = False
    for event in events:
        if event.kind not in (Kind.SUBMITTED, Kind.ATTEMPT_STARTED):
            continue
        facts = event.facts
        if event.kind == Kind.SUBMITTED:
            local = _kind(facts) == "local"
        found = ProcessIdentity.from_facts(facts)
        process = found or process
        if local:
            continue
        name = _job_name(facts)
        if name is not None and name not in ids:
            ids.append(name)
        array = name.partition("_")[0] if name and "_" in name else None
        if array is not None and array not in arrays:
            arrays.append(array)
    if not ids and process is not None:
        local = True
    return RunJobs(tuple(ids), tuple(arrays), process, local)


def _kind(facts: Mapping[str, Any]) -> str | None:
    value = facts.get("kind") or facts.get("cluster")
    return None if value is None else str(value)


def _job_name(facts: Mapping[str, Any]) -> str | None:
    """An element of an array by the array's id: its own is for Slurm alone."""
    job, array, task = (facts.get(key) for key in ("job_id", "array_job_id", "array_task_id"))
    if isinstance(task, int) and not isinstance(task, bool) and (array or job) is not None:
        return f"{array if array is not None else job}_{task}"
    return None if job is None else str(job)
