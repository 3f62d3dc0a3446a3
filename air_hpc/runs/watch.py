"""Reads what is new in a run: events and metrics since the last look, from where each file ended.

Only whole lines are taken, so a look may fall into the middle of a write.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from air_hpc.rundir.events import Event, merge, parse_ledger
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.spool import Sample, read_spool, spool_files
from air_hpc.rundir.state import RunStatus, fold

_RATE_SAMPLES = 50


@dataclass
class Watch:
    """What is known of a run so far; `look` adds what came since."""

    run: RunDir
    events: list[Event] = field(default_factory=list)
    last: Sample | None = None
    _ledger: dict[Path, int] = field(default_factory=dict)
    _by_writer: dict[str, list[Event]] = field(default_factory=dict)
    _spool: dict[Path, int] = field(default_factory=dict)
    _recent: deque[Sample] = field(default_factory=lambda: deque(maxlen=_RATE_SAMPLES))

    def look(self) -> list[Event]:
        """Read on; returns the events that came, in their order."""
        came: list[list[Event]] = []
        for path in sorted(self.run.ledger_dir.glob("*.jsonl")):
            events = self._more_events(path)
            self._by_writer.setdefault(path.stem, []).extend(events)
            came.append(events)
        new = list(merge(came))
        if new:
            self.events = list(merge(list(self._by_writer.values())))
        for path in spool_files(self.run):
            samples, self._spool[path] = read_spool(path, self._spool.get(path, 0))
            for sample in samples:
                if self._recent and self._recent[-1].token != sample.token:
                    self._recent.clear()
                self._recent.append(sample)
                self.last = sample
        return new

    def status(self) -> RunStatus:
        """The ledger's word on the run."""
        return fold(self.events)

    def metric(self, name: str) -> float | None:
        """The last value of a metric."""
        for sample in reversed(self._recent):
            if name in sample.metrics:
                return sample.metrics[name]
        return None

    def seconds_per_step(self) -> float | None:
        """Over the last steps of the present generation; None before there are two."""
        if len(self._recent) < 2:
            return None
        first, last = self._recent[0], self._recent[-1]
        steps = last.step - first.step
        return (last.time - first.time) / steps if steps > 0 else None

    def _more_events(self, path: Path) -> list[Event]:
        offset = self._ledger.get(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._ledger[path] = offset + end
        return parse_ledger(data[:end], path.stem)[0]
