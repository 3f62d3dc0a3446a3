"""What the plan says of one rank, in the terms that a trace of the real engine counts in.

    memory   tensors at the fullest moment, without the margin
    flops    of a step, forward, and backward with what is computed again; attention by the `palm`
             convention, which is what torch counts
    bytes    by mesh axis: collectives' whole tensors (`plan.communication`)

`python -m air_hpc.parallel.trace` counts the same on the engine itself. Where the two differ, one
of them is wrong: that is what a trace is for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from air_hpc.config.spec import RunSpec
from air_hpc.plan.communication import traffic
from air_hpc.plan.flops import block_flops, block_parameters, head_flops
from air_hpc.plan.layout import stages_by_rank, tokens_of
from air_hpc.plan.memory import memory_by_stage
from air_hpc.plan.types import Mesh, Plan
from air_hpc.plan.work import repeated_products


@dataclass(frozen=True)
class RankFigures:
    """Of one rank and one step."""

    memory_bytes: float
    forward_flops: float
    backward_flops: float
    bytes_by_axis: Mapping[str, float]


def pp_rank_of(mesh: Mesh, rank: int) -> int:
    """The pipeline rank of a rank: pp is the outermost axis."""
    return rank // (mesh.world_size // mesh.pp)


def planned(spec: RunSpec, plan: Plan, rank: int) -> RankFigures:
    """What the plan says of `rank`."""
    mesh, micro = plan.mesh, plan.micro_batch_size
    at = pp_rank_of(mesh, rank)
    forward, again = _flops(spec, plan, at)
    moved: Counter[str] = Counter()
    for item in traffic(spec, mesh, micro, at):
        moved[item.axis] += item.payload_bytes
    return RankFigures(
        memory_bytes=memory_by_stage(spec, mesh, micro)[at].tensor_bytes,
        forward_flops=forward,
        backward_flops=2 * forward + again,
        bytes_by_axis=dict(moved),
    )


def counted(trace: Mapping[str, Any]) -> RankFigures:
    """The same out of a trace's JSON."""
    moved: Counter[str] = Counter()
    for item in trace["traffic"]:
        moved[item["axis"]] += item["tensor_bytes"]
    return RankFigures(
        memory_bytes=trace["memory"]["peak_bytes"],
        forward_flops=trace["flops"]["forward"],
        backward_flops=trace["flops"]["backward"],
        bytes_by_axis=dict(moved),
    )


def _flops(spec: RunSpec, plan: Plan, pp_rank: int) -> tuple[float, float]:
    """(forward, again) of a step on a rank."""
    model, mesh = spec.model, plan.mesh
    length = spec.data.sequence_length
    tokens = tokens_of(spec, mesh, plan.micro_batch_size) * plan.accumulation_steps / mesh.tp
    forward = again = 0.0
    for stage in stages_by_rank(spec, mesh)[pp_rank]:
        for layer in stage.layers:
            once = block_flops(model, layer, length).total.palm / 3
            forward += once
            again += _again(spec, layer, once)
        if stage.last:
            forward += head_flops(model) / 3
    return forward * tokens, again * tokens


def _again(spec: RunSpec, layer: int, once: float) -> float:
    """FLOPs of a token that a block computes a second time. torch stops once the last tensor that
    is wanted is there, so the last matrix product of a block, whose result nobody wants, is not."""
    policy = spec.parallelism.recompute
    if policy == "none":
        return 0.0
    parts = block_parameters(spec.model, layer)
    if policy == "ops":
        return 2.0 * repeated_products(spec.model, layer)
    last = parts.feed_forward / 3 or (parts.active_experts + parts.shared_experts) / 3
    share = 1.0 if policy == "full" else 1 - spec.parallelism.recompute_budget
    return share * (once - 2.0 * last)
