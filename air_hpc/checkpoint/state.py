"""What a checkpoint holds: parameters, optimizer state and random numbers, all of it tensors.

Learning rates and weight decays are not in it: they are functions of the config and the step. The
position in the data is the step itself (`data.order`). Parameters and optimizer state are keyed
by the parameter's full name, so they load on any mesh. The random state is one tensor a rank and
device, and loads where the world has the size it was saved with; otherwise each rank is seeded
anew by (seed, step, rank), which is a different, equally valid draw of dropout masks.
"""

from __future__ import annotations

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
