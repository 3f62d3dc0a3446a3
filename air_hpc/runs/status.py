"""The status of runs: each ledger folded, all of them reconciled with Slurm by one question.

Slurm is asked in turn: squeue for every job of every run at once, sacct for what squeue no longer
holds, scontrol for a few that are still missing. Where nothing answers, the run's own files speak
alone, and the status says so. A ledger that Slurm contradicts is read once more: its last word may
have been written between the two questions.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from air_hpc.errors import AirHpcError
from air_hpc.rundir.events import Event, read_ledger
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.spool import LOSS, MFU, MFU_PALM, TOKENS_PER_S
from air_hpc.rundir.state import RunStatus, fold
from air_hpc.rundir.words import RunState
from air_hpc.runs.jobs import RunJobs, jobs_of
from air_hpc.runs.logs import submission_folder
from air_hpc.runs.progress import Progress, last_progress
from air_hpc.runs.reconcile import JobsSeen, Reconciled, newest_known, with_process, with_slurm
from air_hpc.slurm import jobs as slurm_jobs
from air_hpc.slurm.jobs import JobRecord

QUERY_TIMEOUT_S = 20.0
_SCONTROL_AT_MOST = 8
"""`scontrol show job` takes one job a call: more than these few would be a loop on the site."""


@dataclass(frozen=True)
class RunView:
    """One run as it stands now, for people and for `--json`."""

    run: RunDir
    status: RunStatus
    jobs: RunJobs
    source: str
    reason: str | None
    progress: Progress | None
    slurm: JobRecord | None = None
    unreadable_lines: int = 0

    @property
    def step(self) -> int | None:
        """The last step done: the spool's where the present generation got further."""
        folded, spool = self.status.step, self.progress
        if spool is None:
            return folded
        if (spool.token.attempt, spool.token.generation) != (
            self.status.attempt,
            self.status.generation,
        ):
            return folded
        return spool.step if folded is None else max(folded, spool.step)

    @property
    def nodes(self) -> tuple[str, ...] | None:
        """The nodes of the present (or last) start."""
        if self.status.nodes is not None:
            return self.status.nodes
        return self.slurm.nodes if self.slurm is not None and self.slurm.nodes else None

    def to_json(self) -> dict[str, Any]:
        """Plain data: the fields scripts rely on first; what is not known is None."""
        status = self.status
        metrics = self.progress.metrics if self.progress else {}
        return {
            "run_id": self.run.run_id,
            "state": str(status.state),
            "step": self.step,
            "attempt": status.attempt,
            "generation": status.generation,
            "job_id": self.jobs.last,
            "nodes": None if self.nodes is None else list(self.nodes),
            "mlflow_run_id": status.mlflow_run_id,
            "run_dir": str(self.run.path),
            "source": self.source,
            "reason": self.reason,
            "committed_step": status.committed_step,
            "resume_step": status.resume_step,
            "failure_class": None if status.failure_class is None else str(status.failure_class),
            "verdict": None if status.verdict is None else str(status.verdict),
            "evidence": status.evidence,
            "cancel_requested": status.cancel_requested,
            "submitted": status.submitted,
            "started": status.started,
            "ended": status.ended,
            "goodput": status.time.goodput,
            "time_s": {
                name.removesuffix("_s"): value for name, value in asdict(status.time).items()
            },
            "loss": metrics.get(LOSS),
            "tokens_per_second": metrics.get(TOKENS_PER_S),
            "mfu": {
                "causal": metrics.get(MFU),
                "palm": metrics.get(MFU_PALM),
            },
            "rolled_back": [list(steps) for steps in status.rolled_back],
            "bad_steps": list(status.bad_steps),
            "stragglers": [asdict(slow) for slow in status.stragglers],
            "unreadable_ledger_lines": self.unreadable_lines,
        }


@dataclass(frozen=True)
class _Read:
    run: RunDir
    events: tuple[Event, ...]
    unreadable_lines: int
    jobs: RunJobs
    status: RunStatus


def view_run(run: RunDir, *, ask_slurm: bool = True) -> RunView:
    """The status of one run."""
    return view_runs([run], ask_slurm=ask_slurm)[0]


def view_runs(
    runs: Sequence[RunDir],
    *,
    ask_slurm: bool = True,
    timeout_s: float = QUERY_TIMEOUT_S,
    clock: Callable[[], float] = time.time,
) -> list[RunView]:
    """The status of runs, in their order. Never raises because Slurm does not answer."""
    reads = [_read(run, clock()) for run in runs]
    wanted = [job for read in reads if not read.status.terminal for job in read.jobs.ids]
    found = _Lookup.ask(wanted, timeout_s) if ask_slurm else _Lookup(answered=False)
    views = []
    for read in reads:
        outcome = _reconcile(read, found, clock())
        if outcome.changed:
            read = _read(read.run, clock())
            outcome = _reconcile(read, found, clock())
        views.append(_view(read, outcome, found))
    return views


def _read(run: RunDir, now: float) -> _Read:
    ledger = read_ledger(run)
    return _Read(
        run,
        ledger.events,
        ledger.unreadable_lines,
        jobs_of(ledger.events),
        fold(ledger.events, now),
    )


def _reconcile(read: _Read, found: _Lookup, now: float) -> Reconciled:
    if read.status.terminal:
        return Reconciled(read.status, reason=read.status.evidence or None)
    if read.jobs.local:
        return with_process(read.status, read.jobs.alive())
    if read.jobs.kind == "allocation" and read.jobs.alive() is False:
        # The allocation may live on, for other work.
        return with_process(read.status, False)
    if not read.jobs.ids:
        return Reconciled(read.status, reason=_not_submitted(read))
    return with_slurm(read.status, found.seen(read.jobs.ids), now)


def _not_submitted(read: _Read) -> str | None:
    """Its submission was cut off before sbatch answered, or the script is kept for later."""
    folder = submission_folder(read.run)
    if read.status.state is not RunState.PENDING or folder is None:
        return None
    where = shlex.quote(str(read.run.runs_dir))
    return f"not submitted yet; to finish it: run --resume {folder.name} --runs-dir {where}"


def _view(read: _Read, outcome: Reconciled, found: _Lookup) -> RunView:
    status = outcome.status
    if outcome.changed and status.terminal:
        # The clock of a run that is over stands still where it ended.
        spent = fold(read.events, status.ended).time
        status = replace(status, time=spent)
    return RunView(
        run=read.run,
        status=status,
        jobs=read.jobs,
        source=outcome.source,
        reason=outcome.reason,
        progress=last_progress(read.run),
        slurm=newest_known(found.seen(read.jobs.ids).records),
        unreadable_lines=read.unreadable_lines,
    )


@dataclass(frozen=True)
class _Lookup:
    """Slurm's answers, by the name of the job."""

    answered: bool = True
    records: tuple[tuple[str, JobRecord, str], ...] = ()

    @classmethod
    def ask(cls, wanted: Iterable[str], timeout_s: float) -> _Lookup:
        names = sorted(set(wanted))
        if not names:
            return cls()
        records: list[tuple[str, JobRecord, str]] = []
        answered = False
        for source, ask in (
            ("squeue", slurm_jobs.queue),
            ("sacct", slurm_jobs.accounting),
            ("scontrol", _show),
        ):
            known = {name for name, _, _ in records}
            missing = [name for name in names if name not in known]
            if not missing:
                break
            try:
                answer = ask(missing, timeout_s=timeout_s)
            except AirHpcError:
                continue
            # Accounting alone does not prove that a job is gone: it may lag behind.
            answered = answered or source != "sacct"
            records += [(n, answer[n], source) for n in missing if answer and n in answer]
        return cls(answered, tuple(records))

    def seen(self, names: Sequence[str]) -> JobsSeen:
        mine = {name: (record, source) for name, record, source in self.records if name in names}
        ordered = [mine[name] for name in names if name in mine]
        if not ordered:
            return JobsSeen(asked=self.answered)
        return JobsSeen(tuple(record for record, _ in ordered), ordered[-1][1])


def _show(names: Sequence[str], *, timeout_s: float) -> dict[str, JobRecord]:
    found = {}
    for name in names[:_SCONTROL_AT_MOST]:
        record = slurm_jobs.show_job(name, timeout_s=timeout_s)
        if record is not None:
            found[name] = record
    return found
