"""How a worker joins the others, and what it says when they are not there."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from air_hpc.errors import BadInput
from air_hpc.parallel.world import (
    RanksMissing,
    build_expert_mesh,
    choose_device,
    start_world,
)
from air_hpc.plan.types import Mesh
from air_hpc.probes.ports import free_ports
from tests.torch_ranks import join_world, run_ranks

pytestmark = pytest.mark.torch


def test_ranks_that_do_not_come_are_missed_before_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a failed rendezvous counted as a wrong environment, which is never tried again."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_ports(1, str(os.getpid()))[0]))
    with pytest.raises(RanksMissing, match="rank 0 of 2 could not join"):
        start_world(
            Mesh(dp_replicate=2), rank=0, local_rank=0, world_size=2, kind="cpu", timeout_s=1
        )


def test_a_mesh_that_is_not_the_world_is_refused_before_anybody_is_waited_for() -> None:
    with pytest.raises(BadInput, match="does not multiply to the 3 workers"):
        start_world(
            Mesh(dp_replicate=2), rank=0, local_rank=0, world_size=3, kind="cpu", timeout_s=1
        )


def groups_and_places(rank: int, rendezvous: str) -> tuple[set[float], int, int, list[int]]:
    """The timeouts of all groups of a mesh with every kind of axis; where the rank stands."""
    degrees = Mesh(dp_shard=2, cp=2, ep=2)
    world = join_world(rank, rendezvous, degrees)
    meshes = [world.mesh, world.mesh["fsdp"], world.expert_mesh]
    groups = [group for mesh in meshes for group in mesh.get_all_groups()]
    pair = world.group([1, 3])
    groups += [world.control] if pair is None else [world.control, pair]
    timeouts = {group_timeout_s(group) for group in groups}
    experts = dist.get_process_group_ranks(world.expert_mesh.get_group("ep"))
    return timeouts, world.data_rank, world.data_ranks, experts


def group_timeout_s(group: dist.ProcessGroup) -> float:
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def test_every_group_has_the_timeout_of_the_run() -> None:
    """A group of a mesh has 30 minutes of torch's own, whatever the world was told."""
    results = run_ranks(4, groups_and_places)
    assert {t for timeouts, *_ in results for t in timeouts} == {60.0}
    assert [data_rank for _, data_rank, *_ in results] == [0, 0, 1, 1]
    assert all(data_ranks == 2 for _, _, data_ranks, _ in results)
    assert [experts for *_, experts in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_experts_that_do_not_lie_inside_the_sharding_ranks_are_refused() -> None:
    with pytest.raises(BadInput, match="a divisor of 4"):
        build_expert_mesh(Mesh(dp_shard=2, cp=2, ep=3), "cpu", timedelta(seconds=1))


def test_there_is_no_fall_back_to_another_kind_of_device() -> None:
    with pytest.raises(BadInput, match="no backend"):
        choose_device("hpu", 0)
