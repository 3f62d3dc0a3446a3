"""How often to save, what a run on failing nodes comes to, and how long the last save takes.

Promises: pure arithmetic on seconds; nothing here knows a failure rate, which is always an input.

    mttf_s               mean time between failures of a run on `nodes` nodes
    young_daly_interval_s   the interval that costs least: Young (CACM 17(9), 1974), Daly (FGCS 22,
                         2006), first order
    interval_s           the same, bounded, and what to take while something is not known
    expected_ettr        effective training time over wall time (closed form of Kokolis et al.,
                         "Revisiting reliability in large-scale machine learning research
                         clusters", arXiv 2410.21680)
    first_order_ettr, renewal_ettr, best_interval_s   the same per second, Daly's complete form, and
                         where the first is largest
    last_save_lead_s     how long ahead of a time limit the last save must begin

What may go wrong: the closed form is of first order. It leaves out failures during restarts and
the waiting for a place in the queue, and where nodes · rate · interval is no longer small (about
0.3) it promises too little; it never goes below 0 here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

DAY_S = 86400.0
UNKNOWN_RATE_INTERVAL_S = 600.0
"""What `interval_steps=auto` aims at where no failure rate is given: ten minutes, the interval of
the published vectors, at which a restart loses five minutes on average."""
P99_SAMPLES = 100
"""From so many samples on, the 99th percentile can be told from the largest one."""
FEW_SAMPLES_MARGIN = 1.5
"""What the largest of a few samples is multiplied by: with n of them the next one is above all with
probability 1 / (n + 1), and on a shared file system by a factor rather than by a few percent."""


def mttf_s(nodes: int, failures_per_node_day: float) -> float:
    """Seconds between failures of a run on `nodes` nodes, on average; infinite at a rate of 0.

    Raises ValueError for less than one node or a negative rate.
    """
    if nodes < 1 or failures_per_node_day < 0:
        raise ValueError(f"no MTTF of {nodes} nodes at {failures_per_node_day} failures a day")
    rate = nodes * failures_per_node_day
    return DAY_S / rate if rate else math.inf


def young_daly_interval_s(blocking_s: float, mttf_s: float) -> float:
    """sqrt(2 · blocking_s · mttf_s): the seconds of training between two saves that lose least.

    `blocking_s` is what a save takes from training. Raises ValueError for a negative argument.
    """
    if blocking_s < 0 or mttf_s < 0:
        raise ValueError(f"no interval for a cost of {blocking_s} s and an MTTF of {mttf_s} s")
    return math.sqrt(2 * blocking_s * mttf_s) if blocking_s else 0.0


def interval_s(
    blocking_s: float | None,
    nodes: int,
    failures_per_node_day: float | None,
    *,
    low_s: float,
    high_s: float,
) -> float:
    """The interval to save at, in [low_s, high_s].

    Without a failure rate it is UNKNOWN_RATE_INTERVAL_S; with one, but before any save was
    measured (`blocking_s` is None), it is `low_s`, so that there soon is a measurement.
    """
    if failures_per_node_day is None:
        wanted = UNKNOWN_RATE_INTERVAL_S
    elif blocking_s is None:
        wanted = low_s
    else:
        wanted = young_daly_interval_s(blocking_s, mttf_s(nodes, failures_per_node_day))
    return min(max(wanted, low_s), high_s)


def best_interval_s(failures_per_s: float, save_s: float, restart_s: float) -> float:
    """The interval at which the closed form of the expected ETTR is largest, in seconds.

    The root of d/dΔt (1 - λ(u0 + Δt/2)) / (1 + w/Δt): sqrt(w² + 2w(1 - λ·u0)/λ) - w, which is
    Young's sqrt(2w/λ) while w and u0 are small against 1/λ. Infinite where nothing fails, and
    Young's own where λ·u0 ≥ 1: there the closed form, of first order, has no best.
    """
    if failures_per_s < 0 or save_s < 0 or restart_s < 0:
        raise ValueError(
            f"a rate and times are at least 0, not {failures_per_s}, {save_s}, {restart_s}"
        )
    if failures_per_s == 0:
        return math.inf
    left = 1 - failures_per_s * restart_s
    if left <= 0:
        return math.sqrt(2 * save_s / failures_per_s)
    return math.sqrt(save_s**2 + 2 * save_s * left / failures_per_s) - save_s


def first_order_ettr(
    failures_per_s: float, *, interval_s: float, save_s: float, restart_s: float
) -> float:
    """The closed form (1 - λ(u0 + Δt/2)) / (1 + w/Δt), at least 0 (arXiv 2410.21680): of first
    order in λΔt and λ·u0."""
    lost = failures_per_s * (restart_s + interval_s / 2)
    return max(0.0, 1 - lost) / (1 + save_s / interval_s)


def renewal_ettr(
    failures_per_s: float, *, interval_s: float, save_s: float, restart_s: float
) -> float:
    """The ETTR of memoryless failures, not of first order: λΔt · exp(-λ·u0) / (exp(λ(Δt + w)) - 1).

    Daly (FGCS 22, 2006), the complete model: a failed restart begins anew.
    """
    if failures_per_s == 0:
        return interval_s / (interval_s + save_s)
    grown = math.expm1(failures_per_s * (interval_s + save_s))
    return failures_per_s * interval_s * math.exp(-failures_per_s * restart_s) / grown


def expected_ettr(
    nodes: int,
    failures_per_node_day: float,
    *,
    interval_s: float,
    restart_s: float,
    blocking_s: float,
) -> float:
    """E[ETTR] ≈ (1 - N·r·(u0 + Δt/2)) / (1 + w/Δt), at least 0.

    N·r failures a second, each of which costs the restart u0 and half an interval Δt of work; w is
    what a save takes from training. Raises ValueError where `interval_s` is not above 0.
    """
    if interval_s <= 0:
        raise ValueError(f"an interval is above 0, not {interval_s} s")
    return first_order_ettr(
        1 / mttf_s(nodes, failures_per_node_day),
        interval_s=interval_s,
        save_s=blocking_s,
        restart_s=restart_s,
    )


def p99_s(durations_s: Sequence[float]) -> float | None:
    """The 99th percentile (nearest rank), None of nothing.

    Of fewer than P99_SAMPLES it is the largest times FEW_SAMPLES_MARGIN.
    """
    if not durations_s:
        return None
    ordered = sorted(durations_s)
    if len(ordered) < P99_SAMPLES:
        return ordered[-1] * FEW_SAMPLES_MARGIN
    return ordered[math.ceil(0.99 * len(ordered)) - 1]


def last_save_lead_s(
    durations_s: Sequence[float],
    *,
    first_s: float,
    base_s: float,
    ceiling_s: float = math.inf,
) -> float:
    """How many seconds ahead of the time limit a run is told to save and leave.

    `durations_s` are those of this run's committed saves (`duration_s` of CHECKPOINT_COMMITTED,
    from the copy in training to the commit). The last one may have to wait for one in flight, so
    two of the slowest count; `base_s` is for the rest: to agree, to end the step, to leave inside
    the site's grace. While nothing is measured the answer is `first_s`, the plan's estimate. Never
    above `ceiling_s` (half of a short limit, so that it still trains).
    """
    slowest_s = p99_s(durations_s)
    wanted = first_s if slowest_s is None else base_s + 2 * slowest_s
    return min(wanted, ceiling_s)
