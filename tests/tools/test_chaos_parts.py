"""The pure parts of tools/chaos: its plan and its checks, each of which can fail."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import islice

import pytest

from air_hpc.rundir.events import Event
from air_hpc.rundir.fence import Token
from air_hpc.rundir.state import fold
from tests.acceptance.runs import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from _chaos.check import exact_until, fence_problems, loss_problems, time_problems
from _chaos.plan import Kind, make_up_for, plans_for, run_plans


@pytest.mark.parametrize("count", [1, 7, 200])
def test_a_plan_has_exactly_the_faults_asked_for_and_is_a_function_of_its_seed(count: int) -> None:
    plans = plans_for(count, 1)
    numbers = [fault.number for plan in plans for fault in plan.faults]
    assert numbers == list(range(count))
    assert plans == plans_for(count, 1)
    if count > 1:
        assert plans != plans_for(count, 2)


def test_what_found_no_moment_is_made_up_for_by_other_runs() -> None:
    plans = plans_for(30, 1)
    further = make_up_for(9, 1, plans)
    assert further[0].number == len(plans)
    assert [f.number for plan in further for f in plan.faults] == list(range(30, 39))
    kinds = [f.kind for plan in further for f in plan.faults]
    assert kinds != [f.kind for plan in plans for f in plan.faults][:9]


def test_every_kind_comes_about_equally_often() -> None:
    faults = [f for plan in islice(run_plans(3), 60) for f in plan.faults]
    counts = Counter(fault.kind for fault in faults)
    assert set(counts) == set(Kind)
    assert max(counts.values()) - min(counts.values()) <= 1


def started(time: float, token: str, world: int, resume: int | None) -> Event:
    facts = {"world_size": world, "resume_step": resume}
    return Event(time, "generation_started", Token.parse(token), facts)


def test_losses_are_compared_bit_by_bit_until_a_smaller_world_resumed() -> None:
    full = [started(1, "1.1", 4, None), started(2, "1.2", 4, 16)]
    assert exact_until(full) is None
    until = exact_until([*full, started(3, "1.3", 2, 32)])
    assert until == 32
    reference = {step: 2.0 for step in range(1, 65)}
    near = {**reference, 33: 2.001}
    assert loss_problems(near, reference, until) == []
    assert loss_problems(near, reference, None) != []
    assert loss_problems({**reference, 32: 2.001}, reference, until) != []
    assert loss_problems({**reference, 40: float("nan")}, reference, until) != []
    assert loss_problems({k: v for k, v in reference.items() if k != 5}, reference, None) != []


def test_times_that_do_not_fit_what_was_seen_from_outside_are_told() -> None:
    token = Token(1, 1)
    events = [
        Event(0.0, "submitted"),
        Event(5.0, "attempt_started", token),
        Event(60.0, "attempt_ended", token, {"failure_class": "completed", "verdict": "stop"}),
    ]
    status = fold(events)
    assert time_problems(events, status, (58.0, 62.0)) == []
    assert time_problems(events, status, (50.0, 100.0)) == [], "a slow submission"
    assert time_problems(events, status, (96.0, 100.0)) != []
    assert time_problems(events, status, (20.0, 25.0)) != []


def test_a_commit_of_a_fenced_token_is_a_violation() -> None:
    late = Event(4.0, "checkpoint_committed", Token.parse("1.1"), {"step": 48})
    assert fence_problems([started(1, "1.1", 4, None), late]) == []
    assert fence_problems([started(1, "1.1", 4, None), started(3, "2.1", 4, 32), late]) != []
