"""A mixture of experts on its mesh: experts over ep, each expert's hidden width over tp.

Over tp a mixture takes the whole sequence, gathered as for any branch, and routes it on each rank
alike; each rank computes with its slice of every expert, and what comes out is one term of the
sum, which is scattered to the sequence's pieces. So gradients inside are terms too, the router's
and those of what went in. All of it works on local tensors, weights as their pieces: a plan of
DTensor would add up such a gradient at every step of the way.

The balance loss is whole on each of these ranks, so each gives it its share of the weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from air_hpc.models.moe import MoeFeedForward, moe_layers
from air_hpc.parallel.expert import ExpertParallelDispatch
from air_hpc.parallel.world import World

_WIDTH = {"w1": 1, "w2": 2, "w3": 1}
"""The dimension of an expert's hidden width in the stacked weights."""


def spread_mixtures(part: nn.Module, world: World, micro_batches: int) -> None:
    """Cut every mixture of `part`, which is on meta, and tell it what it is a part of.

    `micro_batches` is by what a step divides the loss of each forward pass.
    """
    degrees = world.degrees
    for moe in moe_layers(part):
        moe.loss_scale = 1.0 / (micro_batches * degrees.tp)
        if degrees.cp > 1:
            moe.sum_over_sequence = _adder(world.mesh.get_group("cp"))
        _cut_experts(moe.experts, world)
        if world.expert_mesh is not None:
            moe.dispatch = ExpertParallelDispatch(world.expert_mesh.get_group("ep"))
        if degrees.tp > 1:
            _split(moe, world.mesh["tp"])


def balance(parts: Sequence[nn.Module], world: World, *, updates: bool) -> None:
    """After a step: move the biases by the load of all ranks where the step `updates`, and count
    anew. Collective where a mixture has a bias."""
    mixtures = [moe for part in parts for moe in moe_layers(part)]
    biased = updates and any(moe.expert_bias is not None for moe in mixtures)
    if not mixtures:
        return
    loads = torch.stack([moe.load for moe in mixtures])
    if biased:
        axes = ("dp_replicate", "fsdp" if world.degrees.cp > 1 else "dp_shard")
        for axis in axes:
            group = world.mesh[axis].get_group()
            if group.size() > 1:
                dist.all_reduce(loads, group=group)
    for moe, load in zip(mixtures, loads, strict=True):
        if biased:
            moe.update_expert_bias(load)
        else:
            moe.load.zero_()


def _adder(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    def add(counts: Tensor) -> Tensor:
        total = counts.clone()
        dist.all_reduce(total, group=group)
        return total

    return add


def _cut_experts(experts: nn.Module, world: World) -> None:
    """Over ep by expert, over tp by hidden width; left as they are where neither cuts."""
    degrees = world.degrees
    for name, dim in _WIDTH.items():
        if world.expert_mesh is None and degrees.tp > 1:
            _cut(experts, name, world.mesh["tp"], [Shard(dim)])
        elif world.expert_mesh is not None and degrees.tp > 1:
            _cut(experts, name, world.expert_mesh["ep", "tp"], [Shard(0), Shard(dim)])
        elif world.expert_mesh is not None:
            _cut(experts, name, world.expert_mesh["ep"], [Shard(0)])


def _cut(module: nn.Module, name: str, mesh: DeviceMesh, placements: list[Placement]) -> None:
    weight = module.get_parameter(name)
    cut = distribute_tensor(weight.detach(), mesh, placements, src_data_rank=None)
    module.register_parameter(name, nn.Parameter(cut))


def _split(moe: MoeFeedForward, mesh: DeviceMesh) -> None:
    _cut(moe.router, "weight", mesh, [Replicate()])
    moe.router.forward = functools.partial(_route, moe.router)  # type: ignore[method-assign]
    if moe.shared is not None:
        for linear, dim in ((moe.shared.w1, 0), (moe.shared.w2, 1), (moe.shared.w3, 0)):
            _cut(linear, "weight", mesh, [Shard(dim)])
            linear.forward = functools.partial(_piece, linear)  # type: ignore[method-assign]

    def gather(_module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x,) = given
        piece = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Shard(1)])
        whole = piece.redistribute(placements=[Replicate()])
        return (whole.to_local(grad_placements=[Partial()]),)

    def scatter(_module: nn.Module, _given: object, out: Tensor) -> Tensor:
        term = DTensor.from_local(out, mesh, [Partial()], run_check=False)
        local: Tensor = term.redistribute(placements=[Shard(1)]).to_local()
        return local

    moe.register_forward_pre_hook(gather)
    moe.register_forward_hook(scatter)


def _route(router: nn.Linear, x: Tensor) -> Tensor:
    """The router's logits; its gradient is one term of it on each rank."""
    assert isinstance(router.weight, DTensor)
    weight = router.weight.to_local(grad_placements=[Partial()])
    return F.linear(x.float(), weight.float())


def _piece(linear: nn.Linear, x: Tensor) -> Tensor:
    """The product with this rank's piece of the weight."""
    assert isinstance(linear.weight, DTensor)
    return F.linear(x, linear.weight.to_local())
