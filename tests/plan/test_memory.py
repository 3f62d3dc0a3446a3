"""Bytes on a rank: against peaks that torch's tracker found, and what must hold anywhere."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from air_hpc.config.compose import Composer
from air_hpc.config.spec import LaunchSpec, ModelSpec, MoeSpec, ParallelismSpec, RunSpec, TrainSpec
from air_hpc.hardware.accelerator import AcceleratorSpec
from air_hpc.plan.memory import memory_by_stage, memory_per_rank
from air_hpc.plan.types import MemoryPerRank, Mesh

SHARED = Composer()


def spec_of(mesh: Mesh, *overrides: str, accumulation: int = 1, micro: int = 1) -> RunSpec:
    spec = SHARED.compose(["cluster=slurm", "tracking.uri=null", *overrides])
    degrees = {f.name: getattr(mesh, f.name) for f in fields(Mesh)}
    batch = mesh.data_parallel_size * accumulation * micro
    return replace(
        spec,
        parallelism=replace(spec.parallelism, **degrees),
        launch=LaunchSpec(nodes=max(1, mesh.world_size // 8), devices_per_node=8),
        train=replace(spec.train, micro_batch_size=micro, global_batch_size=batch),
    )


@dataclass(frozen=True)
class Tracked:
    """A rank's run whose tensors torch was asked for, and the bytes at their fullest."""

    model: str
    sequence_length: int
    mesh: Mesh
    peak_bytes: int
    overrides: tuple[str, ...] = ()
    accumulation: int = 1
    pp_rank: int = 0


def full(*overrides: str) -> tuple[str, ...]:
    return ("parallelism.recompute=full", *overrides)


THREE, FOUR, FP32 = "model.layers=3", "model.layers=4", "train.precision=fp32"
OPS = "parallelism.recompute=ops"
WHOLE_LOGITS = "parallelism.loss_parallel=false"
KEEP = "parallelism.reshard_after_forward=false"
RING = "parallelism.cp_method=ring"
TRACKED = (
    Tracked("llama_1b", 2048, Mesh(dp_shard=8), 9_604_832_860),
    Tracked("llama_160m", 1024, Mesh(dp_replicate=4), 3_899_228_632, accumulation=2),
    Tracked("llama_1b", 512, Mesh(), 10_196_783_276, (FOUR, FP32)),
    Tracked("llama_8b", 8192, Mesh(dp_shard=16, tp=4), 6_898_726_036, (THREE,)),
    Tracked("llama_8b", 8192, Mesh(dp_shard=16, tp=4), 5_829_031_060, (THREE, OPS)),
    Tracked("llama_8b", 8192, Mesh(dp_shard=16, tp=8), 13_160_727_692, full(THREE, WHOLE_LOGITS)),
    Tracked("llama_8b", 4096, Mesh(dp_replicate=4, dp_shard=16), 14_835_413_176, full(FOUR), 4),
    Tracked("llama_8b", 2048, Mesh(dp_shard=64), 11_833_861_304, full(FOUR, KEEP), 2),
    Tracked("llama_8b", 32768, Mesh(dp_shard=4, cp=4), 22_270_948_492, (THREE,)),
    Tracked("llama_8b", 32768, Mesh(dp_shard=4, cp=4, tp=2), 13_172_348_052, (THREE, RING)),
    Tracked("llama_8b", 32768, Mesh(dp_shard=4, cp=4), 16_529_699_980, full(THREE, RING)),
    Tracked("mixtral_8x7b", 4096, Mesh(dp_shard=16, ep=8), 13_683_398_072, (THREE,)),
    Tracked("mixtral_8x7b", 4096, Mesh(dp_shard=16, ep=4, tp=2), 8_018_817_616, full(THREE), 2),
    Tracked("qwen3_30b_a3b", 4096, Mesh(dp_shard=16, ep=8), 16_615_894_968, (THREE,), 2),
    Tracked("gemma2_9b", 2048, Mesh(dp_shard=16), 16_548_292_428, (FOUR,)),
    Tracked("llama_70b", 8192, Mesh(pp=8, dp_shard=16, tp=8), 62_294_929_752, (), 16, 0),
    Tracked("llama_70b", 8192, Mesh(pp=8, dp_shard=16, tp=8), 35_893_797_240, (), 16, 4),
    Tracked("llama_70b", 8192, Mesh(pp=8, dp_shard=16, tp=8), 16_053_950_824, (), 16, 7),
)
"""Traced with torch 2.13 on a CPU: `python -m air_hpc.parallel.trace`."""


@pytest.mark.parametrize("run", TRACKED, ids=lambda run: f"{run.model} {run.mesh}")
def test_the_peak_is_what_torch_allocates(run: Tracked) -> None:
    spec = spec_of(
        run.mesh,
        f"model={run.model}",
        f"data.sequence_length={run.sequence_length}",
        "accelerator=cpu",
        "train.precision=bf16",
        *run.overrides,
        accumulation=run.accumulation,
    )
    estimate = memory_by_stage(spec, run.mesh, 1)[run.pp_rank]
    assert estimate.tensor_bytes == pytest.approx(run.peak_bytes, rel=0.1)


LLAMA = ("model=llama_8b", "accelerator=cpu", "train.precision=bf16")


def of(*overrides: str, mesh: Mesh | None = None, accumulation: int = 1) -> MemoryPerRank:
    mesh = Mesh(dp_shard=8) if mesh is None else mesh
    return memory_per_rank(spec_of(mesh, *LLAMA, *overrides, accumulation=accumulation), mesh, 1)


def test_state_is_divided_by_what_shards_it() -> None:
    parameters = 8_030_261_248
    whole = of(mesh=Mesh(dp_replicate=8))
    assert whole.optimizer_bytes == 8 * parameters
    assert whole.gradients_bytes >= 4 * parameters
    for mesh in (Mesh(dp_shard=8), Mesh(dp_shard=2, cp=4), Mesh(dp_replicate=2, dp_shard=8)):
        assert of(mesh=mesh).optimizer_bytes == parameters
    assert of(mesh=Mesh(tp=8)).optimizer_bytes == pytest.approx(parameters, rel=1e-3)


def test_offload_leaves_the_gathered_copies_on_the_device() -> None:
    kept, offloaded = of(), of("parallelism.cpu_offload=true")
    assert offloaded.optimizer_bytes == 0
    assert 0 < offloaded.weights_bytes < kept.weights_bytes
    assert offloaded.total_bytes < kept.total_bytes


def test_what_stays_gathered_is_held_whole() -> None:
    kept = of("parallelism.reshard_after_forward=false").weights_bytes
    assert kept - of().weights_bytes > 8_030_261_248
    deeper = of("parallelism.prefetch=3").weights_bytes - of().weights_bytes
    assert deeper == 2 * 2 * 218_112_000


def test_recompute_trades_activations() -> None:
    bytes_of = {
        policy: of(f"parallelism.recompute={policy}", "data.sequence_length=8192")
        for policy in ("none", "ops", "full", "budget")
    }
    held = {policy: found.activations_bytes for policy, found in bytes_of.items()}
    assert held["full"] < held["ops"] < held["none"]
    assert held["full"] < held["budget"] < held["none"]
    most = of("parallelism.recompute=budget", "parallelism.recompute_budget=1.0",
              "data.sequence_length=8192")  # fmt: skip
    assert most.activations_bytes == pytest.approx(held["none"], rel=0.02)


def test_a_cut_loss_holds_less_than_a_whole_one() -> None:
    mesh = Mesh(dp_shard=2, tp=4)
    cut = of("data.sequence_length=8192", mesh=mesh)
    whole = of("data.sequence_length=8192", "parallelism.loss_parallel=false", mesh=mesh)
    assert whole.logits_bytes == 3 * cut.logits_bytes  # a third copy, of a quarter each


def test_a_schedule_decides_how_many_micro_batches_a_rank_holds() -> None:
    mesh = Mesh(pp=4, dp_shard=2)
    spec = spec_of(mesh, *LLAMA, "data.sequence_length=4096", accumulation=16)
    by_rank = memory_by_stage(spec, mesh, 1)
    assert [rank.pp_rank for rank in by_rank] == [0, 1, 2, 3]
    held = [rank.activations_bytes for rank in by_rank]
    assert held == sorted(held, reverse=True)
    assert memory_per_rank(spec, mesh, 1) == max(by_rank, key=lambda rank: rank.total_bytes)
    gpipe = replace(spec, parallelism=replace(spec.parallelism, pp_schedule="gpipe"))
    assert memory_by_stage(gpipe, mesh, 1)[0].activations_bytes == pytest.approx(4 * held[0])
    v_shaped = replace(spec, parallelism=replace(spec.parallelism, pp_schedule="zbv_zero_bubble"))
    ends = memory_by_stage(v_shaped, mesh, 1)
    assert ends[0].logits_bytes > 0
    assert ends[1].logits_bytes == 0


def test_a_gpu_has_a_margin_and_fused_kernels() -> None:
    cpu, gpu = of(), of("accelerator=h100_sxm")
    assert cpu.margin_bytes == 0
    assert gpu.margin_bytes > 1e9
    assert gpu.activations_bytes < cpu.activations_bytes


MODELS = st.sampled_from(
    [
        ModelSpec(layers=4, heads=8, kv_heads=8),
        ModelSpec(layers=5, heads=8, kv_heads=8, qk_norm=True, post_norms=True, tied_head=True),
        ModelSpec(layers=4, heads=8, kv_heads=8, moe=MoeSpec(experts=8, dense_layers=1)),
        ModelSpec(layers=4, heads=8, kv_heads=8, attention_softcap=50.0, logit_softcap=30.0),
    ]
)
DEGREES = st.sampled_from([1, 2, 4])


@settings(max_examples=80)
@given(
    MODELS,
    st.builds(Mesh, pp=DEGREES, dp_replicate=DEGREES, dp_shard=DEGREES, cp=DEGREES, tp=DEGREES),
    st.sampled_from(["fp32", "bf16"]),
    st.sampled_from(["none", "full", "ops"]),
    st.integers(1, 3),
)
def test_parts_are_never_less_than_the_whole_and_more_tokens_never_take_less(
    model: ModelSpec, mesh: Mesh, precision: str, recompute: str, micro: int
) -> None:
    spec = RunSpec(
        model=model,
        parallelism=ParallelismSpec(pp=mesh.pp, recompute=recompute),  # type: ignore[arg-type]
        train=TrainSpec(
            global_batch_size=mesh.data_parallel_size * 12,
            precision=precision,  # type: ignore[arg-type]
        ),
        accelerator=AcceleratorSpec(name="cpu", kind="cpu"),
    )
    for rank in memory_by_stage(spec, mesh, micro):
        parts = [getattr(rank, f.name) for f in fields(MemoryPerRank)]
        assert all(isinstance(part, int) and part >= 0 for part in parts)
        largest = max(rank.weights_bytes, rank.activations_bytes, rank.gradients_bytes)
        assert rank.optimizer_bytes + largest <= rank.tensor_bytes
    if mesh.pp == 1:
        more = memory_per_rank(spec, mesh, micro + 1).total_bytes
        assert memory_per_rank(spec, mesh, micro).total_bytes <= more
    wider = replace(mesh, tp=2 * mesh.tp)
    assert memory_per_rank(spec, wider, micro).total_bytes <= (
        memory_per_rank(spec, mesh, micro).total_bytes
    )
