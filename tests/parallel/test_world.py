"""How a worker joins the others, and what it says when they are not there."""

from __future__ import annotations

import os

import pytest

from air_hpc.errors import BadInput
from air_hpc.parallel.world import RanksMissing, choose_device, require_supported, start_world
from air_hpc.plan.types import Mesh
from air_hpc.probes.ports import free_ports

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


def test_every_degree_that_the_engine_cannot_do_is_named() -> None:
    with pytest.raises(BadInput) as caught:
        require_supported(Mesh(pp=2, tp=4, dp_shard=2))
    assert {p.key for p in caught.value.problems} == {"parallelism.pp", "parallelism.tp"}


def test_there_is_no_fall_back_to_another_kind_of_device() -> None:
    with pytest.raises(BadInput, match="no backend"):
        choose_device("hpu", 0)
