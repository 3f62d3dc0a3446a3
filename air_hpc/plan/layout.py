"""Which parts of the model a pipeline rank has, in parameters and tokens: what memory and
communication are both counted from.

A rank's data-parallel wrapper follows from the mesh: DistributedDataParallel where whole models are
replicated and nothing else is spread, FSDP2 where anything is, nothing on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from air_hpc.config.spec import ModelSpec, RunSpec
from air_hpc.plan.blocks import Parameters, block_parts
from air_hpc.plan.flops import embedding_parameters
from air_hpc.plan.schedule import stage_owner, stages_per_rank
from air_hpc.plan.stages import cut_layers
from air_hpc.plan.types import Mesh

COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp8": 2}
"""Bytes of an element of activations and of gathered weights (fp8 keeps those in bf16)."""

Wrapper = Literal["none", "ddp", "fsdp"]


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline: its number, its layers, and which ends of the model it has."""

    number: int
    layers: tuple[int, ...]
    first: bool
    last: bool


def wrapper(spec: RunSpec, mesh: Mesh) -> Wrapper:
    """What keeps the data-parallel ranks together on this mesh.

    FSDP serves also where tp or pp alone spread the model, for its float32 masters of bf16 weights.
    """
    if mesh.world_size == mesh.dp_replicate:
        return "ddp" if mesh.dp_replicate > 1 else "none"
    spreads = mesh.dp_replicate * mesh.shard_size > 1
    masters = spec.train.precision != "fp32" or spec.parallelism.cpu_offload
    return "fsdp" if spreads or masters else "none"


def stages_by_rank(spec: RunSpec, mesh: Mesh) -> tuple[tuple[Stage, ...], ...]:
    """The stages of each pipeline rank."""
    loops = stages_per_rank(spec.parallelism)
    parts = cut_layers(spec.model, spec.data.sequence_length, mesh.pp * loops)
    owner = stage_owner(spec.parallelism.pp_schedule, mesh.pp, loops)
    return tuple(
        tuple(
            Stage(number, layers, number == 0, number == len(parts) - 1)
            for number, layers in enumerate(parts)
            if owner[number] == rank
        )
        for rank in range(mesh.pp)
    )


def micro_batches(spec: RunSpec, mesh: Mesh, micro_batch_size: int) -> int:
    """How many micro-batches a rank takes in a step."""
    return max(1, spec.train.global_batch_size // (mesh.data_parallel_size * micro_batch_size))


def tokens_of(spec: RunSpec, mesh: Mesh, micro_batch_size: int) -> int:
    """Tokens of a micro-batch on a rank, before sequence parallelism cuts them over tp."""
    return micro_batch_size * spec.data.sequence_length // mesh.cp


def whole_block(model: ModelSpec, layer: int, mesh: Mesh) -> Parameters:
    """What a rank holds of a block that FSDP has gathered: its part over tp and ep.

    FSDP cuts stacked experts by expert. Where a rank has fewer than there are ranks to cut them
    over, or a number that these do not divide, it pads: what is gathered has whole experts of
    nothing, and some ranks keep more than others (counted is the rank that keeps most).
    """
    parts, moe = block_parts(model, layer), model.moe
    if moe is None or not parts.experts:
        return _over(parts, mesh)
    here, ranks = moe.experts // mesh.ep, max(1, mesh.shard_size // mesh.ep)
    padded = -(-here // ranks) * ranks * mesh.ep
    return _over(replace(parts, experts=parts.experts // moe.experts * padded), mesh)


def whole_ends(model: ModelSpec, stage: Stage, mesh: Mesh) -> Parameters:
    """The same of a stage's embedding, final norm and head. A last stage that is not the first has
    a copy of the embedding where the head is tied to it."""
    count = int(stage.first) + int(stage.last)
    if model.tied_head:
        count = min(count, 1)
    norm = model.dim if stage.last else 0
    return _over(Parameters(count * embedding_parameters(model), norm), mesh)


@lru_cache(maxsize=4096)
def whole_stage(model: ModelSpec, stage: Stage, mesh: Mesh) -> Parameters:
    """All parameters of a stage on a rank, gathered."""
    total = whole_ends(model, stage, mesh)
    for layer in stage.layers:
        total += whole_block(model, layer, mesh)
    return total


def own(parameters: Parameters, mesh: Mesh) -> int:
    """How many of gathered `parameters` a rank keeps: FSDP cuts experts over what ep leaves."""
    dense = parameters.matrices + parameters.replicated
    expert_ranks = max(1, mesh.shard_size // mesh.ep)
    return -(-dense // mesh.shard_size) + -(-parameters.experts // expert_ranks)


def _over(parts: Parameters, mesh: Mesh) -> Parameters:
    return Parameters(
        -(-parts.matrices // mesh.tp), parts.replicated, -(-parts.experts // (mesh.tp * mesh.ep))
    )
