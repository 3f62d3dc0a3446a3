"""Gradient norm, clipping, and means over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from air_hpc.parallel.world import World

T = TypeVar("T")


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients together, over all shards; a plain scalar on the device.

    Collective where parameters are sharded.
    """
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; returns the norm before."""
    kept = list(parameters)
    norm = gradient_norm(kept)
    clip_grads_with_norm_(kept, max_norm, norm)
    return norm


def mean_over_data_ranks(values: Tensor, world: World) -> Tensor:
    """The mean of `values` over the data-parallel ranks; one collective an axis, none for one."""
    for axis in ("dp_replicate", "dp_shard"):
        if getattr(world.degrees, axis) > 1:
            values = values.clone()
            dist.all_reduce(values, op=dist.ReduceOp.SUM, group=world.mesh.get_group(axis))
    return values / world.data_ranks


def tell_all(value: T | None, world: World) -> T:
    """Rank 0's `value` on every rank (through pickle, between workers of one run)."""
    box: list[object] = [value]
    if world.world_size > 1:
        dist.broadcast_object_list(box, src=0, group=world.control)
    return box[0]  # type: ignore[return-value]


def hear_all(value: T, world: World) -> list[T]:
    """Every rank's `value`, in rank order, on every rank."""
    if world.world_size == 1:
        return [value]
    values: list[T | None] = [None] * world.world_size
    dist.all_gather_object(values, value, group=world.control)
    return values  # type: ignore[return-value]
