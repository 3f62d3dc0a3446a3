"""The samples of a run on their way to a store: which are sent, which compared, which dropped."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from air_hpc.rundir.events import Event
from air_hpc.rundir.fence import Token
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.spool import LOSS, Sample, read_spool, spool_files, spool_path
from air_hpc.tracking.coverage import cut_of, difference, starts_from_events
from air_hpc.tracking.position import Position
from air_hpc.tracking.store import Row, Store

CHUNK_BYTES = 256 * 1024
"""Of a spool, read, sent and noted at a time: what a crash sends again at most."""

_NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]")
"""What MLflow refuses in a metric's name (mlflow.utils.validation)."""


def first_steps(run: RunDir, events: Sequence[Event]) -> dict[Token, int]:
    """The first step of each generation: by the ledger, else by its first sample."""
    starts = starts_from_events(events)
    for path in spool_files(run):
        token = Token.parse(path.stem)
        if token not in starts:
            samples, _ = read_spool(path, 0, CHUNK_BYTES)
            if samples:
                starts[token] = samples[0].step
    return starts


class SampleShipper:
    """Ships the spools of one run; remembers only the losses that re-run steps are held against."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._old_losses: dict[Token, tuple[int, dict[int, float]]] = {}

    def ship(
        self,
        store: Store,
        position: Position,
        starts: Mapping[Token, int],
        save: Callable[[Position], None],
    ) -> int:
        """Send what is new in every spool; the number of metrics sent.

        `starts` are the first steps of the generations; `save` is called after each chunk.
        """
        sent = 0
        for path in spool_files(self._run):
            token = Token.parse(path.stem)
            while True:
                offset = position.offsets.get(token, 0)
                samples, end = read_spool(path, offset, CHUNK_BYTES)
                if end == offset:
                    break
                sent += self._ship_chunk(store, position, token, samples, starts)
                position.offsets[token] = end
                save(position)
        return sent

    def _ship_chunk(
        self,
        store: Store,
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
        store.log_rows(position.mlflow_run_id, list(rows.values()))
        for sample in shipped + _among_the_shipped(store, position, dead):
            position.coverage.add(token, sample.step)
        if samples:
            highest = max(sample.step for sample in samples)
            position.lasts[token] = max(highest, position.lasts.get(token, highest))
        return len(rows)

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
            samples, end = read_spool(spool_path(self._run, token), offset, CHUNK_BYTES)
            if end == offset:
                return losses
            offset = end
            for sample in samples:
                if sample.step >= first and LOSS in sample.metrics:
                    losses.setdefault(sample.step, sample.metrics[LOSS])


def _among_the_shipped(store: Store, position: Position, dead: Sequence[Sample]) -> list[Sample]:
    """Those rolled-back samples that reached the store before a shipper's crash."""
    present: dict[str, set[tuple[int, int]]] = {}
    found = []
    for sample in dead:
        rows = _rows(sample)
        if not rows:
            continue
        row = next((row for row in rows if row.key == LOSS), rows[0])
        if row.key not in present:
            present[row.key] = store.present(position.mlflow_run_id, row.key)
        if (row.step, row.time_ms) in present[row.key]:
            found.append(sample)
    return found


def _rows(sample: Sample) -> list[Row]:
    """A sample's metrics, under names that MLflow takes."""
    time_ms = int(sample.time * 1000)
    return [
        Row(_NOT_IN_A_NAME.sub("_", key)[:250], value, time_ms, sample.step)
        for key, value in sample.metrics.items()
    ]
