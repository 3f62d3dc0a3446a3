"""When silence is a hang, and who fell silent first: pure, by hand and by property."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_hpc.config.spec import HangSpec
from air_hpc.recovery.hang import (
    LONGEST_EVIDENCE,
    GroupReport,
    PhaseDurations,
    PhaseWatch,
    RankReport,
    blame,
)
from air_hpc.session.page import NONE, PHASES

SPEC = HangSpec(factor=5, step_s=10, first_step_s=100, save_s=50, init_s=60, start_s=20)


def watch_at_step(step: int, now: float, spec: HangSpec = SPEC) -> PhaseWatch:
    """The clock of a worker that has done `step` and begun the next one, at `now`."""
    watch = PhaseWatch(3, spec, PhaseDurations())
    watch.observe("step", step + 1, step, now)
    return watch


class TestPhaseWatch:
    def test_every_phase_has_a_floor(self) -> None:
        names = {field.name for field in fields(HangSpec)}
        assert {f"{phase}_s" for phase in PHASES} <= names

    def test_a_step_without_a_sign_for_longer_than_its_limit_is_overdue(self) -> None:
        watch = watch_at_step(16, 100)
        watch.observe("step", 17, 16, 110)
        assert watch.overdue(110) is None
        late = watch.overdue(110.5)
        assert late is not None
        assert late.to_json() == {
            "rank": 3, "phase": "step", "step": 17, "for_s": 10.5, "limit_s": 10,
        }  # fmt: skip

    @pytest.mark.parametrize(
        "sign", [("step", 18, 16), ("step", 17, 17), ("save", 17, 16)], ids=str
    )
    def test_every_change_of_the_page_is_a_sign_of_progress(
        self, sign: tuple[str, int, int]
    ) -> None:
        watch = watch_at_step(16, 100)
        watch.observe(*sign, 109)
        assert watch.overdue(115) is None

    def test_a_worker_that_never_comes_out_of_its_start_is_overdue(self) -> None:
        watch = PhaseWatch(0, SPEC, PhaseDurations())
        assert watch.overdue(1e9) is None, "nobody has looked yet"
        watch.observe("start", NONE, NONE, 0)
        assert watch.overdue(20) is None
        assert watch.overdue(21) is not None

    def test_each_phase_has_its_own_limit(self) -> None:
        watch = watch_at_step(16, 0)
        watch.observe("save", 17, 17, 5)
        assert watch.overdue(54) is None
        assert watch.overdue(56) is not None

    def test_the_limit_grows_with_what_was_seen(self) -> None:
        watch = watch_at_step(1, 0)
        watch.observe("step", 2, 2, 9)
        assert watch.standing(9) == (0, 45)

    def test_what_one_generation_learned_holds_for_the_next(self) -> None:
        durations = PhaseDurations()
        durations.learn("load", 1000)
        watch = PhaseWatch(0, SPEC, durations)
        watch.observe("load", NONE, NONE, 0)
        assert watch.standing(0)[1] == 5000

    def test_the_first_step_has_a_floor_of_its_own_and_teaches_nothing(self) -> None:
        watch = PhaseWatch(0, SPEC, PhaseDurations())
        watch.observe("step", 41, NONE, 0)
        assert watch.overdue(99) is None
        assert watch.overdue(101) is not None
        watch.observe("step", 41, 41, 90)
        assert watch.standing(90)[1] == SPEC.step_s

    def test_a_silence_that_was_overdue_teaches_nothing(self) -> None:
        watch = watch_at_step(1, 0)
        watch.observe("step", 2, 2, 400)
        assert watch.standing(400)[1] == SPEC.step_s

    def test_a_stall_of_the_observer_is_held_against_nobody_and_not_learned(self) -> None:
        watch = watch_at_step(1, 0)
        watch.observe("step", 2, 1, 1003, stalled_s=1000)
        assert watch.standing(1003)[0] == 3
        watch.observe("step", 2, 2, 1004)
        assert watch.standing(1004)[1] == 20  # five times the four seconds that it took

    def test_a_stall_longer_than_the_silence_leaves_none(self) -> None:
        watch = watch_at_step(1, 100)
        watch.observe("step", 2, 1, 101, stalled_s=50)
        assert watch.standing(101)[0] == 0

    def test_who_waits_for_the_step_of_a_stop_is_never_overdue_but_is_after_it(self) -> None:
        watch = watch_at_step(16, 0)
        for now in range(1, 100):
            watch.observe("step", 17, 16, now, awaits_target=True)
            assert watch.overdue(now) is None
        watch.observe("step", 17, 16, 100)
        assert watch.overdue(108) is None
        assert watch.overdue(110) is not None
        watch.observe("step", 17, 17, 108)
        assert watch.standing(108)[1] == SPEC.step_s, "what it waited is no length of a step"

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(PHASES),
                st.floats(0, 1000),
                st.booleans(),
                st.floats(0, 100),
            ),
            max_size=40,
        )
    )
    def test_the_limit_never_falls_below_its_floor_nor_shrinks(
        self, story: list[tuple[str, float, bool, float]]
    ) -> None:
        durations = PhaseDurations()
        watch = PhaseWatch(0, SPEC, durations)
        now, done, longest = 0.0, 0, 0.0
        before = {phase: durations.limit_s(phase, SPEC) for phase in PHASES}
        assert before == {phase: getattr(SPEC, f"{phase}_s") for phase in PHASES}
        for phase, wait_s, progress, stalled_s in story:
            now, done = now + wait_s, done + progress
            longest = max(longest, watch.standing(now)[0])
            watch.observe(phase, done, done, now, stalled_s=stalled_s)
            for_s, limit_s = watch.standing(now)
            assert 0 <= for_s <= now
            assert (watch.overdue(now) is not None) == (for_s > limit_s)
            after = {phase: durations.limit_s(phase, SPEC) for phase in PHASES}
            assert all(after[phase] >= before[phase] for phase in PHASES)
            assert all(
                after[phase] <= max(before[phase], SPEC.factor * longest) for phase in PHASES
            )
            before = after


def report(rank: int, *groups: GroupReport, **facts: Any) -> RankReport:
    """A rank of two a node, in good order at step 17."""
    defaults: dict[str, Any] = {
        "node": f"n{rank // 2 + 1}", "state": "S", "answered": True, "phase": "step",
        "begun": 17, "done": 16, "for_s": 20.0, "limit_s": 10.0,
    }  # fmt: skip
    return RankReport(rank=rank, groups=groups, **{**defaults, **facts})


def at(sequence: int | None, waits: bool = False, group: str = "dp") -> GroupReport:
    return GroupReport(group, sequence, f"all_reduce #{sequence}" if waits else None)


WAITING = tuple(report(rank, at(412, waits=True)) for rank in range(4))


def with_rank(changed: RankReport) -> list[RankReport]:
    return [changed if r.rank == changed.rank else r for r in WAITING]


class TestBlame:
    def test_a_stopped_process(self) -> None:
        found = blame(with_rank(report(3, state="T", answered=False)))
        assert (found.rank, found.node) == (3, "n2")
        assert found.evidence == (
            "rank 3 on n2 is silent at step 17 in phase step: its process is stopped (SIGSTOP); "
            "the others wait in all_reduce #412 of group dp"
        )

    def test_a_process_that_is_gone(self) -> None:
        found = blame(with_rank(report(1, state="X", answered=False)))
        assert (found.rank, "has ended" in found.evidence) == (1, True)

    def test_a_node_that_does_not_answer(self) -> None:
        found = blame(WAITING[:2], {2: "n2", 3: "n2"})
        assert (found.rank, found.node) == (2, "n2")
        assert "its agent did not answer" in found.evidence

    def test_a_stopped_process_comes_before_a_node_that_does_not_answer(self) -> None:
        assert blame([report(0, state="T"), WAITING[1]], {2: "n2", 3: "n2"}).rank == 0

    def test_a_worker_that_alone_does_not_answer(self) -> None:
        found = blame(with_rank(report(2, answered=False, top="sleep (x.py:3)")))
        assert found.rank == 2
        assert found.evidence.endswith("; it is at sleep (x.py:3)")

    def test_a_worker_that_a_disk_holds_is_said_to_be(self) -> None:
        found = blame(with_rank(report(2, answered=False, state="D")))
        assert "stands in the kernel" in found.evidence

    def test_the_rank_that_has_not_entered_the_collective(self) -> None:
        found = blame(with_rank(report(1, at(411))))
        assert found.rank == 1
        assert "it has not gone past #411 of group dp, where others are at #412" in found.evidence
        assert "the others wait in all_reduce #412 of group dp" in found.evidence

    def test_one_that_waits_elsewhere_itself_is_not_the_first(self) -> None:
        """Rank 1 is missed in `dp` since it waits in `tp` for rank 3, which waits for nobody."""
        reports = [
            report(0, at(412, waits=True)),
            report(1, at(411), at(7, waits=True, group="tp")),
            report(2, at(412, waits=True)),
            report(3, at(411), at(6, group="tp")),
        ]
        assert blame(reports).rank == 3
        stuck = [*reports[:3], replace(reports[3], groups=(at(411), at(6, True, "tp")))]
        found = blame(stuck)
        assert found.rank == 1
        assert "(it waits in all_reduce #7 of group tp itself)" in found.evidence

    def test_a_group_that_does_not_count_accuses_nobody(self) -> None:
        assert blame(with_rank(report(1, at(None, waits=True)))).rank is None

    def test_parallel_groups_are_not_compared(self) -> None:
        reports = [report(0, at(5, True, "dp(0)")), report(1, at(9, True, "dp(1)"))]
        assert blame(reports).rank is None

    def test_the_rank_behind_in_its_step(self) -> None:
        found = blame([report(0), report(1, begun=16, done=15), report(2), report(3)])
        assert found.rank == 1
        assert "is silent at step 16 in phase step: it lies behind" in found.evidence

    def test_the_rank_behind_in_its_phase(self) -> None:
        start = {"begun": NONE, "done": NONE}
        reports = [report(0, phase="step", **start), report(1, phase="data", **start)]
        found = blame(reports)
        assert found.rank == 1
        assert "rank 1 on n1 is silent in phase data" in found.evidence

    def test_nobody_is_named_where_all_wait_in_the_same_collective(self) -> None:
        found = blame(WAITING)
        assert (found.rank, found.node) == (None, None)
        assert found.evidence == (
            "no rank could be told apart: all 4 are in phase step at step 17; they wait in "
            "all_reduce #412 of group dp, which all have entered"
        )

    def test_a_single_rank_is_the_one(self) -> None:
        assert blame([report(0)]).rank == 0

    def test_nothing_known_is_said(self) -> None:
        found = blame([])
        assert (found.rank, "nobody reported" in found.evidence) == (None, True)

    def test_a_rank_within_its_own_limit_is_given_its_time(self) -> None:
        saving = report(0, phase="save", begun=16, done=16, for_s=20, limit_s=1800)
        found = blame(with_rank(saving))
        assert (found.rank, found.patience_s) == (0, 1780)
        assert blame(with_rank(replace(saving, state="T"))).patience_s == 0


groups = st.builds(
    GroupReport,
    st.sampled_from(["dp", "tp", "default_pg(0,1)"]),
    st.none() | st.integers(0, 5),
    st.none() | st.text(max_size=200),
)
rank_reports = st.builds(
    RankReport,
    rank=st.integers(0, 7),
    node=st.text(max_size=80),
    state=st.none() | st.sampled_from("RSDTtZX"),
    answered=st.booleans(),
    phase=st.sampled_from(PHASES),
    begun=st.integers(-1, 3),
    done=st.integers(-1, 3),
    groups=st.lists(groups, max_size=3, unique_by=lambda group: group.group).map(tuple),
    top=st.none() | st.text(max_size=300),
    for_s=st.floats(0, 100),
    limit_s=st.floats(1, 100),
)


@given(
    st.lists(rank_reports, max_size=8, unique_by=lambda r: r.rank),
    st.dictionaries(st.integers(8, 12), st.just("n9")),
    st.randoms(),
)
def test_any_reports_give_one_line_that_names_a_reported_rank_in_any_order(
    reports: list[RankReport], missing: dict[int, str], shuffle: Any
) -> None:
    found = blame(reports, missing)
    nodes = {r.rank: r.node for r in reports} | missing | {None: None}
    assert nodes[found.rank] == found.node
    assert "\n" not in found.evidence
    assert 0 < len(found.evidence) <= LONGEST_EVIDENCE
    assert found.patience_s >= 0
    shuffle.shuffle(reports)
    assert blame(reports, missing) == found
    again = [RankReport.from_json(json.loads(json.dumps(r.to_json()))) for r in reports]
    assert again == reports
