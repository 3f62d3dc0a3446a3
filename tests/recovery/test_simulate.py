"""The simulator: against closed form and published figures, and through the real machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from air_hpc.recovery import simulate as model
from air_hpc.recovery.reliability import DAY_S, best_interval_s, first_order_ettr, renewal_ettr
from air_hpc.recovery.restart import Action, Decide, RestartMachine, Start
from air_hpc.recovery.simulate import Outcome, Scenario, endless, simulate

RATE = 6.5e-3
"""Failures per node-day of the published figures (arXiv 2410.21680)."""


def published(gpus: int, interval_min: float) -> Scenario:
    """Eight GPUs a node, saves of 5 s, u0 of 5 min (with the machine's own second of gathering)."""
    base = Scenario(gpus // 8, RATE, 60 * interval_min, save_s=5.0, restart_s=0.0)
    return replace(base, restart_s=300.0 - base.restart_cost_s)


def closed(scenario: Scenario, form: Any = first_order_ettr) -> float:
    ettr: float = form(
        scenario.failures_per_s,
        interval_s=scenario.interval_s,
        save_s=scenario.save_s,
        restart_s=scenario.restart_cost_s,
    )
    return ettr


@pytest.mark.parametrize(
    ("gpus", "interval_min", "ettr", "days"),
    [
        (1024, 10, 0.986, 300),
        (1024, 60, 0.978, 300),
        (4096, 10, 0.969, 120),
        (4096, 60, 0.918, 120),
        (16000, 10, 0.902, 30),
    ],
)
def test_it_agrees_with_the_published_figures(
    gpus: int, interval_min: float, ettr: float, days: float
) -> None:
    scenario = published(gpus, interval_min)
    assert scenario.failures_per_s * scenario.interval_s <= 0.3
    outcome = simulate(scenario, duration_s=days * DAY_S, seed=1)
    assert closed(scenario) == pytest.approx(ettr, abs=0.0006)
    assert outcome.ettr == pytest.approx(closed(scenario), abs=0.01)
    assert outcome.ettr == pytest.approx(closed(scenario, renewal_ettr), abs=0.01)


def test_beyond_it_shows_that_the_closed_form_promises_too_little() -> None:
    scenario = published(16000, 60)
    assert scenario.failures_per_s * scenario.interval_s > 0.3
    assert closed(scenario) == pytest.approx(0.683, abs=0.0006)
    outcome = simulate(scenario, duration_s=20 * DAY_S, seed=1)
    assert outcome.ettr > closed(scenario) + 0.02
    assert outcome.ettr == pytest.approx(closed(scenario, renewal_ettr), abs=0.02)


def small(restart: str = "same", **changes: Any) -> Scenario:
    """Eight nodes that fail often."""
    recovery = endless(restart=restart, spare_nodes=2, min_nodes=2)
    base = Scenario(8, 0.5, 600.0, 5.0, 60.0, end_s=1.0, recovery=recovery, node_loss_share=0.5)
    return replace(base, **changes)


POLICIES = ("requeue", "same", "spare", "elastic")


def test_equal_seeds_give_equal_outcomes() -> None:
    outcomes = [simulate(small(), duration_s=10 * DAY_S, seed=seed) for seed in (3, 3, 4)]
    assert outcomes[0] == outcomes[1] != outcomes[2]


@pytest.mark.parametrize("restart", POLICIES)
def test_every_start_of_the_simulation_is_an_action_of_the_machine(
    restart: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace is what the machines said themselves, and its starts are all the generations."""
    said: list[Action] = []

    class Overheard(RestartMachine):
        def __getattribute__(self, name: str) -> Any:
            value = object.__getattribute__(self, name)
            if name not in ("arrive", "lose", "ended", "request_stop", "begun", "decided", "tick"):
                return value

            def call(*args: Any, **kwargs: Any) -> Any:
                actions = value(*args, **kwargs)
                if name != "decided" or not actions or actions[0] not in said[-1:]:
                    said.extend(actions)
                return actions

            return call

        def tick(self, now: float) -> list[Action]:
            return RestartMachine.tick(self, now)

    monkeypatch.setattr(model, "RestartMachine", Overheard)
    traced: list[Action] = []
    outcome = simulate(
        small(restart, time_limit_s=DAY_S),
        duration_s=20 * DAY_S,
        seed=5,
        trace=lambda _, action: traced.append(action),
    )
    assert traced == said
    starts = [action for action in traced if isinstance(action, Start)]
    assert outcome.generations == len(starts) > 50
    decided = sum(isinstance(action, Decide) for action in traced)
    assert len(starts) - 1 <= decided <= len(starts)
    assert outcome.attempts == sum(start.generation == 1 for start in starts)


def test_a_machine_that_starts_nothing_lets_nothing_train(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(RestartMachine):
        def arrive(self, node: str, now: float) -> list[Action]:
            return []

        def tick(self, now: float) -> list[Action]:
            self._arrive_by = float("inf")
            return []

    monkeypatch.setattr(model, "RestartMachine", Deaf)
    outcome = simulate(small(failures_per_node_day=0.0), duration_s=DAY_S, seed=1)
    assert (outcome.productive_s, outcome.generations) == (0.0, 0)
    assert outcome.down_s == DAY_S


def sums(outcome: Outcome) -> float:
    return (
        outcome.kept_s + outcome.lost_s + outcome.saving_s + outcome.down_s + outcome.queued_s
    )  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(
    restart=st.sampled_from(POLICIES),
    share=st.sampled_from((0.0, 0.5, 1.0)),
    rate=st.sampled_from((0.0, 0.1, 3.0, 20.0)),
    idle=st.sampled_from((None, 0, 2)),
    limit=st.sampled_from((None, 300.0, 7200.0, DAY_S)),
    save_s=st.sampled_from((0.0, 5.0, 700.0)),
    detection_s=st.sampled_from((0.0, 5.0, 30.0)),
    seed=st.integers(0, 9),
)
def test_all_times_sum_to_the_wall_time(
    restart: str,
    share: float,
    rate: float,
    idle: int | None,
    limit: float | None,
    save_s: float,
    detection_s: float,
    seed: int,
) -> None:
    scenario = small(
        restart,
        failures_per_node_day=rate,
        node_loss_share=share,
        idle_nodes=idle,
        time_limit_s=limit,
        save_s=save_s,
        detection_s=detection_s,
        queue_wait_s=30.0,
    )
    outcome = simulate(scenario, duration_s=DAY_S, seed=seed)
    assert outcome.wall_s == DAY_S
    assert sums(outcome) == pytest.approx(outcome.wall_s)
    assert min(vars(outcome)[name] for name in vars(outcome) if name.endswith("_s")) >= 0
    assert outcome.productive_s <= outcome.kept_s * (1 + 1e-12)
    if restart != "elastic":
        assert outcome.productive_s == pytest.approx(outcome.kept_s)


def test_nothing_is_lost_where_nothing_fails() -> None:
    outcome = simulate(small(failures_per_node_day=0.0), duration_s=DAY_S, seed=1)
    assert outcome.lost_s == outcome.queued_s == 0.0
    assert outcome.down_s == 60.0
    assert outcome.ettr == pytest.approx(600 / 605, abs=0.002)


def test_a_time_limit_saves_before_it_and_loses_nothing() -> None:
    scenario = small(failures_per_node_day=0.0, time_limit_s=7200.0)
    outcome = simulate(scenario, duration_s=9 * 7266.0 + 7000, seed=1)
    assert outcome.attempts == 10
    assert outcome.lost_s == 0.0
    assert outcome.queued_s == pytest.approx(121.0 * 9)


def test_restarting_inside_beats_leaving_and_more_so_with_a_queue() -> None:
    ettr = {
        (restart, wait_s): simulate(
            small(restart, queue_wait_s=wait_s, time_limit_s=DAY_S), duration_s=40 * DAY_S, seed=2
        ).ettr
        for restart in POLICIES
        for wait_s in (0.0, 1800.0)
    }
    assert ettr["requeue", 0.0] < ettr["spare", 0.0]
    assert ettr["requeue", 1800.0] < ettr["same", 1800.0] < ettr["spare", 1800.0]
    assert (
        ettr["spare", 0.0] - ettr["requeue", 0.0] < ettr["spare", 1800.0] - ettr["requeue", 1800.0]
    )


def test_elastic_pays_where_the_queue_is_long_and_few_nodes_are_missing() -> None:
    def run(restart: str, nodes: int, rate: float, wait_s: float) -> float:
        scenario = small(
            restart,
            nodes=nodes,
            failures_per_node_day=rate,
            queue_wait_s=wait_s,
            time_limit_s=DAY_S,
        )
        return simulate(scenario, duration_s=20 * DAY_S, seed=2).ettr

    assert run("elastic", 64, 0.06, 3600.0) > run("same", 64, 0.06, 3600.0)
    assert run("elastic", 8, 0.5, 0.0) < run("same", 8, 0.5, 0.0)


def test_an_elastic_run_has_only_the_sizes_that_it_is_given() -> None:
    traced: list[Action] = []
    simulate(
        small("elastic", sizes=(8, 4), node_loss_share=1.0),
        duration_s=5 * DAY_S,
        seed=1,
        trace=lambda _, action: traced.append(action),
    )
    assert {len(action.nodes) for action in traced if isinstance(action, Start)} == {8, 4}


def test_a_cluster_without_idle_nodes_waits_for_the_repair() -> None:
    scenario = small(failures_per_node_day=0.1, node_loss_share=1.0)
    rich = simulate(scenario, duration_s=60 * DAY_S, seed=2)
    poor = simulate(replace(scenario, idle_nodes=0), duration_s=60 * DAY_S, seed=2)
    assert poor.queued_s > 20 * rich.queued_s > 0


def test_the_budget_of_the_real_spec_stops_the_simulated_run() -> None:
    recovery = replace(endless(restart="same"), max_failures=7)
    outcome = simulate(small(recovery=recovery), duration_s=60 * DAY_S, seed=2)
    assert outcome.stopped == "8 failures (recovery.max_failures=7)"
    assert outcome.wall_s < 60 * DAY_S
    assert sums(outcome) == pytest.approx(outcome.wall_s)


@pytest.mark.parametrize("gpus", [1024, 4096, 16000])
def test_no_interval_is_better_than_the_best_one_by_the_closed_form(gpus: int) -> None:
    scenario = published(gpus, 10)
    best_s = best_interval_s(scenario.failures_per_s, scenario.save_s, scenario.restart_cost_s)
    at_best = closed(replace(scenario, interval_s=best_s))
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert closed(replace(scenario, interval_s=best_s * factor)) < at_best


def test_the_simulator_knows_no_better_interval_either() -> None:
    """Shorter and longer ones by a factor of three are worse, in one and the same weather."""
    scenario = Scenario(8, 3.2, 600.0, 20.0, 60.0)
    best_s = best_interval_s(scenario.failures_per_s, scenario.save_s, scenario.restart_cost_s)
    ettr = [
        simulate(replace(scenario, interval_s=best_s * factor), duration_s=15 * DAY_S, seed=1).ettr
        for factor in (1 / 3, 1.0, 3.0)
    ]
    assert max(ettr) == ettr[1]
    assert min(ettr) < ettr[1] - 0.01


def test_the_best_interval_has_sensible_ends() -> None:
    assert best_interval_s(0.0, 5.0, 60.0) == float("inf")
    assert best_interval_s(1e-7, 5.0, 60.0) == pytest.approx((2 * 5.0 / 1e-7) ** 0.5, rel=0.01)
    assert best_interval_s(1.0, 5.0, 60.0) == pytest.approx(10**0.5)
    assert best_interval_s(1e-4, 0.0, 60.0) == 0.0
    with pytest.raises(ValueError, match="at least 0"):
        best_interval_s(-1.0, 5.0, 60.0)


def test_a_scenario_that_is_none_is_refused_with_all_its_problems() -> None:
    with pytest.raises(ValueError, match=r"save_s is at least 0, not -1.*interval_s is above 0"):
        Scenario(8, RATE, 0.0, -1.0, 60.0)
    with pytest.raises(ValueError, match="node_loss_share is at most 1, not 2"):
        small(node_loss_share=2)
    with pytest.raises(ValueError, match="sizes fall from nodes=8"):
        small("elastic", sizes=(4, 8))
    with pytest.raises(ValueError, match="min_nodes=9 is above nodes=8"):
        small(recovery=endless(restart="elastic", min_nodes=9))
    with pytest.raises(ValueError, match=r"time_limit_s=60\.0 is not above stop_lead_s"):
        small(time_limit_s=60.0)
