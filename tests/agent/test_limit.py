"""The timer of the last save: by estimate first, by measured saves then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from air_hpc.agent.limit import LIMIT_SIGNAL, LimitTimer
from air_hpc.plan.frozen import read_run_yaml
from tests.agent.play import AnsweredAtOnce
from tests.run_builder import build_run


def timer(folder: Path, *overrides: str) -> tuple[LimitTimer, float]:
    """A timer of a job that ends at 10,000 by both clocks, and the planned lead."""
    run = build_run(folder, "cluster=slurm", "launch.time_limit_min=600", *overrides)
    frozen = read_run_yaml(run.run_yaml.read_text())
    made = LimitTimer(frozen.spec, frozen.plan, AnsweredAtOnce)
    made.set(10_000.0, 0.0, 0.0)
    return made, frozen.plan.lead_s


def rings_at(one: LimitTimer, step_s: float = 0.5) -> float:
    now = 9_000.0
    while one.rings(now, now) is None:
        now += step_s
    assert one.rings(now, now) is None, "once"
    return now


def test_without_a_measured_save_the_plan_decides(tmp_path: Path) -> None:
    one, lead_s = timer(tmp_path)
    assert abs(10_000.0 - lead_s - rings_at(one)) <= 0.5
    again, _ = timer(tmp_path / "again")
    assert not again.asks_again(lambda: 10_000.0, 9_900.0), "the signal is believed"


def test_measured_saves_move_the_last_one(tmp_path: Path) -> None:
    one, _ = timer(tmp_path, "cluster.grace_s=30")
    for _ in range(200):
        one.saved_in(5.0)
    assert rings_at(one) == 10_000.0 - 60 - 30 - 2 * 5.0


def test_a_lead_that_the_user_set_stays(tmp_path: Path) -> None:
    one, _ = timer(tmp_path, "launch.lead_s=700")
    one.saved_in(5.0)
    assert rings_at(one) == 9_300.0
    assert not one.asks_again(lambda: 10_000.0, 9_250.0)


def test_the_schedulers_early_signal_is_checked_against_the_limit_now(tmp_path: Path) -> None:
    one, lead_s = timer(tmp_path)
    for _ in range(200):
        one.saved_in(5.0)
    now = 10_000.0 - lead_s - 60
    ends: list[float | None] = [10_000.0, now + 40]
    ask: Callable[[], float | None] = lambda: ends.pop(0)  # noqa: E731
    assert one.asks_again(ask, now)
    assert one.rings(now, now) is None, "early: the run goes on"
    assert one.asks_again(ask, now)
    assert one.rings(now, now) == LIMIT_SIGNAL, "the limit was moved"


def test_a_signal_long_before_the_limit_is_somebodys_wish(tmp_path: Path) -> None:
    """`scancel --signal=USR2` was once taken for Slurm's own, too early, and not obeyed."""
    one, lead_s = timer(tmp_path)
    one.saved_in(5.0)
    assert not one.asks_again(lambda: 10_000.0, 10_000.0 - lead_s - 100)


def test_a_limit_that_nobody_can_tell_any_more_stops_at_the_signal(tmp_path: Path) -> None:
    one, _ = timer(tmp_path)
    one.saved_in(5.0)
    assert one.asks_again(lambda: None, 9_900.0)
    assert one.rings(9_900.0, 9_900.0) == LIMIT_SIGNAL
