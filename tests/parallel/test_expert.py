"""Experts on several ranks compute what one process with all of them does."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from air_hpc.config.spec import ModelSpec, MoeSpec
from air_hpc.models import initialize, on_meta
from air_hpc.models.decoder import Decoder, next_token_loss
from air_hpc.models.moe import Experts, moe_layers, run_here
from air_hpc.parallel.expert import ExpertParallelDispatch
from tests.torch_ranks import run_ranks

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
TOKENS, BATCH = 8, 4
MODEL = ModelSpec(
    dim=32,
    layers=2,
    heads=4,
    kv_heads=2,
    ffn_dim=64,
    vocab_size=64,
    moe=MoeSpec(experts=8, active_experts=2, shared_experts=1, expert_ffn_dim=16),
)
ONE_EXPERT = dataclasses.replace(
    MODEL, moe=MoeSpec(experts=8, active_experts=1, normalize=False, balance="none")
)
"""Used by a test that sends all tokens to one expert."""


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(MODEL.vocab_size, (BATCH, TOKENS + 1), generator=generator)


def build(spec: ModelSpec, *, crowd: bool) -> Decoder:
    """A model; `crowd` makes all routers prefer the last expert by far."""
    model = on_meta(spec, TOKENS)
    initialize(model, spec, 0, CPU)
    if crowd:
        for moe in moe_layers(model):
            moe.register_forward_pre_hook(_one_direction)
            with torch.no_grad():
                moe.router.weight.zero_()
                moe.router.weight[-1] = 0.05
    return model


def _one_direction(module: Any, given: tuple[Tensor]) -> tuple[Tensor]:
    return (given[0].abs(),)


def gradients(model: Decoder, tokens: Tensor) -> tuple[float, dict[str, Tensor]]:
    loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return float(loss.detach()), found


def spread_over_ranks(
    rank: int, rendezvous: str, world_size: int, spec: ModelSpec, crowd: bool
) -> tuple[float, dict[str, Any]]:
    """The mean loss and all gradients, whole, as data-parallel training would see them."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(rendezvous, world_size), rank=rank, world_size=world_size
    )
    model = build(spec, crowd=crowd)
    mesh = init_device_mesh("cpu", (world_size,))
    for moe in moe_layers(model):
        moe.dispatch = ExpertParallelDispatch(mesh.get_group())
        for name, weight in list(moe.experts.named_parameters()):
            cut = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
            moe.experts.register_parameter(name, nn.Parameter(cut))
    loss, found = gradients(model, batch().chunk(world_size)[rank])
    whole = {}
    for name, gradient in found.items():
        if isinstance(gradient, DTensor):
            assert gradient.to_local().shape[0] == 8 // world_size
            whole[name] = gradient.full_tensor() / world_size
        else:
            dist.all_reduce(gradient)
            whole[name] = gradient / world_size
    mean = torch.tensor(loss)
    dist.all_reduce(mean)
    # Lists: a tensor would travel as a file descriptor that dies with its rank.
    return float(mean) / world_size, {name: g.tolist() for name, g in whole.items()}


@functools.cache
def single(spec: ModelSpec, crowd: bool) -> tuple[float, dict[str, Tensor]]:
    return gradients(build(spec, crowd=crowd), batch())


def assert_same(got: dict[str, Any], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        difference = (torch.tensor(got[name]) - gradient).abs().max()
        assert difference <= 1e-6, f"{name}: {difference}"
        assert gradient.abs().max() > 1e-5, f"{name}: too small to tell"


@pytest.mark.parametrize("world_size", [2, 4])
def test_losses_and_gradients_equal_one_process(world_size: int) -> None:
    loss, wanted = single(MODEL, False)
    for got_loss, got in run_ranks(world_size, spread_over_ranks, world_size, MODEL, False):
        assert got_loss == pytest.approx(loss, abs=1e-6)
        assert_same(got, wanted)


def test_ranks_whose_experts_get_no_token_take_part_with_gradients_of_zero() -> None:
    """Were they left out of the backward pass, the others would wait for them in the exchange."""
    loss, wanted = single(ONE_EXPERT, True)
    for got_loss, got in run_ranks(4, spread_over_ranks, 4, ONE_EXPERT, True):
        assert got_loss == pytest.approx(loss, abs=1e-6)
        assert_same(got, wanted)
        used = torch.tensor(got["layers.0.feed_forward.experts.w1"]).abs().sum((1, 2)) > 0
        assert used.tolist() == [False] * 7 + [True]


UNEVEN = [
    ([0, 3, 0, 2], torch.float32),
    ([0, 3, 0, 2], torch.bfloat16),
    ([5, 0, 0, 0], torch.float32),
    ([5, 0, 0, 0], torch.bfloat16),
]
"""How many of rank 0's rows go to which of four experts, two of them on each rank. Rank 1 has no
rows of its own, and in the last two cases gets none. bfloat16 takes torch's grouped product."""


def uneven_rows(rank: int, rendezvous: str) -> list[list[Any]]:
    """For each case what a rank gets, beside what it should get."""
    dist.init_process_group("gloo", store=dist.FileStore(rendezvous, 2), rank=rank, world_size=2)
    dispatch = ExpertParallelDispatch(dist.group.WORLD)
    found = []
    for counts, dtype in UNEVEN:
        torch.manual_seed(5)
        here, everything = (Experts(n, 8, 8, "silu").to(dtype) for n in (2, 4))
        rows = torch.randn(5 * (1 - rank), 8, dtype=dtype, requires_grad=True)
        with torch.no_grad():
            for whole, part in zip(everything.parameters(), here.parameters(), strict=True):
                whole.copy_(torch.randn(whole.shape))
                part.copy_(whole.chunk(2)[rank])
        mine = torch.tensor(counts) * (1 - rank)
        results: list[Tensor] = []
        for compute, experts in ((dispatch, here), (run_here, everything)):
            out = compute(rows, mine, experts)
            (sent_back,) = torch.autograd.grad(out.square().sum(), rows)
            results += [out, sent_back]
        found.append([result.float().tolist() for result in results])
    return found


def test_a_rank_without_rows_of_its_own_or_for_it_still_takes_part() -> None:
    for rank, cases in enumerate(run_ranks(2, uneven_rows)):
        for got, sent_back, wanted, gradient in cases:
            assert len(got) == 5 * (1 - rank)
            torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted))
            torch.testing.assert_close(torch.tensor(sent_back), torch.tensor(gradient))
