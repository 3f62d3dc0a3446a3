"""The real engine of any one rank in a single process, without devices, peers or storage.

A fake process group answers for the other ranks at once, and fake tensors have shapes and no
values, so a rank of a thousand is built and run for a step in seconds: what it computes, sends and
holds is counted (`counting`, `holding`) instead of predicted. It is the engine's own code but for
three places:

- weights get no values, and DDP (whose C++ half wants real ones) stays off: its one all-reduce of
  the gradients is counted by hand;
- a pipeline's schedule does not run under a fake group (torch 2.13 reads a flag off a tensor): each
  stage of the rank runs two micro-batches, forward and backward, one stage after another, and
  FSDP's reduction once at the end. How many are held at a time is the schedule's arithmetic;
- nothing is compiled.

One world for each process: torch does not take another after the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from air_hpc.config.spec import ModelSpec
from air_hpc.models import Decoder
from air_hpc.parallel.counting import Traffic, Watch
from air_hpc.parallel.engine import Engine
from air_hpc.parallel.holding import ACTIVATIONS, BUFFERS, GRADIENTS, Memory
from air_hpc.parallel.pipeline import Flow, Pipeline
from air_hpc.parallel.shard import is_plain
from air_hpc.parallel.world import World, build_expert_mesh, build_mesh
from air_hpc.plan.types import Mesh

WEIGHTS, GATHERED, OPTIMIZER = "weights", "gathered_weights", "optimizer"


def fake_world(degrees: Mesh, rank: int) -> World:
    """The world of `rank`, whose other ranks do not exist."""
    size = degrees.world_size
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    timeout = timedelta(minutes=1)
    mesh = build_mesh(degrees, "cpu", timeout)
    experts = build_expert_mesh(degrees, "cpu", timeout) if degrees.ep > 1 else None
    group = dist.group.WORLD
    assert group is not None
    return World(rank, 0, size, torch.device("cpu"), degrees, mesh, group, 60.0, experts)


class TracedEngine(Engine):
    """An engine whose steps are counted. Made, and used, with `fake` not active."""

    def __init__(self, fake: FakeTensorMode, *args: Any) -> None:
        self.fake = fake
        self.watch = Watch()
        super().__init__(*args)
        self.memory, self.traffic = Memory(), Traffic(self.world.axes_of_groups())
        self.stages: list[PlayedStage] = []
        if self._pipeline is not None:
            played = _PlayedPipeline(self._pipeline, self)
            self.stages = played.stages
            self._pipeline = played  # type: ignore[assignment]

    def _fill(self, part: Decoder, model: ModelSpec, seed: int, device: torch.device) -> None:
        del model, seed
        with self.fake:
            part.to_empty(device=device)
            part.reset_table()

    def _replicated(self, part: Decoder) -> nn.Module:
        return part

    def _flow(self, model: ModelSpec, sequence_length: int, micro_batch_size: int) -> Flow:
        self.flow = super()._flow(model, sequence_length, micro_batch_size)
        return self.flow

    @contextlib.contextmanager
    def _micro_batch(self, *, last: bool) -> Iterator[None]:
        self.begin()
        with super()._micro_batch(last=last):
            yield

    def begin(self) -> None:
        """A micro-batch begins, or what comes after the last."""
        self.watch.segment()

    def traced_step(self, tokens: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """One step with its optimizer's, counted."""
        self.step(tokens)
        self.begin()
        self._reduce_as_ddp()
        self._label()
        optimizer.step()

    def _reduce_as_ddp(self) -> None:
        """What DistributedDataParallel would send."""
        if is_plain(self.world) and self.world.degrees.dp_replicate > 1:
            size = sum(p.numel() * 4 for p in self.parameters())
            group = self.world.mesh.get_group("dp_replicate")
            self.traffic.add(group, "all_reduce", 1, size)

    def label_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Say what is there before the step."""
        for part in self.parts:
            self.memory.label(WEIGHTS, *part.parameters(), *part.buffers())
        for state in optimizer.state.values():
            self.memory.label(OPTIMIZER, *(x for x in state.values() if isinstance(x, Tensor)))

    def _label(self) -> None:
        """Say what is left of the step, and what FSDP has gathered weights in."""
        for part in self.parts:
            self.memory.label(WEIGHTS, *part.parameters(), *part.buffers())
            for parameter in part.parameters():
                if parameter.grad is not None:
                    self.memory.label(GRADIENTS, parameter.grad)
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    self.memory.label(GATHERED, *_gathered(module))


def _gathered(module: FSDPModule) -> Iterator[Tensor]:
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            yield from parameter.all_gather_outputs


class PlayedStage:
    """One stage of the rank. `stage` is torch's, which knows its place and FSDP's reduction.

    `held_bytes` is what a micro-batch leaves in it between its forward and its backward pass.
    Torch's stages have room for what each of a step's micro-batches receives, all through the step:
    activations from the stage before, their gradients from the one after.
    """

    def __init__(self, part: Decoder, stage: Any) -> None:
        self.part = part
        self.stage = stage
        self.held_bytes = 0
        self.activations: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def make_room(self, flow: Flow) -> list[Tensor]:
        """For what is received."""
        sides = (not self.part.first, not self.part.last)
        self.activations, self.gradients = (
            [torch.empty(flow.stream, dtype=flow.dtype) for _ in range(flow.micro_batches * side)]
            for side in sides
        )
        return [*self.activations, *self.gradients]

    @property
    def number(self) -> int:
        """Which of the model's stages it is."""
        return int(self.stage.stage_index)


class _PlayedPipeline:
    """In the place of a Pipeline: the rank's stages without their schedule."""

    def __init__(self, pipeline: Pipeline, engine: TracedEngine) -> None:
        schedule: Any = pipeline._schedule
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        self.stages = [
            PlayedStage(part, stage) for part, stage in zip(engine.parts, stages, strict=True)
        ]
        self._mine = {stage.number for stage in self.stages}
        self._engine = engine
        self._loss: Callable[[Tensor, Tensor], Tensor] = engine._loss

    def run(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """As `Pipeline.run`, with as many micro-batches as `inputs` holds."""
        size = self._engine.flow.micro_batch_size
        for stage in self.stages:
            self._engine.memory.label(BUFFERS, *stage.make_room(self._engine.flow))
        each = zip(torch.split(inputs, size), torch.split(targets, size), strict=True)
        for index, (tokens, wanted) in enumerate(each):
            self._engine.begin()
            ends = [self._forward(stage, index, tokens, wanted) for stage in self.stages]
            for stage in reversed(self.stages):
                self._backward(stage, index, *ends.pop())
        self._engine.begin()
        for stage in self.stages:
            stage.stage.perform_reduce_grad(1)
        return None

    def _forward(
        self, stage: PlayedStage, index: int, tokens: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(what entered, what left, the loss of the last stage)."""
        part, memory = stage.part, self._engine.memory
        before = memory.live_by_label()
        entered = tokens if part.first else stage.activations[index].requires_grad_()
        if isinstance(part, FSDPModule):  # as torch's stages do, until the last micro-batch
            part.set_is_last_backward(False)
            part.set_reshard_after_backward(False)
            part.set_requires_gradient_sync(False)
        left: Tensor = part(entered)
        loss = self._loss(left, wanted) if part.last else None
        if not part.last:
            self._send(left, stage.number + 1)
        after = memory.live_by_label()
        stage.held_bytes = after.get(ACTIVATIONS, 0) - before.get(ACTIVATIONS, 0)
        return entered, left, loss

    def _backward(
        self, stage: PlayedStage, index: int, entered: Tensor, left: Tensor, loss: Tensor | None
    ) -> None:
        if loss is None:
            left.backward(stage.gradients[index])  # type: ignore[no-untyped-call]
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        if entered.grad is not None:
            self._send(entered.grad, stage.number - 1)
            entered.grad = None

    def _send(self, tensor: Tensor, to: int) -> None:
        if to not in self._mine:
            group = self._engine.world.mesh.get_group("pp")
            self._engine.traffic.add(group, "send", 1, tensor.nbytes)
