"""Ships many runs in one foreground process: what `python -m air_hpc sync` does on a login node.

It uses the same passes as the agent's shipper, so it may run while the runs do, and beside their
own shippers. One run that cannot be read or shipped stops no other: it is named in the summary.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from air_hpc.errors import AirHpcError, BadInput, EnvironmentFailure
from air_hpc.plan.frozen import FrozenRun, read_run_yaml
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.words import RunState
from air_hpc.tracking.shipper import Pass, RunShipper
from air_hpc.tracking.store import Store, StoreUnavailable
from air_hpc.tracking.uri import parse_uri

MAX_BACK_OFF_S = 60.0


@dataclass(frozen=True)
class SyncedRun:
    """What became of one run. `rows` counts the metrics sent; `error` is None where all is well."""

    run_id: str
    uri: str | None
    mlflow_run_id: str | None
    state: RunState | None
    rows: int
    final: bool
    error: str | None = None


@dataclass(frozen=True)
class SyncSummary:
    """What a sync did, run by run, in the order that they were given."""

    runs: tuple[SyncedRun, ...]

    @property
    def rows(self) -> int:
        """Metrics sent."""
        return sum(run.rows for run in self.runs)

    @property
    def failed(self) -> tuple[SyncedRun, ...]:
        """The runs that could not be shipped."""
        return tuple(run for run in self.runs if run.error is not None)


def load_frozen(run: RunDir) -> FrozenRun:
    """run.yaml of a run; raises BadInput for one that is missing or damaged."""
    try:
        text = run.run_yaml.read_text()
    except OSError as error:
        raise BadInput.single("run", run.path, f"cannot read run.yaml: {error.strerror}") from None
    return read_run_yaml(text, str(run.run_yaml))


def writer_name() -> str:
    """This process's name in ledgers."""
    return f"tracking-{socket.gethostname().split('.')[0]}-{os.getpid()}"


def default_uri(run: RunDir) -> str:
    """Where a run is shipped whose config names no store: a SQLite file in the runs folder."""
    return f"sqlite:///{run.runs_dir / 'mlflow.db'}"


class _Member:
    """One run of a sync and how it stands."""

    def __init__(
        self, run: RunDir, uri: str | None, experiment: str | None, say: Callable[[str], None]
    ) -> None:
        self.run = run
        self.rows = 0
        self.last: Pass | None = None
        self.error: str | None = None
        self.broken = False
        self.shipper: RunShipper | None = None
        self.store: Store | None = None
        try:
            frozen = load_frozen(run)
            address = uri or frozen.plan.tracking_uri or default_uri(run)
            self.store = Store(address, experiment or frozen.spec.tracking.experiment)
            self.shipper = RunShipper(run, frozen, self.store, writer=writer_name(), say=say)
        except AirHpcError as error:
            self.error, self.broken = str(error), True

    @property
    def done(self) -> bool:
        return self.broken or (self.last is not None and self.last.final)

    def ship(self, observed: RunState | None) -> None:
        """One pass; its failure is kept, and a store that does not answer raises."""
        if self.shipper is None or self.done:
            return
        try:
            self.last = self.shipper.ship(observed)
            self.rows += self.last.rows
            self.error = None
        except StoreUnavailable as error:
            self.error = str(error)
            raise
        except AirHpcError as error:
            self.error, self.broken = str(error), True
        except OSError as error:
            self.error = f"cannot read the run directory: {error}"

    def summary(self) -> SyncedRun:
        return SyncedRun(
            run_id=self.run.run_id,
            uri=None if self.store is None else self.store.uri.shown,
            mlflow_run_id=None if self.last is None else self.last.mlflow_run_id,
            state=None if self.last is None else self.last.state,
            rows=self.rows,
            final=self.last is not None and self.last.final,
            error=self.error,
        )


def sync_runs(
    runs: Sequence[RunDir],
    *,
    uri: str | None = None,
    experiment: str | None = None,
    follow: bool = False,
    interval_s: float = 10.0,
    state_of: Callable[[RunDir], RunState | None] | None = None,
    on_run: Callable[[SyncedRun], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> SyncSummary:
    """Ship what is new of `runs`, whether they run, wait or are over.

    `uri` and `experiment` override what each run's config says. With `follow` it goes on until
    every run is over or `should_stop()`; else it is one pass. `state_of` may tell a run's state by
    a better witness than its ledger (the scheduler's word). `on_run` hears of each run after each
    of its passes, `say` of warnings.

    Raises:
        BadInput: `uri` is not a store.
        EnvironmentFailure: mlflow is not installed, or (without `follow`) a store does not answer.
    """
    if uri is not None:
        parse_uri(uri)
    members = [_Member(run, uri, experiment, say) for run in runs]
    _share_connections(members)
    stop = should_stop or (lambda: False)
    back_off_s = interval_s
    while True:
        down: str | None = None
        for member in members:
            if stop():
                break
            down = _pass(member, state_of) or down
            if down is not None and not follow:
                break
            if on_run is not None:
                on_run(member.summary())
        if down is not None and not follow:
            raise EnvironmentFailure(
                down,
                tried="one pass over the runs; nothing is lost, it waits in the run directories",
                next_step="start the store, or name another one with tracking.uri=…",
            )
        if not follow or stop() or all(member.done for member in members):
            return SyncSummary(tuple(member.summary() for member in members))
        back_off_s = min(MAX_BACK_OFF_S, back_off_s * 2) if down else interval_s
        _sleep(back_off_s, stop)


def _share_connections(members: Sequence[_Member]) -> None:
    """Runs of one store and experiment use one connection."""
    stores: dict[str, Store] = {}
    for member in members:
        if member.shipper is not None and member.store is not None:
            member.store = stores.setdefault(member.store.identity, member.store)
            member.shipper.use(member.store)


def _pass(member: _Member, state_of: Callable[[RunDir], RunState | None] | None) -> str | None:
    """One pass of one run; the reason when its store does not answer."""
    if member.done or (member.shipper is not None and not member.shipper.changed()):
        return None
    try:
        member.ship(state_of(member.run) if state_of is not None else None)
    except StoreUnavailable as error:
        return str(error)
    return None


def _sleep(seconds: float, stop: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while not stop() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.2))
