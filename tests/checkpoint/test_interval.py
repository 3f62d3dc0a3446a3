"""When `auto` saves, by a clock that the test holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_hpc.checkpoint.interval import SaveTimer
from air_hpc.config.spec import CheckpointSpec


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def timer(clock: Clock, rate: float | None = 6.5e-3) -> SaveTimer:
    spec = CheckpointSpec(
        interval_steps="auto",
        failures_per_node_day=rate,
        min_interval_s=60,
        max_interval_s=3600,
    )
    return SaveTimer(spec, 100, clock)


def test_the_first_save_comes_early_and_its_cost_times_the_next() -> None:
    clock = Clock()
    times = timer(clock)
    assert times.interval_s == 60
    times.saved(5.0)
    assert times.interval_s == pytest.approx(1153, abs=1)
    for _ in range(8):
        times.saved(0.05)  # what comes to be the rule counts
    assert times.interval_s == pytest.approx(115, abs=1)


def test_without_a_rate_of_failures_it_is_ten_minutes() -> None:
    times = timer(Clock(), None)
    times.saved(5.0)
    assert times.interval_s == 600


def test_a_vote_names_the_step_before_the_next_vote_or_none() -> None:
    clock = Clock()
    times = timer(clock)
    assert times.vote(None, 10) == 0
    assert times.vote(1.0, 10) == 0
    clock.now += 55.5
    assert times.vote(None, 10) == 0
    assert times.vote(1.0, 10) == 1 + 5
    assert times.vote(1.0, 5) == 0  # the next vote is in time
    clock.now += 4.5
    assert times.vote(1.0, 10) == times.vote(None, 1) == 1
    times.saved(0.01)
    assert times.vote(1.0, 10) == 0


@given(st.floats(0.01, 100), st.integers(1, 50), st.floats(0, 4000))
def test_a_save_is_at_most_one_step_late(step_time: float, log_every: int, cost: float) -> None:
    clock = Clock()
    times = timer(clock)
    times.saved(cost)
    due = clock.now + times.interval_s
    step = 0
    while True:
        vote = times.vote(step_time, log_every)
        if vote:
            assert vote <= log_every
            saved_at = clock.now + (vote - 1) * step_time
            assert due - 1e-6 <= saved_at <= due + step_time + 1e-6
            return
        step += log_every
        clock.now += log_every * step_time
