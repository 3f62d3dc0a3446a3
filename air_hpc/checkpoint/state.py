"""What a checkpoint holds: parameters, optimizer state and random numbers, all of it tensors.

Learning rates and weight decays are not in it: they are functions of the config and the step. The
position in the data is the step itself (`data.order`). Parameters and persistent buffers are keyed
by their full names in the model, optimizer state by `state.<parameter>.<key>`, whichever part of
the model they lie in on this rank and however it is cut, so they load on any mesh. The random state
is one tensor a rank and device, and loads on the mesh it was saved on; otherwise each rank is
seeded anew by (seed, step, rank), which is a different, equally valid draw of dropout masks.

A name that two parts hold (a tied head and its embedding on two stages of a pipeline) is one tensor
in two copies: each rank keeps the first of its parts, and of two ranks one is to write it.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from air_hpc.models.init import seed_of
from air_hpc.models.local import local_part
from air_hpc.plan.types import Mesh


@dataclass(frozen=True)
class Identity:
    """What must be the same for a checkpoint to continue a run.

    `data_digest` names the token stream: another stream has another sample order.
    """

    data_digest: str
    sequence_length: int
    global_batch_size: int
    seed: int


@dataclass(frozen=True)
class Facts:
    """What the manifest says of the training beside the files."""

    identity: Identity
    config_hash: str
    world_size: int
    mesh: Mesh
    device: str
    torch: str


def training_state(
    parts: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    rank: int,
    device: torch.device,
) -> dict[str, Any]:
    """The live state of this rank, sharing storage with it: stage before training goes on.

    The optimizer's state is made where it has not stepped yet, so that a checkpoint can be loaded
    into what is returned.
    """
    _make_state(optimizer)
    model: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    for name, tensor, parameter in _named(parts):
        if name in model:
            continue
        model[name] = tensor
        moments |= {} if parameter is None else _state_of(optimizer, name, parameter)
    return {"model": model, "optimizer": moments, "random": random_state(rank, device)}


def _named(parts: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor, nn.Parameter | None]]:
    """Names and tensors without their gradients, and the parameters they are of; then buffers."""
    for part in parts:
        for name, parameter in part.named_parameters():
            yield name, parameter.detach(), parameter
        kept = part.state_dict(keep_vars=True)
        for name, buffer in part.named_buffers():
            if name in kept:
                yield name, buffer.detach(), None


def _state_of(
    optimizer: torch.optim.Optimizer, name: str, parameter: nn.Parameter
) -> dict[str, Tensor]:
    found = optimizer.state.get(parameter, {})
    return {f"state.{name}.{key}": v for key, v in found.items() if isinstance(v, Tensor)}


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make its state, by a step of rate zero on gradients of zero."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.state or any(p.grad is not None for p in parameters):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def share_of(
    state: Mapping[str, Any], rank: int, ranks: int, elsewhere: Collection[str] = ()
) -> dict[str, Any]:
    """The part of a `training_state` that the `rank`-th of `ranks` stages and writes.

    They are those with the same names (the same stages of a pipeline), and a tensor that is not
    sharded is the same on each. So one of them keeps it: otherwise each rank of a node would stage
    a whole model in host memory. The largest goes first, to whoever has least so far; every rank
    comes to the same division without a word. Parameters that are written `elsewhere` are left out,
    their optimizer state too.
    """
    if elsewhere:
        state = _without(state, elsewhere)
    whole = [
        (-tensor.nbytes, part, name)
        for part in ("model", "optimizer")
        for name, tensor in state[part].items()
        if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor)
    ]
    held = [(0, number) for number in range(ranks)]  # (bytes, rank), a heap
    others = set()
    for negative_bytes, part, name in sorted(whole):
        held_bytes, keeper = held[0]
        heapq.heapreplace(held, (held_bytes - negative_bytes, keeper))
        if keeper != rank:
            others.add((part, name))
    share = dict(state)
    for part in ("model", "optimizer"):
        kept = {name: v for name, v in state[part].items() if (part, name) not in others}
        if kept or not state[part]:
            share[part] = kept
        else:
            del share[part]  # an empty mapping would be written as a value of its own
    return share


def _without(state: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    prefixes = tuple(f"state.{name}." for name in names)
    model = {name: v for name, v in state["model"].items() if name not in names}
    moments = {name: v for name, v in state["optimizer"].items() if not name.startswith(prefixes)}
    return {**state, "model": model, "optimizer": moments}


def first_not_finite(state: Mapping[str, Any]) -> str | None:
    """The name of a parameter or optimizer tensor with a NaN or Inf in this rank's part, or None.

    A sum finds them in one pass without memory of its own; only where it is not finite itself
    (which finite numbers can do too, if they are huge) each number is looked at.
    """
    for part in ("model", "optimizer"):
        for name, value in state.get(part, {}).items():
            tensor = local_part(value)
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
                return str(name)
    return None


def put_back(
    state: Mapping[str, Any],
    parts: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    rank: int,
) -> None:
    """Give what was loaded into a `training_state` to what does not share storage with it.

    Those are further copies of a name on this rank, and the generators if their state is there.
    """
    for name, tensor, parameter in _named(parts):
        _copy(state["model"][name], tensor)
        if parameter is not None:
            for key, value in _state_of(optimizer, name, parameter).items():
                _copy(state["optimizer"][key], value)
    for name, value in state.get("random", {}).items():
        if name == f"{rank}.cpu":
            torch.set_rng_state(value)
        elif name == f"{rank}.cuda":
            torch.cuda.set_rng_state(value)


def _copy(source: Tensor, target: Tensor) -> None:
    """Unless they are one and the same; both are cut alike."""
    pieces = [local_part(t) for t in (source, target)]
    if pieces[0].data_ptr() != pieces[1].data_ptr():
        pieces[1].copy_(pieces[0])


def random_state(rank: int, device: torch.device) -> dict[str, Tensor]:
    """The generators' states, named by rank."""
    states = {f"{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return states


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators for `rank` from `step` on."""
    torch.manual_seed(seed_of(seed, "random", step, rank))
