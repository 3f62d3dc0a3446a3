"""When a run with `checkpoint.interval_steps=auto` saves: by rank 0's clock, told to all ranks.

Promises: all ranks save at the same step, and no step has a collective of its own for it. At a log
step the ranks reduce the loss anyway; rank 0's `vote` rides along as a second number: 0, or one
more than the number of steps from this one to the one to save at, which lies before the next log
step. The interval is `recovery.reliability.interval_s` of what saves were measured to take from
training.

What may go wrong: the step time that a vote is made from may change until the next log step; then
that save is early or late by as much, on all ranks alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

from air_hpc.config.spec import CheckpointSpec
from air_hpc.recovery.reliability import interval_s

_KEPT = 8
"""How many of the newest measurements the cost of a save is the median of."""


class SaveTimer:
    """Rank 0's part: when the next save is due. The first interval begins now."""

    def __init__(
        self, spec: CheckpointSpec, nodes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._spec = spec
        self._nodes = nodes
        self._clock = clock
        self._since = clock()
        self._costs: deque[float] = deque(maxlen=_KEPT)

    @property
    def interval_s(self) -> float:
        """Seconds from the end of a save to the next one."""
        return interval_s(
            statistics.median(self._costs) if self._costs else None,
            self._nodes,
            self._spec.failures_per_node_day,
            low_s=self._spec.min_interval_s,
            high_s=self._spec.max_interval_s,
        )

    def saved(self, blocking_s: float) -> None:
        """A save was handed over just now, and took this long from training."""
        self._costs.append(blocking_s)
        self._since = self._clock()

    def vote(self, step_time_s: float | None, steps_to_next_vote: int) -> int:
        """1 + how many steps from now to save at; 0 where the next vote is early enough."""
        left_s = self._since + self.interval_s - self._clock()
        if left_s <= 0:
            return 1
        if step_time_s is None or step_time_s <= 0:
            return 0
        steps = math.ceil(left_s / step_time_s)
        return 1 + steps if steps < steps_to_next_vote else 0
