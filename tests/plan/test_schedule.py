"""Orders equal to torch's own, and what is simulated over them."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from air_hpc.config.spec import ParallelismSpec, PipelineSchedule
from air_hpc.errors import BadInput
from air_hpc.plan.pipeline_time import (
    StageTime,
    in_flight,
    most_held,
    pipeline_time,
    simulate,
)
from air_hpc.plan.schedule import (
    SCHEDULES,
    SINGLE_STAGE,
    Action,
    actions_by_rank,
    micro_batches_that_work,
    stage_owner,
    stages_per_rank,
)

TORCH_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv_zero_bubble": "ZBVZeroBubble",
    "dual_pipe_v": "DualPipeV",
}


def loops_of(schedule: PipelineSchedule) -> int:
    return 1 if schedule in SINGLE_STAGE else 2


@st.composite
def shapes(draw: st.DrawFn) -> tuple[PipelineSchedule, int, int, int]:
    schedule = draw(st.sampled_from(SCHEDULES))
    pp = draw(st.integers(1, 5))
    loops = loops_of(schedule)
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs"):
        loops = draw(st.integers(1, 3))
    micro_batches = draw(
        st.integers(1, 17).filter(lambda n: micro_batches_that_work(schedule, pp, loops, n) is None)
    )
    return schedule, pp, loops, micro_batches


def torchs_own(schedule: PipelineSchedule, pp: int, loops: int, n: int) -> list[list[Action]]:
    from torch.distributed.pipelining import PipelineStage, schedules

    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size = 0, pp
    stage.num_stages, stage.submod = pp * loops, None
    made = schedules.get_schedule_class(TORCH_NAMES[schedule])
    single = schedule in SINGLE_STAGE
    instance = made(stage if single else [stage] * loops, n)
    pipeline_order = instance._get_pipeline_order() if single else instance.pipeline_order
    return [list(_plain(pipeline_order[rank])) for rank in range(pp)]


def _plain(actions):  # type: ignore[no-untyped-def]
    for action in actions:
        if action is None or action.computation_type.value == "REDUCE_GRAD":
            continue
        for part in action.sub_actions or (action,):
            yield Action(part.computation_type.value, part.stage_index, part.microbatch_index)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (3, 6), (4, 8), (4, 10), (5, 23)])
def test_the_order_is_that_of_torch(
    schedule: PipelineSchedule, pp: int, micro_batches: int
) -> None:
    loops = loops_of(schedule)
    if micro_batches_that_work(schedule, pp, loops, micro_batches) is not None:
        with pytest.raises(ValueError, match=r"micro"):
            torchs_own(schedule, pp, loops, micro_batches)
        return
    ours = actions_by_rank(schedule, pp, loops, micro_batches)
    theirs = torchs_own(schedule, pp, loops, micro_batches)
    if schedule == "1f1b":
        # torch's listing counts the last rank's forward passes from 1; what it runs counts from 0.
        theirs[-1] = [
            a._replace(micro_batch=a.micro_batch - 1) if a.kind == "F" else a for a in theirs[-1]
        ]
    assert [list(order) for order in ours] == theirs


@given(shapes())
def test_every_stage_runs_each_micro_batch_once_and_no_rank_waits_for_ever(
    shape: tuple[PipelineSchedule, int, int, int],
) -> None:
    schedule, pp, loops, n = shape
    orders = actions_by_rank(*shape)
    owner = stage_owner(schedule, pp, loops)
    count: Counter[tuple[str, int, int]] = Counter()
    for rank, order in enumerate(orders):
        for kind, stage, index in order:
            assert owner[stage] == rank
            for half in "IW" if kind == "B" else kind:
                count[half, stage, index] += 1
    expected = {(k, s, i) for k in "FIW" for s in range(pp * loops) for i in range(n)}
    assert set(count) == expected
    assert set(count.values()) == {1}
    simulate(schedule, orders, [StageTime(1, 1, 1)] * (pp * loops))


def even(stages: int) -> list[StageTime]:
    return [StageTime(1.0, 1.0, 1.0)] * stages


@given(st.integers(1, 8), st.integers(1, 4))
def test_equal_stages_give_the_bubble_of_the_papers(pp: int, rounds: int) -> None:
    n = pp * rounds
    for schedule in SINGLE_STAGE:
        time = pipeline_time(schedule, pp, 1, n, even(pp))
        assert time.bubble_ratio == pytest.approx((pp - 1) / (n + pp - 1))
    twice = pipeline_time("interleaved_1f1b", pp, 2, n, even(2 * pp))
    assert twice.bubble_ratio == pytest.approx((pp - 1) / (2 * n + pp - 1))


def test_the_weight_passes_fill_the_bubble() -> None:
    pp, n = 4, 16
    plain = pipeline_time("interleaved_1f1b", pp, 2, n, even(8)).bubble_ratio
    filled = pipeline_time("interleaved_zero_bubble", pp, 2, n, even(8)).bubble_ratio
    v_shaped = pipeline_time("zbv_zero_bubble", pp, 2, n, even(8)).bubble_ratio
    assert v_shaped <= filled < plain
    unequal = [StageTime(1.0, 1.5, 0.7)] * 8
    assert pipeline_time("zbv_zero_bubble", pp, 2, n, unequal).bubble_ratio > v_shaped


def test_transfers_are_paid_between_ranks_and_not_inside_one() -> None:
    for schedule, hops in (("1f1b", 3), ("dual_pipe_v", 6)):
        stages = 4 * loops_of(schedule)  # type: ignore[arg-type]
        without = pipeline_time(schedule, 4, stages // 4, 8, even(stages)).makespan_s  # type: ignore[arg-type]
        slow = pipeline_time(schedule, 4, stages // 4, 8, even(stages), 0.25).makespan_s  # type: ignore[arg-type]
        assert slow >= without + 2 * 0.25 * hops * 0.5


@settings(max_examples=30)
@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 4),
    st.integers(0, 6),
    st.floats(0, 0.3),
    st.floats(0.5, 1.5),
)
def test_what_is_not_played_is_what_would_have_been(
    schedule: PipelineSchedule, pp: int, more: int, transfer_s: float, last: float
) -> None:
    loops = loops_of(schedule)
    n = pp * (4 * loops + 6 + more)
    times = [*even(pp * loops - 1), StageTime(last, last, last)]
    orders = actions_by_rank(schedule, pp, loops, n)
    whole = simulate(schedule, orders, times, transfer_s)
    short = pipeline_time(schedule, pp, loops, n, times, transfer_s)
    assert short.makespan_s == pytest.approx(whole.makespan_s, rel=1e-2)
    assert short.busy_s == pytest.approx(whole.busy_s)


def test_what_a_rank_holds_by_schedule() -> None:
    def held(schedule: PipelineSchedule, n: int = 16) -> list[int]:
        found = in_flight(schedule, 4, loops_of(schedule), n)
        return [sum(counts.values()) for counts in found]

    assert held("gpipe") == [16] * 4
    assert held("looped_bfs") == [32] * 4
    assert held("1f1b") == [4, 3, 2, 1]
    assert held("interleaved_1f1b") == [11, 9, 7, 5]  # (loops - 1) · pp + 2 · (pp - 1 - rank) + 1
    assert max(held("zbv_zero_bubble")) <= 2 * 4
    assert max(held("dual_pipe_v")) <= 2 * 4 + 1


@settings(max_examples=40)
@given(shapes(), st.integers(0, 3))
def test_a_full_pipeline_holds_no_more_with_more_micro_batches(
    shape: tuple[PipelineSchedule, int, int, int], more: int
) -> None:
    schedule, pp, loops, _ = shape
    n = pp * (3 * loops + 1 + more)
    weights = [1.0 + 0.1 * stage for stage in range(pp * loops)]
    orders = actions_by_rank(schedule, pp, loops, n)
    for order, held in zip(orders, in_flight(schedule, pp, loops, n, weights), strict=True):
        stages = {action.stage for action in order}
        whole = most_held(order, {stage: weights[stage] for stage in stages})
        assert sum(weights[s] * c for s, c in whole.items()) == pytest.approx(
            sum(weights[s] * c for s, c in held.items())
        )


def test_v_schedules_bring_both_ends_to_the_first_rank() -> None:
    assert stage_owner("zbv_zero_bubble", 4, 2) == (0, 1, 2, 3, 3, 2, 1, 0)
    assert stage_owner("looped_bfs", 4, 2) == (0, 1, 2, 3, 0, 1, 2, 3)


def test_automatic_stages_of_a_rank() -> None:
    assert stages_per_rank(ParallelismSpec(pp=4, pp_schedule="1f1b")) == 1
    assert stages_per_rank(ParallelismSpec(pp=4, pp_schedule="looped_bfs")) == 2
    assert stages_per_rank(ParallelismSpec(pp=1, pp_schedule="looped_bfs")) == 1
    assert stages_per_rank(ParallelismSpec(pp=4, pp_stages_per_rank=3)) == 3


def test_what_a_schedule_does_not_take_is_said() -> None:
    with pytest.raises(BadInput, match=r"at least pp \(4\)"):
        actions_by_rank("1f1b", 4, 1, 3)
    with pytest.raises(BadInput, match="another number of stages"):
        actions_by_rank("zbv_zero_bubble", 4, 3, 8)
