"""Asks runs to end: the wish goes to the ledger first, then to whoever runs them.

The order matters. An agent that gets SIGTERM cannot tell a cancellation from a preemption by the
signal; it finds the wish in the ledger, saves, and asks for no requeue. Asking twice is the same as
asking once, and a run that has ended already is left alone.
"""

from __future__ import annotations

import getpass
import os
import secrets
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from air_hpc.errors import AirHpcError, EnvironmentFailure
from air_hpc.rundir.events import Kind, record
from air_hpc.rundir.layout import RunDir
from air_hpc.runs.process import ProcessIdentity
from air_hpc.runs.status import RunView, view_run, view_runs
from air_hpc.slurm import jobs as slurm_jobs


@dataclass(frozen=True)
class Cancelled:
    """What became of one request: the run as it was then, and what was done about it."""

    view: RunView
    done: str
    asked: bool

    @property
    def run(self) -> RunDir:
        """The run."""
        return self.view.run


def cancel_runs(runs: Sequence[RunDir], *, timeout_s: float = 60.0) -> list[Cancelled]:
    """Ask every run to end; one scancel for all jobs.

    Raises:
        EnvironmentFailure: Slurm did not take the request. The wish stands in the ledgers, so
            asking again is safe.
    """
    views = view_runs(runs)
    jobs = [job for view in views if _by_scancel(view) for job in view.jobs.ids]
    for view in views:
        if not view.status.terminal and not view.status.cancel_requested:
            _record_wish(view.run)
    try:
        slurm_jobs.cancel(jobs, timeout_s=timeout_s)
    except AirHpcError as error:
        raise EnvironmentFailure(
            f"Slurm did not take the cancellation: {error}",
            next_step="the wish is recorded; run the same command again",
        ) from None
    return [_carried_out(view) for view in views]


def _by_scancel(view: RunView) -> bool:
    """Not inside an allocation: its job is the user's own, and may serve other work."""
    return not view.status.terminal and view.jobs.kind != "allocation"


def _record_wish(run: RunDir) -> None:
    try:
        who = f"{getpass.getuser()}@{socket.gethostname()}"
        record(run, f"cancel-{secrets.token_hex(4)}", Kind.CANCEL_REQUESTED, by=who)
    except OSError as error:
        raise EnvironmentFailure(
            f"cannot write to the ledger of {run.run_id}: {error.strerror}",
            tried=str(run.ledger_dir),
            next_step="only the owner of a run can cancel it",
        ) from None


def _carried_out(view: RunView) -> Cancelled:
    if view.status.terminal:
        return Cancelled(view, f"has ended already ({view.status.state})", asked=False)
    after = view_run(view.run, ask_slurm=False)
    if view.jobs.ids and _by_scancel(view):
        started = view.status.attempt is not None
        what = "saves and ends" if started else "is taken out of the queue"
        return Cancelled(after, f"{what} (scancel {' '.join(view.jobs.ids)})", asked=True)
    if view.jobs.agent is not None:
        return _stop_process(after, view.jobs.agent)
    return Cancelled(after, "was not started yet, and will not be", asked=True)


def _stop_process(view: RunView, agent: ProcessIdentity) -> Cancelled:
    """End a run of this machine by its own agent: the starter may have other runs to start."""
    if agent.alive() is None:
        host = agent.host or "another machine"
        raise EnvironmentFailure(
            f"{view.run.run_id} runs on {host}, which cannot be reached from here",
            next_step=f"the wish is recorded; there, run: kill -TERM {agent.pid}",
        )
    if terminate(agent):
        return Cancelled(view, f"saves and ends (SIGTERM to process {agent.pid})", asked=True)
    after = view_run(view.run)
    return Cancelled(after, f"has ended already ({after.status.state})", asked=False)


def terminate(process: ProcessIdentity) -> bool:
    """SIGTERM to exactly this process; False when it has ended.

    The pid is pinned before its start time is compared, so it cannot become another process's.
    """
    try:
        pinned = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not process.alive():
            return False
        signal.pidfd_send_signal(pinned, signal.SIGTERM)
        return True
    except ProcessLookupError:
        return False
    except PermissionError:
        raise EnvironmentFailure(
            f"process {process.pid} belongs to another user",
            tried=f"SIGTERM to {process.pid}",
            next_step="only the owner of a run can cancel it",
        ) from None
    finally:
        os.close(pinned)
