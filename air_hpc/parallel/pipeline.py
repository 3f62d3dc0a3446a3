"""Pipeline parallelism: the schedules of torch.distributed.pipelining over parts of the decoder.

A stage is a contiguous run of layers, cut by FLOPs (`plan.stages`), the first with the embedding
and the last with the head; which rank holds which stages is the schedule's (`plan.schedule`). The
shapes between stages are known beforehand, so nothing is run to find them out.

A tied head on another stage than the embedding is a copy of it, under the same name. Each has the
gradient of its own use; after the backward pass both get the sum, so that they stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)

from air_hpc.config.spec import ModelSpec
from air_hpc.errors import BadInput, Problem, raise_if_any
from air_hpc.models import Decoder
from air_hpc.models.local import local_part
from air_hpc.parallel.options import EngineOptions
from air_hpc.parallel.world import World
from air_hpc.plan.schedule import SPLIT_BACKWARD, stage_owner, stages_per_rank
from air_hpc.plan.stages import cut_layers

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv_zero_bubble": "ZBVZeroBubble",
    "dual_pipe_v": "DualPipeV",
}
"""Our names, and torch's."""
TIED_NAME = "tok_embeddings.weight"


@dataclass(frozen=True)
class Cut:
    """The stages of a model: their layers, and which of them this rank holds."""

    layers: tuple[tuple[int, ...], ...]
    mine: tuple[int, ...]
    ends: tuple[int, int]
    """The pipeline ranks that hold the first and the last stage."""


@dataclass(frozen=True)
class Flow:
    """What runs through the stages: micro-batches, their tokens on one rank, the stream's width."""

    micro_batches: int
    micro_batch_size: int
    tokens: int
    stream: tuple[int, ...]
    logits: tuple[int, ...]
    dtype: torch.dtype


def cut_of(model: ModelSpec, sequence_length: int, world: World, options: EngineOptions) -> Cut:
    """The stages of `model` on this rank."""
    pp = world.degrees.pp
    each = options.pp_stages_per_rank or stages_per_rank(options.pp_schedule)
    owners = stage_owner(options.pp_schedule, pp, each)
    layers = cut_layers(model, sequence_length, len(owners))
    here = world.mesh.get_local_rank("pp")
    mine = tuple(stage for stage, owner in enumerate(owners) if owner == here)
    return Cut(layers, mine, (owners[0], owners[-1]))


class Pipeline:
    """This rank's stages under their schedule.

    Raises BadInput for what the schedule cannot do, a number of micro-batches for one.
    """

    def __init__(
        self,
        parts: Sequence[Decoder],
        cut: Cut,
        flow: Flow,
        world: World,
        options: EngineOptions,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        _refuse_two_passes(options)
        self._parts = list(parts)
        stages = [
            PipelineStage(
                part,
                index,
                len(cut.layers),
                world.device,
                input_args=_example(part, flow, world, entering=True),
                output_args=_example(part, flow, world, entering=False),
                group=world.mesh.get_group("pp"),
            )
            for index, part in zip(cut.mine, parts, strict=True)
        ]
        kind = get_schedule_class(SCHEDULES[options.pp_schedule])
        single = issubclass(kind, PipelineScheduleSingle)
        if single and len(stages) > 1:
            raise BadInput.single(
                "parallelism.pp_stages_per_rank",
                len(stages),
                f"pp_schedule={options.pp_schedule} has one stage on each rank",
                allowed="1 or auto",
            )
        held: Any = stages[0] if single else stages

        def share(logits: Tensor, targets: Tensor) -> Tensor:
            return loss(logits, targets) / flow.micro_batches

        try:
            self._schedule: PipelineScheduleSingle | PipelineScheduleMulti = kind(
                held, flow.micro_batches, loss_fn=share, scale_grads=False
            )
        except ValueError as error:
            raise BadInput.single(
                "parallelism.pp_schedule",
                options.pp_schedule,
                f"it cannot run {flow.micro_batches} micro-batches through {len(cut.layers)}"
                f" stages: {' '.join(str(error).split())}",
                hint="Change train.micro_batch_size or train.global_batch_size",
            ) from error

    def run(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Gradients of the mean over all micro-batches, and that mean where the last stage is.

        `inputs` and `targets` are (micro-batches · micro_batch_size, tokens).
        """
        first = any(part.first for part in self._parts)
        last = any(part.last for part in self._parts)
        losses: list[Tensor] = []
        given = (inputs,) if first else ()
        asked: dict[str, Any] = {"target": targets, "losses": losses} if last else {}
        self._schedule.step(*given, return_outputs=False, **asked)
        return torch.stack([loss.detach() for loss in losses]).sum() if last else None


class TiedCopies:
    """The embedding of the first and the head of the last stage, where they are one matrix."""

    def __init__(self, parts: Sequence[Decoder], cut: Cut, world: World) -> None:
        """Collective: makes a group for each pair of ranks that hold the same piece."""
        first, last = cut.ends
        self._held = [
            part.tok_embeddings.weight for part in parts if part.tok_embeddings is not None
        ]
        self._group: ProcessGroup | None = None
        if first != last:
            for place in range(world.stage_ranks):
                pair = [owner * world.stage_ranks + place for owner in (first, last)]
                self._group = world.group(pair) or self._group

    def add_gradients(self) -> None:
        """Give each copy the sum of both gradients."""
        gradients = [local_part(weight.grad) for weight in self._held if weight.grad is not None]
        if len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])
        elif gradients and self._group is not None:
            dist.all_reduce(gradients[0], group=self._group)


def _refuse_two_passes(options: EngineOptions) -> None:
    """Gradients of activations and of weights, each by a pass of its own over a block's graph."""
    if options.pp_schedule not in SPLIT_BACKWARD:
        return
    twice = f"pp_schedule={options.pp_schedule} goes over each block's graph twice"
    problems = []
    if options.recompute == "ops":
        why = f"{twice}, and what was computed again by operation can be used once"
        problems.append(Problem("parallelism.recompute", "ops", why, allowed="none, full"))
    if options.compile:
        why = f"{twice}, and a compiled block's cannot be parted"
        problems.append(Problem("train.compile", "true", why, allowed="false"))
    raise_if_any(problems)


def _example(part: Decoder, flow: Flow, world: World, *, entering: bool) -> Tensor:
    """The shape of what enters or leaves a part; it holds no values."""
    if entering and part.first:
        shape: tuple[int, ...] = (flow.micro_batch_size, flow.tokens)
        return torch.empty(shape, dtype=torch.long, device="meta")
    shape = flow.logits if part.last and not entering else flow.stream
    return torch.empty(shape, dtype=flow.dtype, device="meta", requires_grad=True)
