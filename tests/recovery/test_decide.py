"""Verdicts and budgets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_hpc.config.spec import RecoverySpec
from air_hpc.recovery.decide import NOT_RETRIED, decide
from air_hpc.rundir.state import End
from air_hpc.rundir.words import FREE, FailureClass, Verdict

BUDGET = RecoverySpec(max_failures=5, max_unknown=5, max_no_progress=3)
RETRIED = sorted(set(FailureClass) - NOT_RETRIED - FREE)


def ends(*facts: tuple[FailureClass, int | None]) -> list[End]:
    return [End(None, failure_class, step) for failure_class, step in facts]


@pytest.mark.parametrize("failure_class", sorted(NOT_RETRIED))
def test_what_would_end_the_same_again_stops(failure_class: FailureClass) -> None:
    assert decide(failure_class, 10, [], BUDGET).verdict is Verdict.STOP


@pytest.mark.parametrize("failure_class", sorted(FREE))
def test_free_ends_cost_nothing_however_many(failure_class: FailureClass) -> None:
    history = ends(*[(failure_class, step) for step in range(10, 60)])
    assert decide(failure_class, 60, history, BUDGET).verdict is Verdict.REQUEUE


def test_a_time_limit_that_leaves_no_time_to_train_once_requeued_a_run_for_ever() -> None:
    limited = FailureClass.TIME_LIMIT
    assert (
        decide(limited, 18, ends((limited, 18), (limited, 18)), BUDGET).verdict is Verdict.REQUEUE
    )
    assert decide(limited, 18, ends(*[(limited, 18)] * 3), BUDGET).verdict is Verdict.STOP
    assert decide(limited, None, ends(*[(limited, None)] * 2), BUDGET).verdict is Verdict.STOP


@pytest.mark.parametrize("failure_class", RETRIED)
def test_the_third_failure_in_a_row_without_a_newer_commit_stops(
    failure_class: FailureClass,
) -> None:
    assert decide(failure_class, 10, ends((failure_class, 10)), BUDGET).verdict is Verdict.REQUEUE
    decision = decide(failure_class, 10, ends(*[(failure_class, 10)] * 2), BUDGET)
    assert decision.verdict is Verdict.STOP
    assert "max_no_progress=3" in decision.reason


def test_failures_before_the_first_commit_are_counted() -> None:
    history = ends(*[(FailureClass.UNKNOWN, None)] * 2)
    assert decide(FailureClass.UNKNOWN, None, history, BUDGET).verdict is Verdict.STOP


def test_a_newer_commit_starts_the_row_anew() -> None:
    history = ends(*[(FailureClass.UNKNOWN, 10)] * 2)
    assert decide(FailureClass.UNKNOWN, 11, history, BUDGET).verdict is Verdict.REQUEUE


def test_a_preemption_in_between_does_not_start_the_row_anew() -> None:
    history = ends(
        (FailureClass.UNKNOWN, 10), (FailureClass.PREEMPTED, 10), (FailureClass.UNKNOWN, 10)
    )
    assert decide(FailureClass.UNKNOWN, 10, history, BUDGET).verdict is Verdict.STOP


def test_falling_back_to_an_older_checkpoint_is_no_progress() -> None:
    """The row once looked broken when the newest checkpoint had gone bad."""
    history = ends(*[(FailureClass.CHECKPOINT, 20)] * 2)
    assert decide(FailureClass.CHECKPOINT, 10, history, BUDGET).verdict is Verdict.STOP


def test_failures_with_progress_stop_at_the_budget() -> None:
    history = ends(*[(FailureClass.NODE_LOST, step) for step in range(5)])
    decision = decide(FailureClass.NODE_LOST, 5, history, BUDGET)
    assert decision.verdict is Verdict.STOP
    assert "max_failures=5" in decision.reason
    assert decide(FailureClass.NODE_LOST, 4, history[:4], BUDGET).verdict is Verdict.REQUEUE


def test_without_continuation_everything_stops() -> None:
    decision = decide(FailureClass.PREEMPTED, 10, [], BUDGET, can_restart=False)
    assert decision.verdict is Verdict.STOP
    assert "continuation=none" in decision.reason


def test_what_no_restart_mends_stops() -> None:
    decision = decide(FailureClass.CHECKPOINT, None, [], BUDGET, unrecoverable=True)
    assert decision.verdict is Verdict.STOP


budgets = st.builds(
    RecoverySpec,
    max_failures=st.integers(0, 6),
    max_unknown=st.integers(0, 6),
    max_no_progress=st.integers(1, 5),
)
events = st.lists(
    st.tuples(st.sampled_from(sorted(FailureClass)), st.integers(0, 3), st.booleans()), max_size=60
)


@given(budget=budgets, happened=events)
def test_any_order_of_ends_keeps_the_budget(
    budget: RecoverySpec, happened: list[tuple[FailureClass, int, bool]]
) -> None:
    """Invariant 3: restarts after failures are bounded, in all and in a row without progress."""
    history: list[End] = []
    committed: int | None = None
    ever = 0
    restarts = in_a_row = 0
    for failure_class, progress, went_bad in happened:
        if went_bad and committed:
            committed -= 1
        committed = (committed or 0) + progress or None
        if (committed or 0) > ever:
            ever, in_a_row = committed or 0, 0
        decision = decide(failure_class, committed, history, budget)
        assert decision.reason
        before = history[-1].committed_step if history else None
        progressed = (committed or 0) > (before or 0)
        free = failure_class in FREE and (progressed or failure_class != FailureClass.TIME_LIMIT)
        if decision.verdict is Verdict.STOP:
            assert not free
            return
        if not free:
            restarts += 1
            in_a_row += 1
        assert failure_class not in NOT_RETRIED
        assert restarts <= budget.max_failures + budget.max_unknown
        assert in_a_row < budget.max_no_progress
        history.append(End(None, failure_class, ever or None))


def test_what_nobody_can_name_has_a_budget_of_its_own() -> None:
    budget = RecoverySpec(max_failures=5, max_unknown=1)
    history = ends((FailureClass.NODE_LOST, 1), (FailureClass.UNKNOWN, 2))
    decision = decide(FailureClass.UNKNOWN, 3, history, budget)
    assert decision.verdict is Verdict.STOP
    assert "max_unknown=1" in decision.reason
    assert decide(FailureClass.NODE_LOST, 3, history, budget).verdict is Verdict.REQUEUE


def test_a_failure_goes_on_inside_the_allocation_where_it_can() -> None:
    decision = decide(FailureClass.NETWORK, 3, [], BUDGET, can_continue=True)
    assert (decision.verdict, decision.delay_s) == (Verdict.CONTINUE, 0.0)
    inside = decide(FailureClass.NETWORK, 3, [], BUDGET, can_continue=True, can_restart=False)
    assert inside.verdict is Verdict.CONTINUE


def test_a_preemption_never_goes_on_inside_the_allocation() -> None:
    for failure_class in FREE:
        decision = decide(failure_class, 3, [], BUDGET, can_continue=True)
        assert decision.verdict is Verdict.REQUEUE


def test_quick_deaths_are_spread_out() -> None:
    budget = RecoverySpec(max_failures=99, max_no_progress=99)
    history: list[End] = []
    delays = []
    for _ in range(9):
        delays.append(decide(FailureClass.HANG, 7, history, budget, can_continue=True).delay_s)
        history.append(End(None, FailureClass.HANG, 7))
    assert delays == [0, 1, 3, 7, 15, 31, 60, 60, 60]


def test_the_nodes_to_avoid_are_told_with_the_requeue() -> None:
    decision = decide(FailureClass.DEVICE, 3, [], BUDGET, avoids_nodes=True)
    assert decision.verdict is Verdict.EXCLUDE_AND_REQUEUE


@given(budget=budgets, happened=events)
def test_a_verdict_is_a_function_of_the_history(
    budget: RecoverySpec, happened: list[tuple[FailureClass, int, bool]]
) -> None:
    history = ends(*[(failure_class, step) for failure_class, step, _ in happened])
    first = decide(FailureClass.UNKNOWN, 3, history, budget)
    assert decide(FailureClass.UNKNOWN, 3, tuple(history), budget) == first
