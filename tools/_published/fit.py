"""Fits the three constants on the runs that are marked for it, and on no other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace

from air_hpc.plan.rates import Constants

from .runs import Run

BOUNDS = {"matmul_share": (0.2, 1.0), "attention_share": (0.1, 1.0), "link_share": (0.2, 1.0)}
_GOLDEN = (math.sqrt(5) - 1) / 2


def loss(runs: Sequence[Run], constants: Constants) -> float:
    """The mean square of log(predicted / measured)."""
    logs = [math.log(run.predicted(constants) / run.tokens_per_s) for run in runs]
    return sum(x * x for x in logs) / len(logs)


def fit(runs: Sequence[Run], *, rounds: int = 12) -> Constants:
    """The constants of least loss, by golden-section search along one at a time."""
    best = Constants(0.6, 0.5, 0.6)
    for _ in range(rounds):
        for field in fields(Constants):
            low, high = BOUNDS[field.name]
            best = replace(best, **{field.name: _least(runs, best, field.name, low, high)})
    return best


def _least(runs: Sequence[Run], at: Constants, name: str, low: float, high: float) -> float:
    def value(x: float) -> float:
        return loss(runs, replace(at, **{name: x}))

    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_a, at_b = value(a), value(b)
    while high - low > 1e-4:
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - _GOLDEN * (high - low)
            at_a = value(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + _GOLDEN * (high - low)
            at_b = value(b)
    return (low + high) / 2
