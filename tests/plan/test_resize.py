from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from air_hpc.config.spec import (
    LaunchSpec,
    ModelSpec,
    ParallelismSpec,
    RecoverySpec,
    RunSpec,
    TrainSpec,
)
from air_hpc.data.order import rank_indices
from air_hpc.errors import BadInput
from air_hpc.hardware.accelerator import AcceleratorSpec
from air_hpc.plan.make import make_plan
from air_hpc.plan.resize import plan_for, plan_for_world, sizes
from air_hpc.plan.types import Plan


def run(
    nodes: int, devices: int = 1, batch: int = 48, *, restart: str = "elastic", **keys: object
) -> tuple[RunSpec, Plan]:
    parallelism = ParallelismSpec(**{k: v for k, v in keys.items() if k.startswith(("dp", "tp"))})  # type: ignore[arg-type]
    spec = RunSpec(
        launch=LaunchSpec(nodes=nodes, devices_per_node=devices),
        parallelism=parallelism,
        train=TrainSpec(
            global_batch_size=batch,
            micro_batch_size=keys.get("micro", "auto"),  # type: ignore[arg-type]
        ),
        recovery=RecoverySpec(restart=restart, min_nodes=keys.get("min_nodes")),  # type: ignore[arg-type]
        accelerator=AcceleratorSpec(name="cpu", kind="cpu"),
    )
    plan, problems = make_plan(spec, local_cpu_count=1, to_run=False)
    assert plan is not None, problems
    return spec, plan


@given(
    nodes=st.integers(2, 12),
    devices=st.integers(1, 4),
    per_rank=st.integers(1, 12),
    shard=st.sampled_from(["auto", 1]),
    micro=st.one_of(st.just("auto"), st.integers(1, 6)),
)
def test_every_size_trains_on_the_same_global_batches(
    nodes: int, devices: int, per_rank: int, shard: object, micro: object
) -> None:
    assume(micro == "auto" or per_rank % int(str(micro)) == 0)
    batch = nodes * devices * per_rank
    spec, plan = run(nodes, devices, batch, dp_shard=shard, micro=micro)
    allowed = sizes(spec, plan)
    assert allowed[0] == nodes
    assert list(allowed) == sorted(set(allowed), reverse=True)
    for size in allowed:
        made = plan_for(spec, plan, size)
        assert made is not None
        assert made == plan_for_world(spec, plan, size * devices)
        ranks = made.mesh.data_parallel_size
        assert made.world_size == size * devices
        assert ranks * made.micro_batch_size * made.accumulation_steps == batch
        assert made.micro_batch_size <= plan.micro_batch_size
        assert made.mesh.dp_shard <= max(plan.mesh.dp_shard, 1)
        parts = [rank_indices(3, batch, r, ranks, made.accumulation_steps) for r in range(ranks)]
        seen = np.concatenate([part.ravel() for part in parts])
        assert seen.tolist() == list(range(3 * batch, 4 * batch))
        assert {part.shape[1] for part in parts} == {made.micro_batch_size}
    for size in set(range(1, nodes)) - set(allowed):
        assert plan_for(spec, plan, size) is None
        assert batch % (size * devices)


def test_whole_copies_go_before_shards() -> None:
    spec, plan = run(4, 2, 48, dp_replicate=4, dp_shard=2)
    three = plan_for(spec, plan, 3)
    assert three is not None
    assert (three.mesh.dp_replicate, three.mesh.dp_shard) == (3, 2)
    spec, plan = run(4, 2, 48, dp_replicate=1, dp_shard=8)
    three = plan_for(spec, plan, 3)
    assert three is not None
    assert (three.mesh.dp_replicate, three.mesh.dp_shard) == (1, 6)


def test_what_divides_the_model_stays() -> None:
    spec, plan = run(4, 2, 48, tp=2, dp_shard=1)
    assert sizes(spec, plan) == (4, 3, 2, 1)
    spec, plan = run(4, 1, 48, tp=2, dp_shard=1)
    assert sizes(spec, plan) == (4, 2)
    two = plan_for(spec, plan, 2)
    assert two is not None
    assert (two.mesh.tp, two.mesh.dp_replicate) == (2, 1)


def test_sizes_by_policy() -> None:
    assert sizes(*run(3, restart="same")) == (3,)
    assert sizes(*run(3, restart="requeue")) == ()
    spec, plan = run(3)
    spare = replace(spec, recovery=RecoverySpec(restart="spare", spare_nodes=1))
    assert sizes(spare, plan) == (3,)
    assert sizes(*run(6, batch=48 * 5)) == (6, 5, 4, 3, 2, 1)
    assert sizes(*run(6, batch=48)) == (6, 4, 3, 2, 1)
    assert sizes(*run(6, batch=48, min_nodes=3)) == (6, 4, 3)


def test_a_worker_of_another_size_than_a_generation_may_have_says_which_there_are() -> None:
    spec, plan = run(4, 2, 48)
    with pytest.raises(BadInput, match="8, 6, 4, 2"):
        plan_for_world(spec, plan, 5)
    same, plan = run(4, 2, 48, restart="same")
    with pytest.raises(BadInput, match=r"recovery\.restart=same"):
        plan_for_world(same, plan, 6)


def test_fewer_shards_that_would_not_fit_take_fewer_sequences_at_a_time() -> None:
    spec, plan = run(4, 1, 48, dp_shard="auto", dp_replicate=1, micro=12)
    wide = replace(spec, model=ModelSpec(vocab_size=4096))
    free = plan_for(wide, plan, 3)
    assert free is not None
    assert free.micro_batch_size == 8
    tight = replace(
        wide,
        accelerator=replace(wide.accelerator, memory_bytes=free.memory_per_rank.total_bytes - 1),
    )
    less = plan_for(tight, plan, 3)
    assert less is not None
    assert less.micro_batch_size == 4
    assert less.accumulation_steps == 4


def test_elastic_without_a_smaller_size_is_warned_of() -> None:
    spec = RunSpec(
        launch=LaunchSpec(nodes=4),
        train=TrainSpec(global_batch_size=4),
        recovery=RecoverySpec(restart="elastic", min_nodes=3),
    )
    _, problems = make_plan(spec, to_run=False)
    (warning,) = [p for p in problems if p.key == "recovery.restart"]
    assert warning.warning
    assert "no smaller number of nodes from 3 to 3" in warning.message
    assert "train.global_batch_size=12" in warning.hint
