"""The questions an agent asks its scheduler: at the start once, and after an end once.

Nothing here polls. A question that gets no answer in time is answered None, and the caller decides
as `recovery.cause` says for a word that cannot be read.
"""

from __future__ import annotations

import time
from typing import Protocol

from air_hpc.agent.environment import JobContext
from air_hpc.errors import EnvironmentFailure
from air_hpc.recovery.cause import SlurmWord
from air_hpc.slurm import jobs, version

ASK_TIMEOUT_S = 10.0


class Scheduler(Protocol):
    """What an agent needs of whoever started it."""

    def end_time(self) -> float | None:
        """When the job's time limit is reached (seconds since the epoch), or None."""
        ...

    def word(self) -> SlurmWord | None:
        """What the scheduler says about this job now, or None."""
        ...

    def holds(self, node: str) -> bool | None:
        """Whether this job still has this node, or None."""
        ...

    def requeue(self) -> bool:
        """Ask for a requeue of this job; whether it was accepted."""
        ...

    def cancel(self) -> bool:
        """Ask for the end of this job; whether it was accepted."""
        ...


class LocalScheduler:
    """No scheduler: the limit is our own, and nobody else restarts anything."""

    def __init__(self, time_limit_min: int | None) -> None:
        self._end = None if time_limit_min is None else time.time() + 60 * time_limit_min

    def end_time(self) -> float | None:
        """The config's own limit from the start of this attempt."""
        return self._end

    def word(self) -> SlurmWord | None:
        """Nobody to ask."""
        return None

    def holds(self, node: str) -> bool | None:
        """Nobody to ask."""
        return None

    def requeue(self) -> bool:
        """Nobody to ask: a local agent starts the next attempt itself."""
        return False

    def cancel(self) -> bool:
        """Nobody to ask."""
        return False


class SlurmScheduler:
    """Asks slurmctld about the agent's own job."""

    def __init__(self, context: JobContext) -> None:
        self._context = context

    def end_time(self) -> float | None:
        """The end that Slurm granted, which a site may have made another than was asked for."""
        record = self._show()
        return None if record is None or record.time_limit_min is None else record.end_time

    def word(self) -> SlurmWord | None:
        """State, restarts, reason and preemption of the own job, with Slurm's version."""
        record = self._show()
        if record is None or record.restarts is None:
            return None
        try:
            installed = version.installed(ASK_TIMEOUT_S)
            number = (installed.major, installed.minor)
        except EnvironmentFailure:
            number = (0, 0)
        return SlurmWord(
            state=record.state,
            restarts=record.restarts,
            reason=record.reason or "",
            preempted=record.preempt_time is not None,
            version=number,
        )

    def holds(self, node: str) -> bool | None:
        """Whether `node` is among the job's: under --no-kill Slurm takes a dead one out."""
        record = self._show()
        return None if record is None else node in record.nodes

    def requeue(self) -> bool:
        """`scontrol requeue` of the own job, ARRAYJOB_TASK in an array."""
        try:
            jobs.requeue(self._context.requeue_id or "", timeout_s=ASK_TIMEOUT_S)
        except EnvironmentFailure:
            return False
        return True

    def cancel(self) -> bool:
        """`scancel` of the own job, ARRAYJOB_TASK in an array."""
        try:
            jobs.cancel([self._context.requeue_id or ""], timeout_s=ASK_TIMEOUT_S)
        except EnvironmentFailure:
            return False
        return True

    def _show(self) -> jobs.JobRecord | None:
        try:
            return jobs.show_job(self._context.job_id or "", timeout_s=ASK_TIMEOUT_S)
        except EnvironmentFailure:
            return None
