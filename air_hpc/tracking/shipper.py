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

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from air_hpc.plan.frozen import FrozenRun
from air_hpc.rundir.events import Event, Kind, read_ledger, record
from air_hpc.rundir.fence import Token
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.spool import Sample, read_spool, spool_files, spool_path
from air_hpc.rundir.state import RunStatus, fold
from air_hpc.rundir.words import TERMINAL, RunState
from air_hpc.tracking.artifacts import collect
from air_hpc.tracking.coverage import (
    count_steps,
    cut_of,
    difference,
    lasts_from_events,
    rolled_back_ranges,
    starts_from_events,
)
from air_hpc.tracking.describe import LOSS, STATUS, control_metrics, params, summary_metrics, tags
from air_hpc.tracking.position import (
    ControlPoint,
    Position,
    load_position,
    newer,
    position_path,
    save_position,
)
from air_hpc.tracking.store import Row, RunLost, Store, StoreUnavailable

CHUNK_BYTES = 256 * 1024
"""Of a spool, read, sent and noted at a time: what a crash sends again at most."""

CONTROL_INTERVAL_S = 10.0
"""Between two points of goodput and its kin."""

_NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]")
"""What MLflow refuses in a metric's name (mlflow.utils.validation)."""


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
        self._old_losses: dict[Token, tuple[int, dict[int, float]]] = {}
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
        starts = self._starts(events)
        rows = self._ship_samples(position, starts)
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

    # -- samples ---------------------------------------------------------------------------------

    def _starts(self, events: Sequence[Event]) -> dict[Token, int]:
        """The first step of each generation: by the ledger, else by its first sample."""
        starts = starts_from_events(events)
        for path in spool_files(self.run):
            token = Token.parse(path.stem)
            if token not in starts:
                samples, _ = read_spool(path, 0, CHUNK_BYTES)
                if samples:
                    starts[token] = samples[0].step
        return starts

    def _ship_samples(self, position: Position, starts: Mapping[Token, int]) -> int:
        sent = 0
        for path in spool_files(self.run):
            token = Token.parse(path.stem)
            while True:
                offset = position.offsets.get(token, 0)
                samples, end = read_spool(path, offset, CHUNK_BYTES)
                if end == offset:
                    break
                sent += self._ship_chunk(position, token, samples, starts)
                position.offsets[token] = end
                self._save(position)
        return sent

    def _ship_chunk(
        self,
        position: Position,
        token: Token,
        samples: Sequence[Sample],
        starts: Mapping[Token, int],
    ) -> int:
        cut = cut_of(token, starts)
        rows: dict[tuple[str, int], Row] = {}
        shipped, dead = [], []
        for sample in samples:
            owner = position.coverage.owner(sample.step)
            if owner is not None and owner != token:
                self._compare(position, sample, owner, starts)
            elif sample.step >= cut:
                dead.append(sample)
            else:
                shipped.append(sample)
            if sample.step < cut:
                position.last_loss = sample.metrics.get(LOSS, position.last_loss)
        for sample in shipped:
            for row in _rows(sample):
                rows.setdefault((row.key, row.step), row)
        self._store.log_rows(position.mlflow_run_id, list(rows.values()))
        for sample in shipped + self._among_the_shipped(position, dead):
            position.coverage.add(token, sample.step)
        if samples:
            highest = max(sample.step for sample in samples)
            position.lasts[token] = max(highest, position.lasts.get(token, highest))
        return len(rows)

    def _among_the_shipped(self, position: Position, dead: Sequence[Sample]) -> list[Sample]:
        """Those rolled-back samples that reached the store before a shipper's crash."""
        present: dict[str, set[tuple[int, int]]] = {}
        found = []
        for sample in dead:
            rows = _rows(sample)
            if not rows:
                continue
            row = next((row for row in rows if row.key == LOSS), rows[0])
            if row.key not in present:
                present[row.key] = self._store.present(position.mlflow_run_id, row.key)
            if (row.step, row.time_ms) in present[row.key]:
                found.append(sample)
        return found

    def _compare(
        self, position: Position, sample: Sample, owner: Token, starts: Mapping[Token, int]
    ) -> None:
        """Hold a re-run step against what was shipped of it."""
        again = sample.metrics.get(LOSS)
        if again is None:
            return
        first, losses = self._old_losses.get(owner, (None, {}))
        if first is None or sample.step < first:
            first = min([s for t, s in starts.items() if t > owner] + [sample.step])
            losses = self._read_losses(owner, first)
            self._old_losses[owner] = first, losses
        shipped = losses.get(sample.step)
        if shipped is not None:
            gap = difference(shipped, again)
            position.largest_difference = max(gap, position.largest_difference or 0.0)

    def _read_losses(self, token: Token, first: int) -> dict[int, float]:
        losses: dict[int, float] = {}
        offset = 0
        while True:
            samples, end = read_spool(spool_path(self.run, token), offset, CHUNK_BYTES)
            if end == offset:
                return losses
            offset = end
            for sample in samples:
                if sample.step >= first and LOSS in sample.metrics:
                    losses.setdefault(sample.step, sample.metrics[LOSS])

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


def _rows(sample: Sample) -> list[Row]:
    """A sample's metrics, under names that MLflow takes."""
    time_ms = int(sample.time * 1000)
    return [
        Row(_NOT_IN_A_NAME.sub("_", key)[:250], value, time_ms, sample.step)
        for key, value in sample.metrics.items()
    ]
