"""Which sample of which step is in the store: the decisions about roll-backs, as pure functions.

A generation that begins at step f rolls back what older generations trained from f on. MLflow
keeps every row it was given, so a step is shipped once: the first sample that reached the store
stays there. Hence, for a sample of generation T at step s:

* s is in the store by an older generation: the sample is a re-run. It is not shipped, but compared.
* a newer generation began at or before s: the sample is dead. It is not shipped.
* otherwise it is shipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from air_hpc.rundir.events import Event, Kind
from air_hpc.rundir.fence import Token


@dataclass(frozen=True)
class StepRun:
    """The steps first, first + stride, …, last of one generation."""

    token: Token
    first: int
    last: int
    stride: int = 1

    def __contains__(self, step: int) -> bool:
        return self.first <= step <= self.last and (step - self.first) % self.stride == 0


@dataclass
class Coverage:
    """The steps in the store and the generation each came from, as a few arithmetic runs."""

    runs: list[StepRun] = field(default_factory=list)

    def add(self, token: Token, step: int) -> None:
        """Note that the sample of `token` at `step` is in the store."""
        if self.runs:
            tail = self.runs[-1]
            if tail.token == token and tail.last < step:
                stride = step - tail.last
                if tail.first == tail.last or stride == tail.stride:
                    self.runs[-1] = StepRun(token, tail.first, step, stride)
                    return
        if self.owner(step) is None:
            self.runs.append(StepRun(token, step, step))

    def owner(self, step: int) -> Token | None:
        """The generation whose sample of `step` is in the store."""
        for run in reversed(self.runs):
            if step in run:
                return run.token
        return None


def starts_from_events(events: Sequence[Event]) -> dict[Token, int]:
    """The first step of each generation, where the ledger says it."""
    starts: dict[Token, int] = {}
    for event in events:
        step = event.facts.get("step")
        if event.token is None or not isinstance(step, int) or isinstance(step, bool):
            continue
        if event.kind == Kind.RESUMED:
            starts.setdefault(event.token, step + 1)
        elif event.kind == Kind.TRAINING_STARTED:
            starts[event.token] = step
    return starts


def lasts_from_events(events: Sequence[Event]) -> dict[Token, int]:
    """The last step that each generation is known by the ledger to have reached."""
    lasts: dict[Token, int] = {}
    reached = (Kind.GENERATION_ENDED, Kind.CHECKPOINT_COMMITTED)
    for event in events:
        step = event.facts.get("step")
        if event.token is not None and event.kind in reached and isinstance(step, int):
            lasts[event.token] = max(step, lasts.get(event.token, 0))
    return lasts


def cut_of(token: Token, starts: Mapping[Token, int]) -> float:
    """The first step of a generation that newer ones rolled back; infinite when none did."""
    return min((step for other, step in starts.items() if other > token), default=math.inf)


def rolled_back_ranges(
    starts: Mapping[Token, int], lasts: Mapping[Token, int]
) -> list[tuple[int, int]]:
    """The ranges of steps (first, last) that were trained and then rolled back, in order."""
    ranges = []
    reached: int | None = None
    for token in sorted(starts):
        first = starts[token]
        if reached is not None and reached >= first:
            ranges.append((first, reached))
        reached = max(first - 1, lasts.get(token, first - 1))
    return ranges


def count_steps(ranges: Iterable[tuple[int, int]]) -> int:
    """How many steps the ranges hold; a step rolled back twice counts twice."""
    return sum(last - first + 1 for first, last in ranges)


def difference(shipped: float, again: float) -> float:
    """The absolute difference of two values of one step; infinite when just one is not a number."""
    if math.isnan(shipped) and math.isnan(again):
        return 0.0
    if shipped == again:
        return 0.0
    gap = abs(shipped - again)
    return math.inf if math.isnan(gap) else gap
