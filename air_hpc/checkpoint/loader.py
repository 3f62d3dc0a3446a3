"""Resume: the newest candidate that verifies and loads, on every rank.

The candidates come from the coordinator, newest first; no rank looks for itself. Rank 0 reads the
manifest and tells the others; each rank compares the digests of its share of the files; then all
load. Any rank's doubt rejects a checkpoint for all of them, which is told to the agent, and the
next older one is tried. When none is left although there were some, NoUsableCheckpoint is raised:
a run never begins again from scratch in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader  # type: ignore[attr-defined]
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from air_hpc.checkpoint.ranks import Ranks
from air_hpc.checkpoint.state import (
    Identity,
    put_back,
    random_state,
    seed_generators,
    training_state,
)
from air_hpc.errors import AirHpcError, BadInput, Problem
from air_hpc.plan.types import Mesh
from air_hpc.rundir.commit import (
    Checkpoint,
    CheckpointInvalid,
    CheckpointUnreadable,
    read_checkpoint,
    verify_file,
)
from air_hpc.session.messages import Message
from air_hpc.session.session import Session


class NoUsableCheckpoint(AirHpcError):
    """Checkpoints were recorded, and none of them could be loaded."""


@dataclass(frozen=True)
class Resumed:
    """Where the run goes on: after `step` steps. `exact` is False when random numbers are new;
    `facts` are the manifest's."""

    step: int
    exact: bool
    facts: Mapping[str, Any]


def resume(
    session: Session,
    ranks: Ranks,
    parts: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    identity: Identity,
    mesh: Mesh,
) -> Resumed | None:
    """Load the newest good candidate; None when there is no candidate at all. Collective.

    It may be of any mesh; random numbers go on where it is of this one.

    Raises NoUsableCheckpoint, or BadInput where a good checkpoint belongs to other data, another
    batch or another seed than the run has now.
    """
    candidates = session.resume_candidates()
    reasons: list[str] = []
    for path in candidates:
        found = _read(path, ranks)
        reason = found if isinstance(found, str) else _verify(found, ranks)
        if not isinstance(found, str) and reason is None:
            _require_identity(found, identity)
            exact = found.facts.get("mesh") == asdict(mesh)
            exact = exact and found.facts.get("device") == ranks.device.type
            reason = _load(found, ranks, parts, optimizer, exact)
            if reason is None:
                if not exact:
                    seed_generators(identity.seed, found.step, ranks.rank)
                if session.is_first:
                    session.note(Message.RESUMED, step=found.step, checkpoint=path.name)
                return Resumed(found.step, exact, found.facts)
        reasons.append(f"{path.name}: {reason}")
        if session.is_first:
            step = int(path.name.rpartition("-")[2])
            session.note(Message.CHECKPOINT_BAD, step=step, reason=str(reason))
    if candidates:
        raise NoUsableCheckpoint("no checkpoint of this run can be loaded: " + "; ".join(reasons))
    return None


def _read(path: Path, ranks: Ranks) -> Checkpoint | str:
    """The checkpoint as rank 0 reads it, or why it is none. Raises CheckpointUnreadable."""
    found: Checkpoint | CheckpointInvalid | None = None
    if ranks.rank == 0:
        try:
            found = read_checkpoint(path)
        except CheckpointInvalid as error:
            found = error
    told: Checkpoint | CheckpointInvalid = ranks.tell(found)
    if isinstance(told, CheckpointUnreadable):
        raise told
    return str(told) if isinstance(told, CheckpointInvalid) else told


def _verify(checkpoint: Checkpoint, ranks: Ranks) -> str | None:
    """Compare every file's digest, each rank its share; the first difference, or None.

    Raises CheckpointUnreadable on every rank: what one cannot read now is not thereby bad.
    """
    mine: CheckpointInvalid | None = None
    try:
        for number, name in enumerate(sorted(checkpoint.files)):
            if number % ranks.world_size == ranks.rank:
                verify_file(checkpoint, name)
    except CheckpointInvalid as error:
        mine = error
    found: list[CheckpointInvalid] = [said for said in ranks.hear(mine) if said is not None]
    for said in found:
        if isinstance(said, CheckpointUnreadable):
            raise said
    return str(found[0]) if found else None


def _require_identity(checkpoint: Checkpoint, wanted: Identity) -> None:
    saved = checkpoint.facts.get("identity", {})
    keys = {
        "data_digest": "data",
        "sequence_length": "data.sequence_length",
        "global_batch_size": "train.global_batch_size",
        "seed": "train.seed",
    }
    problems = [
        Problem(
            keys[name],
            str(value),
            f"{checkpoint.path.name} was trained with another one",
            allowed=str(saved[name]),
            hint="a resumed run must see the samples that come next, and no others",
        )
        for name, value in asdict(wanted).items()
        if name in saved and saved[name] != value
    ]
    if problems:
        raise BadInput(problems)


def _load(
    checkpoint: Checkpoint,
    ranks: Ranks,
    parts: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    exact: bool,
) -> str | None:
    """Load into the model and the optimizer; why not, agreed by all ranks, or None."""
    mine: str | None = None
    state: dict[str, Any] = training_state(parts, optimizer, ranks.rank, ranks.device)
    state["random"] = random_state(ranks.rank, ranks.device) if exact else {}
    try:
        load(
            state,
            storage_reader=FileSystemReader(checkpoint.path),
            process_group=ranks.group,
        )
        put_back(state, parts, optimizer, ranks.rank)
    except CheckpointException as error:  # derives from BaseException
        first = min(error.failures)
        failure = error.failures[first][0]
        mine = f"rank {first}: {type(failure).__name__}: {failure}"
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        mine = f"rank {ranks.rank}: {type(error).__name__}: {error}"
    return next((text for text in ranks.hear(mine) if text), None)
