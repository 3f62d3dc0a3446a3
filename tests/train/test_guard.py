"""What the guard decides, from numbers alone."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_hpc.config.spec import GuardSpec
from air_hpc.train.guard import Action, Guard, spike_in

NAN, INF = math.nan, math.inf
FALLING = [5.0 - 0.02 * step for step in range(64)]
finite = st.floats(0.01, 20.0)


def spec(nonfinite: str = "log", spike: str = "log", **more: float) -> GuardSpec:
    return GuardSpec(nonfinite=nonfinite, spike=spike, **more)  # type: ignore[arg-type]


def fed(guard: Guard, losses: list[float]) -> Guard:
    for step, loss in enumerate(losses, 1):
        assert guard.look(step, 1.0, loss) is None
    return guard


@pytest.mark.parametrize(
    ("norm", "loss", "said"),
    [
        (NAN, None, "the gradient's norm is nan"),
        (INF, 2.0, "the gradient's norm is inf"),
        (1.0, NAN, "the loss is nan"),
        (NAN, INF, "the loss is inf and the gradient's norm is nan"),
    ],
)
@pytest.mark.parametrize("action", list(Action))
def test_a_number_that_is_none_asks_for_its_action(
    norm: float, loss: float | None, said: str, action: Action
) -> None:
    alarm = Guard(spec(nonfinite=action)).look(7, norm, loss)
    assert alarm is not None
    assert (alarm.step, alarm.action, alarm.reason) == (7, action, said)


def test_a_step_without_numbers_is_not_judged() -> None:
    assert Guard(spec("stop", "stop")).look(1, None, None) is None


@pytest.mark.parametrize("flat", [2.0, -2.0, 1e-3])
def test_a_flat_loss_does_not_alarm_by_a_hair(flat: float) -> None:
    guard = fed(Guard(spec(spike="stop")), [flat] * 64)
    assert guard.look(65, 1.0, flat + 0.05 * abs(flat)) is None
    alarm = guard.look(66, 1.0, flat + 0.2 * abs(flat))
    assert alarm is not None
    assert "above the median" in alarm.reason


def test_a_falling_loss_a_drop_and_a_noisy_loss_are_no_spikes() -> None:
    guard = fed(Guard(spec(spike="stop")), FALLING)
    assert guard.look(65, 1.0, 0.1) is None
    noisy = [3.0 + 0.3 * math.sin(7 * step) for step in range(64)]
    assert fed(Guard(spec(spike="stop")), noisy).look(65, 1.0, 4.5) is None


def test_one_spike_in_the_window_hides_no_other() -> None:
    guard = fed(Guard(spec(spike="log")), FALLING)
    for step in (65, 66, 67):
        assert guard.look(step, 1.0, 40.0) is not None


def test_too_few_losses_judge_nothing() -> None:
    guard = fed(Guard(spec(spike="stop")), [2.0] * 15)
    assert guard.look(16, 1.0, 500.0) is None
    assert guard.look(17, 1.0, 500.0) is not None


@given(st.lists(finite, min_size=16, max_size=64), finite, st.sampled_from([0.125, 0.5, 2, 8]))
def test_the_rule_knows_no_unit(losses: list[float], loss: float, factor: float) -> None:
    whole = spike_in(loss, losses, spec())
    scaled = spike_in(loss * factor, [value * factor for value in losses], spec())
    assert (whole is None) == (scaled is None)


@given(st.lists(finite, min_size=16, max_size=64), finite, finite)
def test_what_is_a_spike_is_one_too_when_it_is_larger(
    losses: list[float], loss: float, more: float
) -> None:
    if spike_in(loss, losses, spec()) is not None:
        assert spike_in(loss + more, losses, spec()) is not None


def test_skips_are_bounded_over_the_whole_run() -> None:
    guard = Guard(spec(nonfinite="skip", max_skips=3))
    assert [guard.look(step, NAN, None).action for step in (1, 2)] == [Action.SKIP] * 2
    resumed = Guard(spec(nonfinite="skip", max_skips=3), facts=guard.facts)
    assert resumed.look(3, NAN, None).action is Action.SKIP
    last = resumed.look(4, NAN, None)
    assert last.action is Action.STOP
    assert "3 batches were skipped (train.guard.max_skips)" in last.reason


def test_rollbacks_are_bounded_over_the_whole_run() -> None:
    for rollbacks, action in ((0, Action.ROLLBACK), (1, Action.ROLLBACK), (2, Action.STOP)):
        guard = Guard(spec(nonfinite="rollback", max_rollbacks=2), rollbacks)
        assert guard.look(1, NAN, None).action is action


def test_a_state_that_is_not_finite_is_mended_by_no_skip() -> None:
    assert Guard(spec(nonfinite="skip")).harmed(9, "a NaN in w").action is Action.ROLLBACK
    assert Guard(spec(nonfinite="log")).harmed(9, "a NaN in w").action is Action.LOG


def test_an_alarm_at_every_step_is_said_ever_more_rarely() -> None:
    guard = Guard(spec(nonfinite="log"))
    told = [step for step in range(1, 101) if guard.look(step, NAN, None).tell]
    assert told == [1, 2, 4, 8, 16, 32, 64]


@given(st.lists(finite | st.just(NAN), max_size=100), st.integers(0, 100))
def test_a_resumed_guard_decides_as_the_one_that_went_on(losses: list[float], at: int) -> None:
    """Its state goes through a manifest: plain JSON."""
    whole = Guard(spec("skip", "skip", window=16))
    for step, loss in enumerate(losses[:at]):
        whole.look(step, 1.0, loss)
    parted = Guard(spec("skip", "skip", window=16), facts=json.loads(json.dumps(whole.facts)))
    for step, loss in enumerate(losses[at:]):
        assert parted.look(step, 1.0, loss) == whole.look(step, 1.0, loss)
