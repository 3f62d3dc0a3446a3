"""The norm of all gradients over the whole mesh, clipping by it, and sums over all ranks.

A gradient lies in pieces on some ranks and in copies on others. Each rank adds up the squares of
what it holds, each piece divided by the number of its copies, and one sum over the world gives the
norm: sharded over any axes, on several stages, in plain tensors or DTensors of several meshes, all
are the same. Where every rank holds everything nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import get_total_norm

from air_hpc.models.local import local_part


@dataclass(frozen=True)
class Held:
    """A parameter as this rank holds it: whole or in part, in `copies` over the world."""

    parameter: nn.Parameter
    copies: int


def copies_of(parameter: nn.Parameter, ranks: int) -> int:
    """On how many of the `ranks` that hold the parameter at all lies the very same piece."""
    pieces = 1
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if not isinstance(placement, Replicate):
                pieces *= parameter.device_mesh.size(axis)
    return ranks // pieces


def gradient_norm(held: Sequence[Held]) -> Tensor:
    """The 2-norm of all gradients together; a plain scalar, the same on every rank. Collective."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    by_copies: dict[int, list[Tensor]] = {}
    for one in held:
        if one.parameter.grad is not None:
            by_copies.setdefault(one.copies, []).append(local_part(one.parameter.grad))
    if all(one.copies == world_size for one in held):
        return get_total_norm(by_copies.get(world_size, []))
    squares = [get_total_norm(grads) ** 2 / copies for copies, grads in by_copies.items()]
    total = (
        torch.stack(squares).sum() if squares else torch.zeros((), device=held[0].parameter.device)
    )
    dist.all_reduce(total)
    return total.sqrt()


def clip_gradients(held: Sequence[Held], max_norm: float) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; returns the norm before."""
    norm = gradient_norm(held)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    grads = [local_part(one.parameter.grad) for one in held if one.parameter.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor.to(grads[0].device))
    return norm


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of `values` over all ranks; one collective, none for a single rank."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values
