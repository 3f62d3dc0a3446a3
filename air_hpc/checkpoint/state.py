"""What a checkpoint holds: parameters, optimizer state and random numbers, all of it tensors.

Learning rates and weight decays are not in it: they are functions of the config and the step. The
position in the data is the step itself (`data.order`). Parameters and optimizer state are keyed
by the parameter's full name, so they load on any mesh. The random state is one tensor a rank and
device, and loads where the world has the size it was saved with; otherwise each rank is seeded
anew by (seed, step, rank), which is a different, equally valid draw of dropout masks.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from air_hpc.models.init import seed_of
from air_hpc.plan.types import Mesh

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_GROUPS = "param_groups."


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
    module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, device: torch.device
) -> dict[str, Any]:
    """The live state of this rank, sharing storage with it: stage before training goes on."""
    flat = get_optimizer_state_dict(module, optimizer, options=_FLAT)
    return {
        "model": get_model_state_dict(module),
        "optimizer": {k: v for k, v in flat.items() if not k.startswith(_GROUPS)},
        "random": random_state(rank, device),
    }


def share_of(state: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """The part of a `training_state` that `rank` stages and writes.

    The ranks are data-parallel ones: all have the same names, and a tensor that is not sharded is
    the same on each. So one of them keeps it: otherwise each rank of a node would stage a whole
    model in host memory. The largest goes first, to whoever has least so far; every rank comes to
    the same division without a word.
    """
    whole = [
        (-tensor.nbytes, part, name)
        for part in ("model", "optimizer")
        for name, tensor in state[part].items()
        if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor)
    ]
    held = [(0, number) for number in range(world_size)]  # (bytes, rank), a heap
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


def first_not_finite(state: Mapping[str, Any]) -> str | None:
    """The name of a parameter or optimizer tensor with a NaN or Inf in this rank's part, or None.

    A sum finds them in one pass without memory of its own; only where it is not finite itself
    (which finite numbers can do too, if they are huge) each number is looked at.
    """
    for part in ("model", "optimizer"):
        for name, value in state.get(part, {}).items():
            tensor = value.to_local() if isinstance(value, DTensor) else value
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
                return str(name)
    return None


def put_back(
    state: dict[str, Any], module: nn.Module, optimizer: torch.optim.Optimizer, rank: int
) -> None:
    """Give a loaded `training_state` to the model, the optimizer and, if there, the generators."""
    set_model_state_dict(module, state["model"])
    flat = get_optimizer_state_dict(module, optimizer, options=_FLAT)
    groups = {k: v for k, v in flat.items() if k.startswith(_GROUPS)}
    set_optimizer_state_dict(module, optimizer, {**groups, **state["optimizer"]}, options=_FLAT)
    for name, value in state.get("random", {}).items():
        if name == f"{rank}.cpu":
            torch.set_rng_state(value)
        elif name == f"{rank}.cuda":
            torch.cuda.set_rng_state(value)


def random_state(rank: int, device: torch.device) -> dict[str, Tensor]:
    """The generators' states, named by rank."""
    states = {f"{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return states


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators for `rank` from `step` on."""
    torch.manual_seed(seed_of(seed, "random", step, rank))
