"""Which ranks are named as slow, when, and how often."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_hpc.config.spec import StragglerSpec
from air_hpc.recovery.stragglers import Change, Straggler, Stragglers

SPEC = StragglerSpec(threshold=0.1, window_s=60.0)


class Ranks:
    """Ranks that report their compute time every `report_s`."""

    def __init__(self, *step_s: float, report_s: float = 5.0, **facts: Any) -> None:
        self.step_s = list(step_s)
        self.now = 1000.0
        self.report_s = report_s
        self.totals = [(0, 0)] * len(step_s)
        self.silent: set[int] = set()
        nodes = {rank: f"n{rank}" for rank in range(len(step_s))}
        self.stragglers = Stragglers(SPEC, nodes, **facts)
        self.told: list[Straggler] = []

    def train(self, seconds: float, steps_a_report: int = 10) -> list[Straggler]:
        told: list[Straggler] = []
        until = self.now + seconds
        while self.now < until:
            self.now += self.report_s
            for rank, each in enumerate(self.step_s):
                ns, steps = self.totals[rank]
                self.totals[rank] = ns + int(each * steps_a_report * 1e9), steps + steps_a_report
                if rank not in self.silent:
                    self.stragglers.sample(rank, *self.totals[rank], self.now)
            told += self.stragglers.tick(self.now)
        self.told += told
        return told


def test_a_rank_slower_for_the_whole_window_is_told_once() -> None:
    ranks = Ranks(1.0, 1.0, 1.0, 1.18)
    assert ranks.train(55) == []
    (found,) = ranks.train(600)
    assert (found.rank, found.node, found.change) == (3, "n3", Change.FOUND)
    assert found.ratio == pytest.approx(1.18)
    assert found.window_s == pytest.approx(60)
    assert ranks.stragglers.slow == (3,)


def test_below_the_threshold_nobody_is_told() -> None:
    assert Ranks(1.0, 1.02, 0.98, 1.09).train(600) == []


def test_a_short_slowness_is_no_straggler() -> None:
    ranks = Ranks(1.0, 1.0, 1.0)
    ranks.train(120)
    ranks.step_s[1] = 2.0
    ranks.train(20)
    ranks.step_s[1] = 1.0
    ranks.train(300)
    assert ranks.told == []


def test_it_is_told_again_when_it_worsens_a_lot_and_when_it_ends() -> None:
    ranks = Ranks(1.0, 1.0, 1.2)
    ranks.train(120)
    ranks.step_s[2] = 1.25
    assert ranks.train(300) == []
    ranks.step_s[2] = 2.0
    ranks.train(300)
    ranks.step_s[2] = 1.0
    ranks.train(300)
    assert [one.change for one in ranks.told] == [Change.FOUND, Change.WORSE, Change.ENDED]
    assert ranks.stragglers.slow == ()


def test_one_that_hovers_at_the_threshold_does_not_come_and_go() -> None:
    ranks = Ranks(1.0, 1.0, 1.11)
    for turn in range(20):
        ranks.step_s[2] = 1.11 if turn % 2 else 1.08
        ranks.train(60)
    assert len(ranks.told) <= 1


def test_of_two_ranks_the_faster_is_the_measure() -> None:
    (found,) = Ranks(1.0, 1.3).train(120)
    assert (found.rank, found.ratio) == (1, pytest.approx(1.3))


def test_half_of_the_ranks_may_be_slow() -> None:
    assert {one.rank for one in Ranks(1.0, 1.3, 1.0, 1.3).train(120)} == {1, 3}


def test_a_rank_alone_is_never_slow() -> None:
    assert Ranks(1.0).train(600) == []


def test_a_rank_that_is_fast_is_not_told() -> None:
    assert Ranks(1.0, 1.0, 0.5).train(600) == []


def test_other_stages_of_a_pipeline_are_no_measure() -> None:
    ranks = Ranks(1.0, 1.0, 2.0, 2.5, peers={0: 0, 1: 0, 2: 1, 3: 1})
    assert [one.rank for one in ranks.train(120)] == [3]


def test_a_rank_without_samples_hides_nobody_and_is_not_named() -> None:
    ranks = Ranks(1.0, 1.0, 1.0, 1.2, 9.0)
    ranks.silent = {4}
    assert [one.rank for one in ranks.train(200)] == [3]


def test_without_samples_of_most_ranks_nothing_is_judged() -> None:
    ranks = Ranks(1.0, 1.0, 1.2, 1.0)
    ranks.silent = {0, 1}
    assert ranks.train(600) == []


def test_reports_rarer_than_the_window_make_it_longer() -> None:
    (found,) = Ranks(1.0, 1.0, 1.2, report_s=100).train(700)
    assert found.window_s >= 400


def test_a_rank_that_starts_anew_is_measured_anew() -> None:
    ranks = Ranks(1.0, 1.0, 1.0)
    ranks.train(100)
    ranks.totals = [(0, 0)] * 3
    assert ranks.train(600) == []


def test_what_no_rank_of_the_generation_reports_is_no_news() -> None:
    stragglers = Stragglers(SPEC, {0: "n0"})
    stragglers.sample(7, 1, 1, 0.0)
    assert stragglers.tick(100.0) == []


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(-5, 10**12), st.integers(-5, 10**6)), max_size=60
    )
)
def test_no_samples_make_it_fail(samples: list[tuple[int, int, int]]) -> None:
    stragglers = Stragglers(SPEC, {rank: "n" for rank in range(3)})
    for number, (rank, ns, steps) in enumerate(samples):
        stragglers.sample(rank, ns, steps, number * 10.0)
        for one in stragglers.tick(number * 10.0):
            assert one.rank in range(3)
