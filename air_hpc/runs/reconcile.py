"""What Slurm or this machine knows that the ledger does not: a pure function of both.

The ledger is written by the agents, so it cannot tell what happens when they do not run: a job that
is held, one that was cancelled in the queue, a node that went away with its agents. Reconciling
changes a state only there, and says on whose word. What the ledger ended is never reopened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from air_hpc.rundir.state import RunStatus
from air_hpc.rundir.words import FailureClass, RunState
from air_hpc.slurm.jobs import JobRecord

_WAITING = (RunState.PENDING, RunState.REQUEUED)
_PENDING_IN_SLURM = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "RESV_DEL_HOLD"})
_HELD_STATES = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT"})
_HELD_REASONS = {
    "JobHoldMaxRequeue": "Slurm held it after several launches that failed",
    "launch_failed_requeued_held": "Slurm held it after a launch that failed",
    "JobHeldUser": "it was held by its user",
    "JobHeldAdmin": "it was held by an administrator, who alone can release it",
}
_FAILURE_OF = {
    "CANCELLED": FailureClass.CANCELLED,
    "TIMEOUT": FailureClass.TIME_LIMIT,
    "DEADLINE": FailureClass.TIME_LIMIT,
    "NODE_FAIL": FailureClass.NODE_LOST,
    "BOOT_FAIL": FailureClass.NODE_LOST,
    "OUT_OF_MEMORY": FailureClass.HOST_MEMORY,
    "PREEMPTED": FailureClass.PREEMPTED,
}


SETTLE_S = 60.0
"""A network file system may show a ledger's last word this much late (attribute caching): so long
after a job's own end (COMPLETED, FAILED), its agents' word is waited for."""


@dataclass(frozen=True)
class JobsSeen:
    """What was found out about the jobs of one run.

    `records` are those that were found, oldest job first; `source` is what told of them (squeue,
    sacct, scontrol). `asked` is False where nothing answered: then the ledger stands alone.
    """

    records: tuple[JobRecord, ...] = ()
    source: str = ""
    asked: bool = True


@dataclass(frozen=True)
class Reconciled:
    """A status, on whose word it stands (`source`), and why the run waits or ended (`reason`)."""

    status: RunStatus
    source: str = "ledger"
    reason: str | None = None

    @property
    def changed(self) -> bool:
        """Whether the state is not the ledger's own."""
        return self.source != "ledger"


def with_slurm(status: RunStatus, seen: JobsSeen, now: float) -> Reconciled:
    """The status of a run that was given to Slurm; `now` is the time of the question."""
    if status.terminal:
        return Reconciled(status)
    if not seen.asked:
        return Reconciled(status, reason="Slurm did not answer; this is the ledger's word alone")
    if not seen.records:
        return _forgotten(status)
    # A run whose jobs are chained is alive while any of them is.
    live = [record for record in seen.records if not record.ended]
    if live:
        return _live(status, live[0], seen.source)
    last = seen.records[-1]
    if last.state in ("COMPLETED", "FAILED") and now - (last.end_time or 0) < SETTLE_S:
        return Reconciled(
            status, reason=f"Slurm ended the job ({last.state}); its last word is due"
        )
    return _ended(status, last, seen.source)


def with_process(status: RunStatus, alive: bool | None) -> Reconciled:
    """The status of a run without sbatch, by its agent's process (before that, its starter's).

    `alive` None: it cannot be seen from here.
    """
    if status.terminal:
        return Reconciled(status)
    if alive is None:
        note = "its process is on another machine, or was not recorded: the ledger's word alone"
        return Reconciled(status, reason=note)
    if alive:
        return Reconciled(status)
    if status.state is RunState.REQUEUED:
        return Reconciled(status, reason="it was to be started again, but nothing here does so now")
    evidence = "the agent's process ended without a word; its log may tell why"
    if status.attempt is None:
        evidence = "the agent ended before it said a word; its log may tell why"
    return Reconciled(_closed(status, FailureClass.UNKNOWN, evidence), "process", evidence)


def _live(status: RunStatus, job: JobRecord, source: str) -> Reconciled:
    waiting = status.state in _WAITING
    if _is_held(job):
        told = _HELD_REASONS.get(_reason(job), f"Slurm says {job.reason or job.state}")
        how = f"{told}; release it with: scontrol release {job.id}"
        return Reconciled(replace(status, state=RunState.HELD), source, how)
    if job.state in _PENDING_IN_SLURM:
        reason = _pending_reason(job)
        if waiting:
            return Reconciled(status, reason=reason)
        evidence = "Slurm put the job back into the queue; its agents left no word"
        lost = replace(status, state=RunState.REQUEUED, evidence=evidence)
        return Reconciled(lost, source, f"{evidence}; {reason}" if reason else evidence)
    if job.state == "SUSPENDED":
        return Reconciled(status, reason="Slurm has suspended the job")
    if waiting and job.state == "RUNNING":
        return Reconciled(status, reason="Slurm has started the job; its agents have yet to speak")
    return Reconciled(status)


def _is_held(job: JobRecord) -> bool:
    """Slurm's reasons for it differ by version; all say `held` or `Hold`."""
    told = _reason(job).lower()
    return job.state in _HELD_STATES or (
        job.state == "PENDING" and ("held" in told or "hold" in told)
    )


def _reason(job: JobRecord) -> str:
    """squeue writes some reasons with spaces, scontrol with underscores."""
    return (job.reason or "").replace(" ", "_")


def _pending_reason(job: JobRecord) -> str | None:
    if job.reason is None:
        return None
    if job.reason == "DependencyNeverSatisfied":
        return f"waits for a job that failed and will never start; end it with: scancel {job.id}"
    return f"waits in the queue ({job.reason})"


def _ended(status: RunStatus, job: JobRecord, source: str) -> Reconciled:
    failure_class = _FAILURE_OF.get(job.state, FailureClass.UNKNOWN)
    code = f", exit status {job.exit_code}" if job.exit_code else ""
    on = f" on {', '.join(job.nodes)}" if job.nodes and job.state == "NODE_FAIL" else ""
    if status.state is RunState.PENDING:
        silence = "before its agents said a word"
        if job.nodes:  # else it never left the queue, and there is no log
            silence += "; the batch log may tell why"
    elif status.state is RunState.REQUEUED:
        silence = "and nothing will start the run again, although it was to be requeued"
    else:
        silence = "without a last word of its agents"
    evidence = f"Slurm job {job.id} ended {job.state}{code}{on}, {silence}"
    ended = job.end_time or status.last_event
    return Reconciled(_closed(status, failure_class, evidence, ended), source, evidence)


def _forgotten(status: RunStatus) -> Reconciled:
    """Slurm answered and holds no such job; accounting has none either, or there is none."""
    evidence = "Slurm no longer knows the job, and its agents left no last word"
    closed = _closed(status, FailureClass.UNKNOWN, evidence)
    return Reconciled(closed, "squeue", evidence)


def _closed(
    status: RunStatus, failure_class: FailureClass, evidence: str, ended: float | None = None
) -> RunStatus:
    cancelled = failure_class is FailureClass.CANCELLED or (
        status.cancel_requested and failure_class is FailureClass.UNKNOWN
    )
    return replace(
        status,
        state=RunState.CANCELLED if cancelled else RunState.FAILED,
        failure_class=FailureClass.CANCELLED if cancelled else failure_class,
        evidence=evidence,
        ended=ended or status.last_event,
    )


def newest_known(records: Sequence[JobRecord]) -> JobRecord | None:
    """The record that speaks for the run: the first that has not ended, or the last."""
    live = [record for record in records if not record.ended]
    return live[0] if live else (records[-1] if records else None)
