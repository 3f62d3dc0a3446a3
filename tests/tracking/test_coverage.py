from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_hpc.rundir.events import Event, Kind
from air_hpc.rundir.fence import Token
from air_hpc.tracking.coverage import (
    Coverage,
    count_steps,
    cut_of,
    difference,
    rolled_back_ranges,
    starts_from_events,
)

ONE, TWO, THREE = Token(1, 1), Token(1, 2), Token(2, 1)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 60)), max_size=80))
def test_coverage_is_the_first_owner_of_each_step(added: list[tuple[int, int]]) -> None:
    coverage, owners = Coverage(), dict[int, Token]()
    for attempt, step in added:
        token = Token(attempt, 1)
        if owners.get(step, token) == token:
            coverage.add(token, step)
            owners[step] = token
    for step in range(-1, 62):
        assert coverage.owner(step) == owners.get(step)


def test_steps_logged_at_an_interval_take_one_run() -> None:
    coverage = Coverage()
    for step in range(10, 100_001, 10):
        coverage.add(ONE, step)
    assert len(coverage.runs) == 1
    assert coverage.owner(500) == ONE
    assert coverage.owner(505) is None


def test_a_generation_is_cut_by_every_newer_one() -> None:
    starts = {ONE: 1, TWO: 80, THREE: 50}
    assert cut_of(ONE, starts) == 50
    assert cut_of(TWO, starts) == 50
    assert cut_of(THREE, starts) == math.inf


def test_ranges_are_what_was_trained_past_the_next_start() -> None:
    assert rolled_back_ranges({ONE: 1, TWO: 80, THREE: 50}, {ONE: 100, TWO: 90, THREE: 200}) == [
        (80, 100),
        (50, 90),
    ]
    # A generation that died before it trained reached nothing of its own.
    assert rolled_back_ranges({ONE: 1, TWO: 80, THREE: 50}, {ONE: 100}) == [(80, 100), (50, 79)]
    # A clean resume rolls nothing back.
    assert rolled_back_ranges({ONE: 1, TWO: 101}, {ONE: 100, TWO: 120}) == []
    assert count_steps([(80, 100), (50, 90)]) == 62


def test_the_first_step_trained_wins_over_the_checkpoint_loaded() -> None:
    events = [
        Event(1.0, Kind.TRAINING_STARTED, ONE, {"step": 1}),
        Event(2.0, Kind.RESUMED, TWO, {"step": 80}),
        Event(3.0, Kind.RESUMED, THREE, {"step": 80}),
        Event(4.0, Kind.TRAINING_STARTED, THREE, {"step": 61}),
        Event(5.0, Kind.TRAINING_STARTED, None, {"step": 5}),
        Event(6.0, Kind.RESUMED, ONE, {"step": "many"}),
    ]
    assert starts_from_events(events) == {ONE: 1, TWO: 81, THREE: 61}


@pytest.mark.parametrize(
    ("shipped", "again", "gap"),
    [
        (1.0, 1.0, 0.0),
        (1.0, 1.5, 0.5),
        (math.nan, math.nan, 0.0),
        (math.nan, 1.0, math.inf),
        (math.inf, math.inf, 0.0),
        (math.inf, -math.inf, math.inf),
    ],
)
def test_differences_of_odd_values(shipped: float, again: float, gap: float) -> None:
    assert difference(shipped, again) == gap
