"""One way to lay a run over its devices, and which of several is best."""

from __future__ import annotations

import math
from dataclasses import dataclass

from air_hpc.config.spec import ParallelismSpec
from air_hpc.plan.schedule import stages_per_rank
from air_hpc.plan.step_time import StepTime
from air_hpc.plan.types import Mesh

TIE = 0.01
"""Two predictions that differ by less are equal: the model's own error is larger."""


@dataclass(frozen=True)
class Candidate:
    """One layout: what it is, what it holds, how long it takes (None: not known)."""

    parallelism: ParallelismSpec
    mesh: Mesh
    micro_batch_size: int
    memory_bytes: int
    step: StepTime | None
    step_s: float | None
    idle: float
    """Share of its compute that is waited or repeated, of an ideal schedule."""
    sent_bytes: float = 0.0

    def overrides(self) -> tuple[str, ...]:
        """The keys that write it down."""
        used = self.parallelism
        keys: dict[str, int | str] = {
            "pp": self.mesh.pp,
            "dp_replicate": self.mesh.dp_replicate,
            "dp_shard": self.mesh.dp_shard,
            "cp": self.mesh.cp,
            "tp": self.mesh.tp,
            "ep": self.mesh.ep,
            "recompute": used.recompute,
        }
        if self.mesh.pp > 1:
            keys |= {
                "pp_schedule": used.pp_schedule,
                "pp_stages_per_rank": stages_per_rank(used),
            }
        elif self.mesh.shard_size > 1:
            keys["reshard_after_forward"] = str(used.reshard_after_forward).lower()
        text = tuple(f"parallelism.{key}={value}" for key, value in keys.items())
        return (*text, f"train.micro_batch_size={self.micro_batch_size}")


@dataclass(frozen=True)
class Found:
    """What a search found. `ranked` is best first; `asked` is what the user's keys come to without
    a search (None: they do not make a mesh). `tried` layouts were valid, `too_big` of them did not
    fit, the smallest of which took `least_bytes`."""

    ranked: tuple[Candidate, ...]
    asked: Candidate | None
    tried: int
    too_big: int
    least_bytes: int | None
    by_time: bool
    reason: str = ""
    """Why there are no times."""

    @property
    def best(self) -> Candidate | None:
        """The winner."""
        return self.ranked[0] if self.ranked else None


def order(one: Candidate) -> tuple[float, ...]:
    """Best first: by time, else by what is waited and repeated, then by bytes, then the larger
    micro-batch."""
    if one.step_s is not None:
        return (one.step_s, _parts_used(one))
    return (round(one.idle, 6), one.sent_bytes, _parts_used(one), -one.micro_batch_size)


def by_time(candidates: list[Candidate]) -> list[Candidate]:
    """Best first; of those within TIE of the fastest, the mesh with the fewest parts."""
    ordered = sorted(candidates, key=order)
    fastest = ordered[0].step_s if ordered else None
    if fastest is None:
        return ordered
    equal = [one for one in ordered if (one.step_s or math.inf) <= fastest * (1 + TIE)]
    first = min(equal, key=lambda one: (_parts_used(one), one.step_s))
    return [first, *(one for one in ordered if one is not first)]


def _parts_used(one: Candidate) -> float:
    """How much a mesh asks of the model: its degrees but for data parallelism."""
    return float(one.mesh.pp * one.mesh.cp * one.mesh.tp * one.mesh.ep)
