"""Tokens per second and MFU.

The time of a step is the wall time between two log points over the steps between them, less what
saves took from training: those are the goodput's business. MFU is model FLOP per second over the
peak of all devices, in two conventions that differ in how they count attention (`plan.flops`).
No peak, no MFU; above 100 % the figure or the peak is wrong, and a flag stands in its place. What
is computed is nearer to `causal`, which decides: at long sequences `palm` alone may pass 100 % with
nothing wrong, and is then left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from air_hpc.plan.types import FlopsPerToken
from air_hpc.rundir.spool import MFU, MFU_PALM, TOKENS_PER_S

STEP_TIME = "perf/step_time_s"
MFU_INVALID = "perf/mfu_invalid"


class StepMeter:
    """Measures the steps between log points. `excluded_s` is a running total to leave out."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = clock()
        self._excluded = 0.0
        self._steps = 0

    def count(self) -> None:
        """One more step is done."""
        self._steps += 1

    def step_time_s(self, excluded_s: float) -> float | None:
        """Seconds a step since the last call; None when there was no step or no time."""
        now = self._clock()
        spent = now - self._began - (excluded_s - self._excluded)
        steps, self._steps = self._steps, 0
        self._began, self._excluded = now, excluded_s
        return spent / steps if steps and spent > 0 else None


def rates(
    step_time_s: float,
    tokens_per_step: int,
    flops_per_token: FlopsPerToken,
    peak_flops: float | None,
) -> dict[str, float]:
    """The `perf/` metrics of a step; `peak_flops` is of all devices of the run together."""
    tokens_per_second = tokens_per_step / step_time_s
    metrics = {STEP_TIME: step_time_s, TOKENS_PER_S: tokens_per_second}
    if peak_flops is None:
        return metrics
    causal = tokens_per_second * flops_per_token.causal / peak_flops
    palm = tokens_per_second * flops_per_token.palm / peak_flops
    if causal > 1.0:
        return {**metrics, MFU_INVALID: 1.0}
    metrics[MFU] = causal
    return metrics if palm > 1.0 else {**metrics, MFU_PALM: palm}
