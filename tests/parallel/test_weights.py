"""The same first weights on every mesh, and gradients of any layout under one norm."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from air_hpc.parallel.engine import Engine
from air_hpc.parallel.options import EngineOptions
from air_hpc.parallel.reduce import Held, clip_gradients, copies_of
from air_hpc.plan.types import Mesh
from tests.parallel.training import MODELS, TOKENS, on_mesh
from tests.torch_ranks import join_world, run_ranks

pytestmark = pytest.mark.torch

MESHES = [
    Mesh(dp_shard=4),
    Mesh(dp_replicate=2, dp_shard=2),
    Mesh(dp_shard=2, tp=2),
    Mesh(dp_shard=2, tp=2, ep=2),
    Mesh(cp=2, tp=2),
    Mesh(dp_shard=4, ep=2),
    Mesh(pp=2, tp=2),
    Mesh(pp=2, dp_shard=2),
]


def weights(rank: int, rendezvous: str, meshes: list[Mesh]) -> list[dict[str, str]]:
    """A digest of the whole of each parameter that this rank has a piece of."""
    whole = join_world(rank, rendezvous, meshes[0])
    found = []
    for degrees in meshes:
        engine = Engine(MODELS["biased"], TOKENS, 7, on_mesh(whole, degrees), EngineOptions(), 2, 1)
        named = {name: weight.detach() for name, weight in engine.named_parameters()}
        found.append({name: digest(weight) for name, weight in named.items()})
    return found


def digest(weight: torch.Tensor) -> str:
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return hashlib.sha256(whole.contiguous().numpy().tobytes()).hexdigest()


def test_the_first_weights_are_the_same_on_every_mesh() -> None:
    """Under FSDP and tensor parallelism the outer dimension of a mesh is cut after the inner."""
    [[wanted]] = run_ranks(1, weights, [Mesh()])
    assert len(wanted) > 30
    for ranks in zip(MESHES, *run_ranks(4, weights, MESHES), strict=True):
        degrees, *held = ranks
        seen: set[str] = set()
        for one in held:
            seen |= set(one)
            assert [name for name, whole in one.items() if whole != wanted[name]] == [], degrees
        assert seen == set(wanted), degrees


def norms(rank: int, rendezvous: str) -> tuple[float, list[float]]:
    """The norm over a sharded, a replicated and a plain gradient, and what clipping leaves."""
    join_world(rank, rendezvous, Mesh(dp_shard=2))
    mesh = init_device_mesh("cpu", (2,))
    sharded = nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)]))
    sharded.grad = distribute_tensor(torch.full((3, 2), 2.0), mesh, [Shard(0)])
    plain = nn.Parameter(torch.zeros(4))
    plain.grad = torch.full((4,), 3.0)
    # Each rank has another one of these, as stages of a pipeline have.
    alone = nn.Parameter(torch.zeros(1))
    alone.grad = torch.full((1,), 1.0 + rank)
    held = [Held(sharded, copies_of(sharded, 2)), Held(plain, 2), Held(alone, 1)]
    norm = float(clip_gradients(held, 1.0))
    return norm, [float(one.parameter.grad.norm()) for one in held[1:]]  # type: ignore[union-attr]


def test_pieces_and_copies_and_what_is_held_alone_count_once_each() -> None:
    wanted = (6 * 4.0 + 4 * 9.0 + 1.0 + 4.0) ** 0.5
    for rank, (norm, (plain, alone)) in enumerate(run_ranks(2, norms)):
        assert norm == pytest.approx(wanted)
        assert plain == pytest.approx(6.0 / wanted, rel=1e-5)
        assert alone == pytest.approx((1.0 + rank) / wanted, rel=1e-5)
