"""Bytes a rank moves: the terms against numbers counted by hand, and what holds on every mesh."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from air_hpc.config.compose import Composer
from air_hpc.config.spec import LaunchSpec, ModelSpec, MoeSpec, ParallelismSpec, RunSpec, TrainSpec
from air_hpc.plan.communication import Traffic, traffic
from air_hpc.plan.stages import cut_layers
from air_hpc.plan.types import Mesh

SHARED = Composer()


def by_kind(items: tuple[Traffic, ...]) -> dict[tuple[str, str], tuple[int, int]]:
    found: dict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for item in items:
        calls, total = found[item.axis, item.collective]
        found[item.axis, item.collective] = (calls + item.calls, total + item.payload_bytes)
    return dict(found)


def spec_of(mesh: Mesh, *overrides: str, accumulation: int = 1, devices: int = 8) -> RunSpec:
    spec = SHARED.compose(["cluster=slurm", "tracking.uri=null", *overrides])
    degrees = {
        axis: getattr(mesh, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    }
    return replace(
        spec,
        parallelism=replace(spec.parallelism, **degrees),
        launch=LaunchSpec(nodes=max(1, mesh.world_size // devices), devices_per_node=devices),
        train=replace(
            spec.train,
            precision="bf16",
            micro_batch_size=1,
            global_batch_size=mesh.data_parallel_size * accumulation,
        ),
    )


def test_fsdp_gathers_each_block_twice_and_the_ends_once() -> None:
    """Counted in torch 2.13: 33 gathers of 4,417,916,928 bytes, 17 reductions of 4,943,257,600."""
    mesh = Mesh(dp_shard=8)
    spec = spec_of(mesh, "model=llama_1b", "data.sequence_length=2048")
    assert by_kind(traffic(spec, mesh, 1)) == {
        ("dp_shard", "all_gather"): (33, 4_417_916_928),
        ("dp_shard", "reduce_scatter"): (17, 4_943_257_600),
    }


def test_tensor_parallel_gathers_and_scatters_around_each_branch() -> None:
    """The first of eight stages of Llama 70B: 134 MB each time."""
    mesh = Mesh(pp=8, dp_shard=16, tp=8)
    spec = spec_of(mesh, "model=llama_70b", "data.sequence_length=8192", accumulation=8)
    first = by_kind(traffic(spec, mesh, 1, 0))
    layers = len(cut_layers(spec.model, 8192, 8)[0])
    calls = 8 * (4 * layers + 1)
    x = 8192 * 8192 * 2
    assert first["tp", "all_gather"] == (calls, calls * x)
    assert first["tp", "reduce_scatter"] == (calls, calls * x)
    assert first["pp", "send"] == (8, 8 * x // 8)
    middle = by_kind(traffic(spec, mesh, 1, 3))
    assert middle["pp", "send"] == (16, 16 * x // 8)


def test_a_pipeline_gathers_weights_once_a_step() -> None:
    mesh = Mesh(pp=2, dp_shard=4)
    overrides = ("model=llama_1b", "data.sequence_length=128")
    few = by_kind(traffic(spec_of(mesh, *overrides, accumulation=2), mesh, 1))
    many = by_kind(traffic(spec_of(mesh, *overrides, accumulation=16), mesh, 1))
    assert few["dp_shard", "all_gather"] == many["dp_shard", "all_gather"]
    assert few["dp_shard", "reduce_scatter"] == many["dp_shard", "reduce_scatter"]
    assert 8 * few["pp", "send"][1] == many["pp", "send"][1]


def test_replicas_add_up_what_they_keep_once_a_step() -> None:
    ddp = Mesh(dp_replicate=4)
    spec = spec_of(ddp, "model=llama_1b", "data.sequence_length=128", accumulation=4)
    (item,) = traffic(spec, ddp, 1)
    assert (item.axis, item.collective, item.calls) == ("dp_replicate", "all_reduce", 1)
    hsdp = Mesh(dp_replicate=4, dp_shard=8)
    spec = spec_of(hsdp, "model=llama_1b", "data.sequence_length=128", accumulation=4)
    kept = by_kind(traffic(spec, hsdp, 1))["dp_replicate", "all_reduce"][1]
    assert kept == pytest.approx(item.payload_bytes / 8, rel=1e-3)


def test_levels_follow_from_how_ranks_lie() -> None:
    mesh = Mesh(pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=4)
    spec = spec_of(mesh, "model=llama_8b", "data.sequence_length=128", accumulation=2)
    levels = {item.axis: (item.level, item.ranks_per_node) for item in traffic(spec, mesh, 1)}
    assert levels["tp"] == ("node", 4)
    assert levels["cp"] == ("node", 2)
    assert levels["dp_shard"] == ("network", 2)
    assert levels["dp_replicate"] == ("network", 1)
    assert levels["pp"] == ("network", 1)


MOE = ModelSpec(
    layers=4, dim=64, heads=8, kv_heads=8, ffn_dim=128, moe=MoeSpec(experts=8, active_experts=2)
)
MESHES = st.builds(
    Mesh,
    pp=st.sampled_from([1, 2]),
    dp_replicate=st.sampled_from([1, 2]),
    dp_shard=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2]),
)


@settings(max_examples=60)
@given(MESHES, st.sampled_from(["ulysses", "ring"]), st.sampled_from(["none", "full"]))
def test_what_one_sends_another_receives(mesh: Mesh, method: str, recompute: str) -> None:
    spec = RunSpec(
        model=MOE,
        parallelism=ParallelismSpec(
            pp=mesh.pp,
            cp_method=method,
            recompute=recompute,  # type: ignore[arg-type]
        ),
        train=TrainSpec(global_batch_size=mesh.data_parallel_size * 4, micro_batch_size=1),
    )
    items = [item for rank in range(mesh.pp) for item in traffic(spec, mesh, 1, rank)]
    for item in items:
        assert item.ranks > 1
        assert item.calls > 0
        assert 0 < item.sent_bytes <= 2 * item.payload_bytes
    degrees = {"cp": mesh.cp, "tp": mesh.tp, "pp": mesh.pp, "dp_replicate": mesh.dp_replicate}
    axes = {item.axis for item in items}
    for axis, degree in degrees.items():
        assert (axis in axes) == (degree > 1)
    forward = [i for i in items if i.axis == "pp" and i.phase == "forward"]
    backward = [i for i in items if i.axis == "pp" and i.phase == "backward"]
    assert sum(i.payload_bytes for i in forward) == sum(i.payload_bytes for i in backward)


def test_tokens_travel_to_their_experts_and_back_both_ways() -> None:
    mesh = Mesh(dp_shard=4, ep=4)
    spec = RunSpec(
        model=MOE, train=TrainSpec(global_batch_size=8, micro_batch_size=2, precision="bf16")
    )
    calls, total = by_kind(traffic(spec, mesh, 2))["ep", "all_to_all"]
    assert calls == 4 * MOE.layers
    assert total == calls * 2 * spec.data.sequence_length * 2 * MOE.dim * 2
    dense = MOE.layers * (4 * 64 * 64 + 2 * 64 + 64 * 8) + 2 * 256 * 64 + 64
    reduced = by_kind(traffic(spec, mesh, 2))["dp_shard", "reduce_scatter"][1]
    assert reduced == 4 * dense, "each rank of an expert group has experts of its own"
