"""Bytes on each rank of the pipeline, and on the fullest: from shapes, by what holds them.

With P the parameters of a rank's stages after tp and ep, S those it keeps of them (P over dp_shard
× cp; experts over what ep leaves), E those of the ends (embedding, head), B the largest block, and
c bytes an element in compute precision:

- weights: 4·S for the float32 masters. FSDP adds gathered copies in compute precision: the ends for
  the whole step, of the blocks one at work and `prefetch` ahead, c·B each (of those ahead not the
  experts, a unit of their own); all of them without `reshard_after_forward`, and in a pipeline,
  where they stay from the first micro-batch to the last. A plain bf16 run has autocast's copies of
  the matrices instead.
- gradients: float32, 4·S. FSDP adds what it has not scattered yet: a unit's in compute precision
  and in the float32 buffer that is reduced, (c + 4) each, of the ends until the backward pass has
  ended. In a pipeline gradients are summed whole before they are scattered once: 4·P instead.
- optimizer: AdamW 8·S (two float32 moments), SGD 4·S with momentum and nothing without. A CPU's
  step over many tensors has 4·S of its own while it runs, as SGD with weight decay has anywhere.
- activations: `plan.activations`, by token, times the tokens of a micro-batch, times the
  micro-batches in flight (`plan.pipeline_time`).
- logits: what the loss keeps, and float32 gradients of the logits where its backward begins. A
  pipeline's last stage holds the logits themselves too, for each micro-batch in flight.
- buffers: what a block's backward pass has at work beside what was kept, and in a pipeline room for
  what a stage receives: an activation and a gradient for each micro-batch of a step, since torch
  2.13 (`PipelineStage`) sets aside all of them at once.
- margin: on a GPU 1.5 GB (context, NCCL's channels, kernels' workspaces) and 4 % of the tensors
  (the caching allocator's fragmentation): a choice, not a measurement. None on a CPU.

These are not all there at once, so what is held is followed through the moments of a step at which
it can be largest: the loss' backward, the first block's backward, the end of the backward pass, the
optimizer's step.

`cpu_offload` keeps masters, sharded gradients and the optimizer in host memory.

Sources: ZeRO (arXiv 1910.02054), FSDP (2304.11277), and torch 2.13's FSDPMemTracker, against which
the formulas are checked. A plan is no promise that a run fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from air_hpc.config.spec import RunSpec
from air_hpc.plan.activations import (
    Shape,
    block_again,
    block_at_work,
    block_kept,
    experts_whole,
    head_kept,
    logits_kept,
    logits_peak,
)
from air_hpc.plan.blocks import Parameters
from air_hpc.plan.flops import count_parameters
from air_hpc.plan.layout import (
    Stage,
    Wrapper,
    micro_batches,
    own,
    stages_by_rank,
    tokens_of,
    whole_block,
    whole_ends,
    whole_stage,
    wrapper,
)
from air_hpc.plan.pipeline_time import in_flight
from air_hpc.plan.schedule import stages_per_rank
from air_hpc.plan.types import MemoryPerRank, Mesh

_MASTER_BYTES = 4
_CONTEXT_BYTES = 1_500_000_000
_FRAGMENTATION = 0.04


def memory_per_rank(spec: RunSpec, mesh: Mesh, micro_batch_size: int) -> MemoryPerRank:
    """The estimate for the fullest rank of a resolved mesh and micro-batch."""
    return max(memory_by_stage(spec, mesh, micro_batch_size), key=lambda rank: rank.total_bytes)


def memory_by_stage(spec: RunSpec, mesh: Mesh, micro_batch_size: int) -> tuple[MemoryPerRank, ...]:
    """The estimate for each pipeline rank, which has one stage or more."""
    shape = Shape.of(spec, mesh)
    tokens = tokens_of(spec, mesh, micro_batch_size)
    by_rank = stages_by_rank(spec, mesh)
    kept = {stage.number: tokens * _kept(shape, stage) for stages in by_rank for stage in stages}
    count = micro_batches(spec, mesh, micro_batch_size)
    held = _held(spec, mesh, count, [kept[number] for number in range(len(kept))])
    return tuple(
        _Rank(spec, mesh, shape, stages, tokens, count, held[rank], kept).estimate(rank)
        for rank, stages in enumerate(by_rank)
    )


def state_bytes(spec: RunSpec) -> int:
    """What a checkpoint holds of the whole model: fp32 weights and the optimizer's state."""
    parameters = count_parameters(spec.model).parameters
    return parameters * (_MASTER_BYTES + _optimizer_bytes_per_parameter(spec))


def _optimizer_bytes_per_parameter(spec: RunSpec) -> int:
    if spec.optimizer.name == "adamw":
        return 8
    return 4 if spec.optimizer.momentum > 0 else 0


def _held(
    spec: RunSpec, mesh: Mesh, count: int, kept: Sequence[float]
) -> tuple[dict[int, int], ...]:
    """Micro-batches of each stage in flight, by pipeline rank."""
    if mesh.pp == 1:
        return ({0: 1},)
    options = spec.parallelism
    loops = stages_per_rank(options)
    return in_flight(options.pp_schedule, mesh.pp, loops, count, kept)


def _kept(shape: Shape, stage: Stage) -> float:
    """Activation bytes of one token in a stage, without logits."""
    experts = sum(shape.model.is_moe(layer) for layer in stage.layers)
    total = experts * block_kept(shape, moe=True) if experts else 0.0
    total += (len(stage.layers) - experts) * block_kept(shape, moe=False)
    sent = shape.compute_bytes * shape.model.dim / shape.tp
    return total + (head_kept(shape) if stage.last else sent)


@dataclass(frozen=True)
class _Moment:
    """Bytes held at one moment of a step, beside the optimizer's state."""

    weights: float = 0.0
    gradients: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.activations + self.logits + self.buffers


@dataclass(frozen=True)
class _Rank:
    """One pipeline rank. `held` and `kept`: by stage, micro-batches in flight and their bytes."""

    spec: RunSpec
    mesh: Mesh
    shape: Shape
    stages: tuple[Stage, ...]
    tokens: int
    micro_batches: int
    held: Mapping[int, int]
    kept: Mapping[int, float]

    def estimate(self, pp_rank: int) -> MemoryPerRank:
        """The most of each part, and the most of all together."""
        optimizer = _optimizer_bytes_per_parameter(self.spec) * self.on_device
        moments = [self.at_loss(), *self.at_first_block(), self.at_end(), self.at_step()]
        moments = [replace(moment, buffers=moment.buffers + self.received) for moment in moments]
        most = {part.name: max(getattr(m, part.name) for m in moments) for part in fields(_Moment)}
        tensors = optimizer + max(moment.total for moment in moments)
        margin = 0.0
        if self.spec.accelerator.kind != "cpu":
            margin = _CONTEXT_BYTES + _FRAGMENTATION * tensors
        whole = {name: round(value) for name, value in most.items()}
        return MemoryPerRank(
            weights_bytes=whole["weights"],
            gradients_bytes=whole["gradients"],
            optimizer_bytes=optimizer,
            activations_bytes=whole["activations"],
            logits_bytes=whole["logits"],
            buffers_bytes=whole["buffers"],
            margin_bytes=round(margin),
            not_at_once_bytes=sum(whole.values()) + optimizer - round(tensors),
            pp_rank=pp_rank,
        )

    # -- what there is ---------------------------------------------------------------------------

    @cached_property
    def wrapper(self) -> Wrapper:
        return wrapper(self.spec, self.mesh)

    @cached_property
    def parameters(self) -> Parameters:
        """All of the rank's stages, gathered."""
        return sum_of(whole_stage(self.spec.model, stage, self.mesh) for stage in self.stages)

    @cached_property
    def ends(self) -> int:
        """Of the embedding and the head."""
        return sum_of(whole_ends(self.spec.model, s, self.mesh) for s in self.stages).total

    @cached_property
    def largest(self) -> Parameters:
        """Of the largest block."""
        model = self.spec.model
        layers = (layer for stage in self.stages for layer in stage.layers)
        blocks = (whole_block(model, layer, self.mesh) for layer in layers)
        return max(blocks, key=lambda block: block.total, default=Parameters())

    @property
    def block(self) -> int:
        """The same, all of it."""
        return self.largest.total

    @property
    def dense(self) -> int:
        """The same without its experts, which are a unit of FSDP's of their own."""
        return self.largest.total - self.largest.experts

    @cached_property
    def on_device(self) -> int:
        """Parameters whose masters, gradients and optimizer state are in device memory."""
        if self.wrapper != "fsdp":
            return self.parameters.total
        return 0 if self.spec.parallelism.cpu_offload else own(self.parameters, self.mesh)

    @property
    def stays_gathered(self) -> bool:
        return self.mesh.pp > 1 or not self.spec.parallelism.reshard_after_forward

    def copies(self, of_blocks: int) -> float:
        """Weights in compute precision, of the blocks so many parameters gathered."""
        c = self.shape.compute_bytes
        if self.wrapper != "fsdp":
            return c * self.parameters.matrices if c < _MASTER_BYTES else 0.0
        gathered = self.ends + of_blocks
        if self.stays_gathered or gathered > self.parameters.total:
            gathered = self.parameters.total
        return float(c * gathered)

    @cached_property
    def summed(self) -> float:
        """Gradients of the micro-batches before, when another begins."""
        if self.wrapper == "ddp":
            return 4.0 * self.parameters.total  # its buckets stay
        if self.micro_batches == 1:
            return 0.0
        whole = self.wrapper == "none" or self.mesh.pp > 1
        return 4.0 * (self.parameters.total if whole else self.on_device)

    @cached_property
    def activations(self) -> float:
        return sum(self.held[stage.number] * self.kept[stage.number] for stage in self.stages)

    @cached_property
    def still_sent(self) -> float:
        """The buffer in which the ends' gradients of the micro-batch before were reduced: FSDP lets
        go of it at the next reduction."""
        again = self.wrapper == "fsdp" and self.mesh.pp == 1 and self.micro_batches > 1
        return 4.0 * self.ends if again else 0.0

    @cached_property
    def received(self) -> float:
        """Where stages receive: torch has room for each micro-batch of a step, both ways."""
        if self.mesh.pp == 1:
            return 0.0
        ways = sum((not stage.first) + (not stage.last) for stage in self.stages)
        stream = self.tokens * self.shape.compute_bytes * self.spec.model.dim / self.mesh.tp
        return ways * self.micro_batches * stream

    # -- the moments -----------------------------------------------------------------------------

    def at_loss(self) -> _Moment:
        """The backward pass of the loss begins."""
        last = [stage for stage in self.stages if stage.last]
        if not last:
            return _Moment()
        kept = self.tokens * logits_kept(self.shape)
        if self.mesh.pp > 1:
            kept += self.tokens * self.shape.compute_bytes * self.shape.vocabulary
        logits = self.held[last[0].number] * kept + self.tokens * logits_peak(self.shape)
        weights = _MASTER_BYTES * self.on_device + self.copies(0)
        return _Moment(weights, self.summed, self.activations, logits, self.still_sent)

    def at_first_block(self) -> tuple[_Moment, _Moment]:
        """The backward pass of the last block, which runs first, and when it (or its experts) is
        done and its gradients are on the way. The head's is done."""
        c, model, tokens = self.shape.compute_bytes, self.spec.model, self.tokens
        layers = {model.is_moe(layer) for stage in self.stages for layer in stage.layers}
        again = max((block_again(self.shape, moe=moe) for moe in layers), default=0.0)
        at_work = max((block_at_work(self.shape, moe=moe) for moe in layers), default=0.0)
        kept = min((block_kept(self.shape, moe=moe) for moe in layers), default=0.0)
        last = [stage for stage in self.stages if stage.last]
        head = whole_ends(model, last[0], self.mesh).total if last else 0
        if last and last[0].first and not model.tied_head:
            head //= 2
        # A unit's gradients wait until it is done; where a block has experts, they are done first.
        unit = self.largest.experts or self.block
        done = experts_whole(self.shape) if self.largest.experts else kept
        sent = 4 * unit
        if self.wrapper == "fsdp":
            waiting = c * (head + self.dense)
        else:
            waiting, sent = (0, 0) if self.summed else (4 * (head + self.block), 0)
        if self.mesh.pp > 1 and self.micro_batches > 1:
            sent = 0  # summed whole; scattered in the end
        logits = 0.0
        if last:
            others = self.held[last[0].number] - 1
            logits = others * tokens * (logits_kept(self.shape) + c * self.shape.vocabulary)
        masters = float(_MASTER_BYTES * self.on_device)
        ahead = self.spec.parallelism.prefetch * self.dense
        gradients = self.summed + waiting
        whole = self.activations + tokens * again
        return (
            _Moment(
                masters + self.copies(self.block + ahead),
                gradients,
                whole,
                logits,
                tokens * at_work + self.still_sent,
            ),
            _Moment(
                masters + self.copies(self.dense + ahead),
                gradients + sent + c * self.largest.experts,
                whole - tokens * done,
                logits,
                tokens * at_work,
            ),
        )

    def at_end(self) -> _Moment:
        """The backward pass is over but for the last unit's reduction, that of the ends."""
        c = self.shape.compute_bytes
        masters = float(_MASTER_BYTES * self.on_device)
        if self.wrapper != "fsdp":
            # A tied matrix has a gradient of each use before they are one.
            twice = 8.0 * self.ends if self.spec.model.tied_head else 0.0
            return _Moment(masters + self.copies(0), 4.0 * self.parameters.total + twice)
        if self.mesh.pp > 1:
            whole = self.parameters.total + max(self.block, self.ends)
            return _Moment(masters + self.copies(0), 4.0 * whole)
        scattered = self.on_device - min(self.on_device, self.ends // self.mesh.shard_size)
        return _Moment(masters, 4.0 * scattered + (c + 4) * self.ends)

    def at_step(self) -> _Moment:
        """The optimizer's."""
        on_device = self.on_device
        optimizer = self.spec.optimizer
        fused = self.spec.accelerator.kind != "cpu" or optimizer.name == "sgd"
        decays = optimizer.name == "sgd" and optimizer.weight_decay > 0
        at_work = 0 if fused and not decays else 4
        masters = float(_MASTER_BYTES * on_device)
        return _Moment(masters, 4.0 * on_device, buffers=float(at_work * on_device))


def sum_of(parts: Iterable[Parameters]) -> Parameters:
    """All of them together."""
    return sum(parts, Parameters())
