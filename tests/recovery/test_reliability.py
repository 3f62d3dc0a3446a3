"""Young and Daly's interval, the closed form of ETTR, and the lead of the last save."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_hpc.recovery.reliability import (
    FEW_SAMPLES_MARGIN,
    UNKNOWN_RATE_INTERVAL_S,
    expected_ettr,
    interval_s,
    last_save_lead_s,
    mttf_s,
    p99_s,
    young_daly_interval_s,
)

RATE = 6.5e-3
"""Failures a node-day of the published vectors."""
seconds = st.floats(0.001, 1e5)


@pytest.mark.parametrize(
    ("devices", "minutes", "expected"),
    [
        (1024, 10, 0.986),
        (4096, 10, 0.969),
        (16000, 10, 0.902),
        (1024, 60, 0.978),
        (4096, 60, 0.918),
        (16000, 60, 0.683),
    ],
)
def test_the_closed_form_gives_the_published_vectors(
    devices: int, minutes: int, expected: float
) -> None:
    ettr = expected_ettr(devices // 8, RATE, interval_s=60.0 * minutes, restart_s=300, blocking_s=5)
    assert ettr == pytest.approx(expected, abs=5.1e-4)


def test_a_run_that_fails_faster_than_it_restarts_has_no_effective_time() -> None:
    assert expected_ettr(10**6, 1.0, interval_s=600, restart_s=300, blocking_s=5) == 0


def test_the_mean_time_between_failures_is_a_nodes_over_their_number() -> None:
    assert mttf_s(1, 1.0) == 86400
    assert mttf_s(2000, RATE) == pytest.approx(6646, abs=1)
    assert mttf_s(5, 0) == math.inf


@given(seconds, st.integers(1, 10_000), st.floats(1e-5, 1.0))
def test_no_other_interval_loses_less_than_young_and_dalys(
    blocking: float, nodes: int, rate: float
) -> None:
    """Of the first-order cost w/Δt + Δt/(2·MTTF), which it is the minimum of."""
    mttf = mttf_s(nodes, rate)
    best = young_daly_interval_s(blocking, mttf)

    def cost(interval: float) -> float:
        return blocking / interval + interval / (2 * mttf)

    for factor in (0.3, 0.9, 1.1, 3.0):
        assert cost(best) <= cost(best * factor) * (1 + 1e-12)


@given(st.none() | seconds, st.integers(1, 10_000), st.none() | st.floats(0, 1.0))
def test_an_interval_keeps_its_bounds(
    blocking: float | None, nodes: int, rate: float | None
) -> None:
    assert 60 <= interval_s(blocking, nodes, rate, low_s=60, high_s=3600) <= 3600


def test_what_is_not_known_yet_has_an_interval_of_its_own() -> None:
    bounds = {"low_s": 60.0, "high_s": 3600.0}
    assert interval_s(5, 100, None, **bounds) == UNKNOWN_RATE_INTERVAL_S
    assert interval_s(None, 100, RATE, **bounds) == 60
    assert interval_s(5, 100, RATE, **bounds) == pytest.approx(1153, abs=1)
    assert interval_s(5, 100, 0.0, **bounds) == 3600


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: mttf_s(0, 1.0),
        lambda: mttf_s(1, -1.0),
        lambda: young_daly_interval_s(-1, 1),
        lambda: expected_ettr(1, 1.0, interval_s=0, restart_s=0, blocking_s=0),
    ],
)
def test_arguments_that_mean_nothing_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match=r"no MTTF|no interval|above 0"):
        wrong()


def test_the_last_save_is_timed_from_the_slowest_that_were_seen() -> None:
    def lead(durations: list[float], ceiling: float = math.inf) -> float:
        return last_save_lead_s(durations, first_s=500, base_s=90, ceiling_s=ceiling)

    assert lead([]) == 500
    assert lead([4.0, 10.0, 3.0]) == 90 + 2 * 10 * FEW_SAMPLES_MARGIN
    assert lead([4.0] * 197 + [10.0, 10.0, 1000.0]) == 90 + 2 * 10
    assert lead([4.0, 10.0, 3.0], ceiling=100) == 100
    assert lead([], ceiling=100) == 100


@given(st.lists(seconds, min_size=1, max_size=300))
def test_at_most_one_in_a_hundred_saves_is_slower_than_the_99th_percentile(
    durations: list[float],
) -> None:
    found = p99_s(durations)
    assert found is not None
    assert sum(duration > found for duration in durations) <= len(durations) / 100
    assert found <= max(durations) * FEW_SAMPLES_MARGIN
