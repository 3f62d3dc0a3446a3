"""Ships one run to one store, a pass at a time.

A pass reads what is new in the ledger and the spools, decides sample by sample (`coverage`), sends
in batches, and then notes how far it came (`position`). Between the sending and the note a crash
may fall: the next pass sends the same rows again, and the store drops them. Samples that became
dead in between are looked up in the store, which is the truth.

Two shippers of one run (a login node's `sync` and the agent's own) send the same rows, so they
agree but for one window: samples of an older generation that one is sending in the very moment
in which the other ships the newer one's. Then a step may stand twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from air_hpc.plan.frozen import FrozenRun
from air_hpc.rundir.events import Event, Kind, read_ledger, record
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.state import RunStatus, fold
from air_hpc.rundir.words import TERMINAL, RunState
from air_hpc.tracking.artifacts import collect
from air_hpc.tracking.coverage import (
    count_steps,
    lasts_from_events,
    rolled_back_ranges,
)
from air_hpc.tracking.describe import STATUS, control_metrics, params, summary_metrics, tags
from air_hpc.tracking.position import (
    ControlPoint,
    Position,
    load_position,
    newer,
    position_path,
    save_position,
)
from air_hpc.tracking.samples import SampleShipper, first_steps
from air_hpc.tracking.store import Row, RunLost, Store, StoreUnavailable

CONTROL_INTERVAL_S = 10.0
"""Between two points of goodput and its kin."""


@dataclass(frozen=True)
class Pass:
    """What one pass did. `rows` counts metrics sent; `final`: nothing will ever be left to do."""

    mlflow_run_id: str
    state: RunState
    rows: int
    final: bool


class RunShipper:
    """Ships one run. `writer` names this process in the run's ledger; `say` takes a warning."""

    def __init__(
        self,
        run: RunDir,
        frozen: FrozenRun,
        store: Store,
        *,
        writer: str,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.run = run
        self._frozen = frozen
        self._store = store
        self._writer = writer
        self._say = say
        self._clock = clock
        self._path = position_path(run, store.identity)
        self._position: Position | None = None
        self._resolved = False
        self._seen: tuple[tuple[str, int], ...] = ()
        self._samples = SampleShipper(run)
        self._said: set[str] = set()

    def use(self, store: Store) -> None:
        """Share a connection with other runs of the same store and experiment."""
        self._store = store

    def ship(self, observed: RunState | None = None) -> Pass:
        """One pass. `observed` is the state by a better witness than a ledger that stopped short.

        Raises StoreUnavailable (try again), RunDeleted, EnvironmentFailure.
        """
        seen = self._sizes()
        events = read_ledger(self.run).events
        status = fold(events, self._clock())
        state = observed if observed is not None and not status.terminal else status.state
        position = newer(load_position(self._path), self._position)
        if position is not None and position.final:
            return Pass(position.mlflow_run_id, state, 0, True)
        try:
            position = self._open(position, status)
            rows = self._ship_all(position, events, status, state)
        except RunLost as error:
            self._resolved, self._position = False, None
            self._path.unlink(missing_ok=True)
            raise StoreUnavailable(str(error)) from None
        self._seen = seen
        return Pass(position.mlflow_run_id, state, rows, position.final)

    def changed(self) -> bool:
        """Whether there is anything to do since the last pass, judged by the sizes of files."""
        position = self._position
        due = position is None or self._clock() - position.control_time >= CONTROL_INTERVAL_S
        return due or self._sizes() != self._seen

    def _sizes(self) -> tuple[tuple[str, int], ...]:
        found = []
        for folder in (self.run.ledger_dir, self.run.metrics_dir):
            for path in sorted(folder.glob("*.jsonl")):
                try:
                    found.append((path.name, path.stat().st_size))
                except FileNotFoundError:
                    continue
        return tuple(found)

    # -- the run in MLflow -----------------------------------------------------------------------

    def _open(self, position: Position | None, status: RunStatus) -> Position:
        """Find or make the MLflow run, once a process; a position of another run is void."""
        if self._resolved and position is not None:
            self._position = position
            return position
        start = status.started or status.submitted or self._clock()
        mlflow_run_id = self._store.find_or_create_run(self.run.run_id, start)
        if position is None or position.mlflow_run_id != mlflow_run_id:
            position = Position(mlflow_run_id)
        self._position, self._resolved = position, True
        return position

    def _ship_all(
        self, position: Position, events: Sequence[Event], status: RunStatus, state: RunState
    ) -> int:
        self._announce(position, events)
        self._describe(position)
        starts = first_steps(self.run, events)
        rows = self._samples.ship(self._store, position, starts, self._save)
        lasts = {**position.lasts}
        for token, step in lasts_from_events(events).items():
            lasts[token] = max(step, lasts.get(token, step))
        rolled_back = rolled_back_ranges(starts, lasts)
        final = status.terminal
        rows += self._ship_control(position, status, count_steps(rolled_back), final)
        self._ship_tags(position, status, events, state, rolled_back)
        self._ship_status(position, status, state)
        if final:
            self._ship_artifacts(position)
            position.final = True
            self._save(position)
        return rows

    def _announce(self, position: Position, events: Sequence[Event]) -> None:
        """Note the MLflow run in the ledger, once."""
        known = any(
            event.kind == Kind.TRACKING_STARTED
            and event.facts.get("mlflow_run_id") == position.mlflow_run_id
            for event in events
        )
        if not known:
            try:
                record(
                    self.run,
                    self._writer,
                    Kind.TRACKING_STARTED,
                    mlflow_run_id=position.mlflow_run_id,
                    uri=self._store.uri.shown,
                )
            except OSError as error:
                self._once(f"cannot write the ledger of {self.run.run_id}: {error.strerror}")

    def _describe(self, position: Position) -> None:
        if not position.described:
            found = params(self._frozen.spec, self._frozen.plan)
            self._store.log_params(position.mlflow_run_id, found)
            position.described = True
            self._save(position)
            self._ship_artifacts(position)

    def _ship_artifacts(self, position: Position) -> None:
        """Script, config, diff and versions; their loss is said, and holds nothing up."""
        if position.artifacts_done:
            return
        try:
            for name, text in collect(self.run, self._frozen.spec.cluster.env):
                self._store.log_text(position.mlflow_run_id, name, text)
            position.artifacts_done = True
        except StoreUnavailable as error:
            self._once(f"artifacts of {self.run.run_id} are not in MLflow: {error}")

    # -- the run as a whole ----------------------------------------------------------------------

    def _ship_control(
        self, position: Position, status: RunStatus, rolled_back_steps: int, final: bool
    ) -> int:
        """Goodput and its kin, at most once a step.

        A point is noted before it is sent, and sent as it was noted until the store takes it. The
        last step of the run is left to its final point.
        """
        now = self._clock()
        step = max(max(position.lasts.values(), default=0), status.step or 0)
        if position.pending is None:
            if final:
                step = max(step, position.control_step + 1)
            elif (
                step <= position.control_step
                or step >= self._frozen.spec.train.steps
                or now - position.control_time < CONTROL_INTERVAL_S
            ):
                return 0
            metrics = control_metrics(
                status,
                self._frozen.plan,
                allocated_nodes=self._frozen.spec.allocated_nodes,
                rolled_back_steps=rolled_back_steps,
                largest_difference=position.largest_difference,
            )
            if final:
                reached = status.step if status.step is not None else step
                metrics |= summary_metrics(
                    status, self._frozen.plan, step=reached, last_loss=position.last_loss
                )
            at = (status.ended or now) if final else now
            position.pending = ControlPoint(step, at, metrics, final)
            self._save(position)
        point = position.pending
        rows = [Row(k, v, int(point.time * 1000), point.step) for k, v in point.metrics.items()]
        self._store.log_rows(position.mlflow_run_id, rows)
        position.pending = None
        position.control_step = point.step
        position.control_time = now
        self._save(position)
        if final and not point.final:
            return len(rows) + self._ship_control(position, status, rolled_back_steps, final)
        return len(rows)

    def _ship_tags(
        self,
        position: Position,
        status: RunStatus,
        events: Sequence[Event],
        state: RunState,
        rolled_back: Sequence[tuple[int, int]],
    ) -> None:
        found = tags(
            self.run,
            status,
            events,
            state=state,
            rolled_back=rolled_back,
            overrides=self._frozen.overrides,
            config_hash=self._frozen.config_hash,
            extra=self._frozen.extra,
        )
        changed = {key: value for key, value in found.items() if position.tags.get(key) != value}
        if changed:
            self._store.set_tags(position.mlflow_run_id, changed)
            position.tags.update(changed)
            self._save(position)

    def _ship_status(self, position: Position, status: RunStatus, state: RunState) -> None:
        word = STATUS[state]
        if word != position.status:
            ended = (status.ended or self._clock()) if state in TERMINAL else None
            self._store.set_status(position.mlflow_run_id, word, ended)
            position.status = word
            self._save(position)

    def _save(self, position: Position) -> None:
        try:
            save_position(self._path, position)
        except OSError as error:
            # Nothing is lost: what was sent is sent again, and changes nothing.
            self._once(f"cannot note what was shipped of {self.run.run_id}: {error.strerror}")

    def _once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)
