"""Gradient norm, clipping, and means over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from air_hpc.parallel.world import World


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
