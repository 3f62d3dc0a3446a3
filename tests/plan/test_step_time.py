"""The step's time: what it must be by hand, what must make it longer, and what is unknown."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from air_hpc.config.compose import Composer
from air_hpc.config.spec import RunSpec
from air_hpc.plan.communication import traffic
from air_hpc.plan.make import make_plan
from air_hpc.plan.mesh import resolve_mesh
from air_hpc.plan.rates import Constants, Unknown
from air_hpc.plan.step_time import StepTime, step_time
from air_hpc.plan.work import Pass, block_work, embedding_work, head_work, job_of

SHARED = Composer()
IDEAL = Constants(matmul_share=1.0, attention_share=1.0, link_share=1.0)
H100 = (
    "cluster=slurm",
    "accelerator=h100_sxm",
    "launch.devices_per_node=8",
    "train.precision=bf16",
    "train.compile=true",
    "data.sequence_length=8192",
)


def spec_of(*overrides: str) -> RunSpec:
    return SHARED.compose([*H100, *overrides])


def timed(spec: RunSpec, micro: int = 1, constants: Constants | None = None) -> StepTime:
    mesh, problems = resolve_mesh(spec)
    assert mesh is not None, problems
    made = step_time(spec, mesh, micro, constants=constants)
    assert isinstance(made, StepTime), made
    return made


EIGHT_B = ("model=llama_8b", "parallelism=fsdp", "train.global_batch_size=64")


def test_the_matrix_products_of_one_node_are_flops_over_rate() -> None:
    made = timed(spec_of(*EIGHT_B), constants=IDEAL)
    tokens = 64 * 8192 / 8
    assert made.matmul_s == pytest.approx(6 * 7_504_658_432 * tokens / (0.8 * 989e12), rel=1e-6)
    attention = 32 * 4096 * 8192 * 2 * tokens  # two products, half masked, forward
    assert made.attention_s == pytest.approx(3.5 * attention / (0.8 * 989e12), rel=1e-6)
    assert made.tp_s == made.cp_s == made.ep_s == made.bubble_s == made.dp_s == 0


def test_a_step_is_the_sum_of_its_parts_and_the_plan_says_it() -> None:
    spec = spec_of(*EIGHT_B)
    plan, _ = make_plan(spec)
    assert plan is not None
    mesh, micro = plan.mesh, plan.micro_batch_size
    made = step_time(spec, mesh, micro)
    assert isinstance(made, StepTime)
    assert plan.step_time_s == pytest.approx(sum(vars(made).values()))


def test_a_calibrated_device_goes_by_what_was_measured() -> None:
    spec = spec_of(*EIGHT_B)
    mesh, _ = resolve_mesh(spec)
    assert mesh is not None
    half = step_time(spec, mesh, 1, measured_flops_per_s=0.4 * 989e12)
    assert isinstance(half, StepTime)
    assert half.matmul_s == pytest.approx(2 * timed(spec).matmul_s)
    assert half.memory_bound_s == pytest.approx(timed(spec).memory_bound_s)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("parallelism.recompute=full", "recompute_s"),
        ("parallelism.recompute=ops", "recompute_s"),
        ("parallelism.tp=2", "tp_s"),
        ("parallelism.cp=2", "cp_s"),
        ("train.compile=false", "memory_bound_s"),
        ("accelerator.scale_up_bytes_per_s=5e9", "fsdp_s"),
        ("accelerator.memory_bandwidth_bytes_per_s=1e12", "optimizer_s"),
    ],
)
def test_what_costs_time_shows_in_its_part(change: str, part: str) -> None:
    before, after = timed(spec_of(*EIGHT_B)), timed(spec_of(*EIGHT_B, change))
    assert getattr(after, part) > getattr(before, part)


def test_recompute_by_operation_costs_less_than_all_and_more_than_none() -> None:
    none, ops, full = (
        timed(spec_of(*EIGHT_B, f"parallelism.recompute={p}")).total_s
        for p in ("none", "ops", "full")
    )
    assert none < ops < full


def test_collectives_that_leave_the_node_are_slower() -> None:
    base = ("model=llama_70b", "parallelism=fsdp", "launch.nodes=8", "train.global_batch_size=64")
    inside = timed(spec_of(*base, "parallelism.tp=8"))
    shared = replace(spec_of(*base, "parallelism.tp=8").accelerator, scale_up_devices=4)
    across = timed(replace(spec_of(*base, "parallelism.tp=8"), accelerator=shared))
    assert across.tp_s > 2 * inside.tp_s


def test_replicas_add_up_gradients_behind_the_backward_pass() -> None:
    base = ("model=llama_8b", "launch.nodes=2", "train.global_batch_size=16")
    hybrid = timed(spec_of(*base, "parallelism=hsdp"))
    assert 0 < hybrid.dp_s < 0.1 * hybrid.total_s
    slow = timed(spec_of(*base, "parallelism=hsdp", "accelerator.scale_out_bytes_per_s=1e8"))
    assert slow.dp_s > 10 * hybrid.dp_s


PIPELINE = (
    "model=llama_70b",
    "parallelism=fsdp",
    "parallelism.pp=4",
    "parallelism.tp=8",
    "launch.nodes=8",
    "train.global_batch_size=64",
)


def test_a_pipelines_bubble_shrinks_with_stages_and_with_micro_batches() -> None:
    plain = timed(spec_of(*PIPELINE))
    looped = timed(
        spec_of(
            *PIPELINE,
            "parallelism.pp_schedule=interleaved_1f1b",
            "parallelism.pp_stages_per_rank=4",
        )
    )
    more = timed(spec_of(*PIPELINE, "train.global_batch_size=256"))
    assert looped.bubble_s < 0.5 * plain.bubble_s
    assert more.bubble_s / more.total_s < 0.4 * plain.bubble_s / plain.total_s
    busy = plain.total_s - plain.bubble_s
    assert plain.bubble_s / busy == pytest.approx(3 / 32, rel=0.25)  # (pp - 1) / micro-batches


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        (("accelerator=gb200",), "matmul_ceiling"),
        (("accelerator=cpu",), "peak_flops.bf16"),
        (("accelerator.memory_bandwidth_bytes_per_s=null",), "memory_bandwidth_bytes_per_s"),
        (("accelerator.scale_out_bytes_per_s=null",), "scale_out_bytes_per_s"),
        (("accelerator.scale_up_bytes_per_s=null",), "scale_up_bytes_per_s"),
        (("parallelism.cpu_offload=true",), "cpu_offload"),
    ],
)
def test_a_missing_figure_is_named_and_gives_no_time(
    changes: tuple[str, ...], missing: str
) -> None:
    spec = spec_of(*EIGHT_B, "launch.nodes=2", *changes)
    mesh, _ = resolve_mesh(spec)
    assert mesh is not None
    made = step_time(spec, mesh, 1)
    assert isinstance(made, Unknown)
    assert missing in made.reason
    plan, _ = make_plan(spec, to_run=False)
    assert plan is None or plan.step_time_s is None


@pytest.mark.parametrize(
    "changes",
    [
        ("parallelism.tp=4",),
        ("parallelism.cp=2", "parallelism.cp_method=ring"),
        ("parallelism.cp=2", "parallelism.tp=2"),
        ("parallelism.recompute=full", "parallelism.tp=2"),
        ("parallelism.reshard_after_forward=false",),
    ],
)
def test_time_is_made_of_the_bytes_that_communication_counts(changes: tuple[str, ...]) -> None:
    """tp and cp, block by block, against `plan.communication`; small reductions left out."""
    spec = spec_of(*EIGHT_B, *changes)
    mesh, _ = resolve_mesh(spec)
    assert mesh is not None
    job = job_of(spec, mesh, 1)
    block = block_work(job, False, None)
    ours: Counter[str] = Counter()

    def add(work: Pass, times: int) -> None:
        for transfer in work.transfers:
            ours[transfer.name] += times * transfer.count * transfer.whole_bytes  # type: ignore[assignment]

    for work in (block.forward, block.backward, block.again):
        add(work, 32 * job.micro_batches)
    for end in (embedding_work(job), head_work(job)):
        add(end.forward, job.micro_batches)
        add(end.backward, job.micro_batches)
    theirs: Counter[str] = Counter()
    for item in traffic(spec, mesh, 1):
        if item.collective != "all_reduce":
            theirs[item.axis] += item.payload_bytes
    for axis in ("tp", "cp"):
        assert ours[axis] == pytest.approx(theirs[axis], rel=1e-6), axis
