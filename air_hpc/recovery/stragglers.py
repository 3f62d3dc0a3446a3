"""Ranks that compute more slowly than the others, found while all wait for them.

In synchronous training every rank's step takes as long as the slowest one's, so step times show
nobody. What differs is how long a rank computes without waiting for others: the workers report it
as running totals, (seconds of compute, steps). Here a rank's seconds a step are held against the
median of all ranks that do the same work:

    four quarters of `window_s`, one after the other: a rank that lies `threshold` above the median
    in each is a straggler, and told once, with their mean; told again when its excess has doubled
    in each (WORSE), and when it lies below half the threshold in each (ENDED).

The median is the lower of the two middle ones where the count is even: of two ranks the faster is
the measure, and half of the ranks may be slow without hiding each other. A quarter ends only when
most ranks have reported steps in it, so a long log interval makes longer ones, never emptier ones.
A rank without a new report keeps its standing; one that reports less than before has started anew.
With pipeline stages the stage is what makes ranks comparable (`peers`); a rank without a peer is
never slow.

What may go wrong: a rank whose share of the work is larger (an uneven last stage) is slow by this
measure; name it by `peers`. All ranks slow together are nobody's straggler.

Pure: samples and the caller's clock (seconds) come in.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from air_hpc.config.spec import StragglerSpec

_PARTS = 4
"""Slowness of half a window may touch three of them, never all."""
_TOLD_AGAIN = 2.0
"""A straggler is told again when its excess over the median has grown by this factor."""
_OVER = 0.5
"""Of the threshold: below it a straggler is one no more. The gap keeps it from coming and going."""


class Change(StrEnum):
    """What is told of a straggler."""

    FOUND = "found"
    WORSE = "worse"
    ENDED = "ended"


@dataclass(frozen=True)
class Straggler:
    """A rank whose compute time a step is `ratio` times the median, over the last `window_s`."""

    rank: int
    node: str
    ratio: float
    window_s: float
    change: Change


@dataclass
class _Rank:
    node: str
    base: tuple[int, int] | None = None
    """(ns, steps) when the present quarter began."""
    last: tuple[int, int] | None = None
    ratios: list[float] = field(default_factory=list)
    """Of the last quarters."""
    told: float | None = None
    """The excess that was told last, while it is a straggler."""

    def step_ns(self) -> float | None:
        """Mean nanoseconds a step in this quarter."""
        if self.base is None or self.last is None or self.last[1] <= self.base[1]:
            return None
        return (self.last[0] - self.base[0]) / (self.last[1] - self.base[1])


class Stragglers:
    """The ranks of one generation; make another for the next."""

    def __init__(
        self,
        spec: StragglerSpec,
        nodes: Mapping[int, str],
        peers: Mapping[int, Hashable] | None = None,
    ) -> None:
        """`nodes`: where each rank runs; `peers`: equal values do equal work (without: all do)."""
        self._spec = spec
        self._ranks = {rank: _Rank(node) for rank, node in nodes.items()}
        self._peers = peers or {}
        self._began: float | None = None
        self._parts_s: list[float] = []
        """How long the last quarters took."""

    @property
    def slow(self) -> tuple[int, ...]:
        """The ranks that are stragglers now."""
        return tuple(sorted(rank for rank, of in self._ranks.items() if of.told is not None))

    def sample(self, rank: int, compute_ns: int, steps: int, now: float) -> None:
        """A rank's running totals; of a rank that is not of this generation they are no news."""
        found = self._ranks.get(rank)
        if found is None or steps <= 0:
            return
        if self._began is None:
            self._began = now
        if found.last is not None and (steps < found.last[1] or compute_ns < found.last[0]):
            found.base = None
            found.ratios.clear()
        found.last = compute_ns, steps
        if found.base is None:
            found.base = found.last

    def tick(self, now: float) -> list[Straggler]:
        """What changed; cheap until a quarter of the window has passed."""
        began = self._began
        if began is None or now - began < self._spec.window_s / _PARTS:
            return []
        rates = {rank: rate for rank, of in self._ranks.items() if (rate := of.step_ns())}
        if len(rates) < 2 or len(rates) * 2 <= len(self._ranks):
            return []
        self._parts_s = [*self._parts_s, now - began][-_PARTS:]
        self._began = now
        medians = self._medians(rates)
        told = []
        for rank, rate in sorted(rates.items()):
            found = self._ranks[rank]
            found.base = found.last
            median = medians.get(self._peers.get(rank))
            if median is None:
                continue
            found.ratios = [*found.ratios, rate / median][-_PARTS:]
            change = self._judge(found)
            if change is not None:
                ratio = statistics.fmean(found.ratios)
                told.append(Straggler(rank, found.node, ratio, sum(self._parts_s), change))
        return told

    def _medians(self, rates: Mapping[int, float]) -> dict[Hashable, float]:
        alike: dict[Hashable, list[float]] = {}
        for rank, rate in rates.items():
            alike.setdefault(self._peers.get(rank), []).append(rate)
        return {key: statistics.median_low(each) for key, each in alike.items() if len(each) > 1}

    def _judge(self, found: _Rank) -> Change | None:
        if len(found.ratios) < _PARTS:
            return None
        threshold = self._spec.threshold
        excess = statistics.fmean(found.ratios) - 1.0
        if found.told is None:
            if min(found.ratios) - 1.0 < threshold:
                return None
            found.told = excess
            return Change.FOUND
        if max(found.ratios) - 1.0 < threshold * _OVER:
            found.told = None
            return Change.ENDED
        if min(found.ratios) - 1.0 >= found.told * _TOLD_AGAIN:
            found.told = excess
            return Change.WORSE
        return None
