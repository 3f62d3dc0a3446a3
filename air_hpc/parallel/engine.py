"""The engine: a model on its mesh, and one training step of it.

    tokens of this rank's sequences -> `step` -> gradients, and this rank's share of the mean loss

What `step` promises on every mesh: after it each parameter's gradient is that of the mean loss over
the global batch, and the shares of all ranks sum to that mean. The loss and the gradients are those
of a single process up to rounding.

A rank holds one part of the model, or in a pipeline one for each of its stages. Each is built on
meta, given its attention over several ranks (cp), cut (tp), told what to compute again, compiled,
and sharded, in this order; then it gets storage and its first weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from air_hpc.config.spec import ModelSpec
from air_hpc.errors import BadInput
from air_hpc.models import Decoder, initialize, on_meta
from air_hpc.parallel.context import Layout, spread_sequence
from air_hpc.parallel.mixture import balance, spread_mixtures
from air_hpc.parallel.options import EngineOptions
from air_hpc.parallel.pipeline import TIED_NAME, Cut, Flow, Pipeline, TiedCopies, cut_of
from air_hpc.parallel.recompute import prepare_blocks
from air_hpc.parallel.reduce import Held, copies_of
from air_hpc.parallel.shard import is_plain, replicate, shard, uses_fsdp
from air_hpc.parallel.tensor import (
    loss_context,
    loss_over,
    settle_embedding,
    settle_gradients,
    split,
)
from air_hpc.parallel.world import World


class Engine:
    """A model on its mesh. `parts` are what this rank holds of it, in the model's order.

    `micro_batches` of `micro_batch_size` sequences of `sequence_length` tokens are a rank's part
    of a step.
    """

    def __init__(
        self,
        model: ModelSpec,
        sequence_length: int,
        seed: int,
        world: World,
        options: EngineOptions,
        micro_batches: int,
        micro_batch_size: int,
    ) -> None:
        self.world = world
        self._options = options
        self.micro_batches = micro_batches
        degrees = world.degrees
        self._tensor_mesh: DeviceMesh | None = world.mesh["tp"] if degrees.tp > 1 else None
        self._loss_mesh = self._tensor_mesh if options.loss_parallel else None
        self._loss = loss_over(self._loss_mesh)
        self._layout: Layout | None = None
        if degrees.cp > 1:
            self._context_group = world.mesh.get_group("cp")
            self._layout = Layout.of(options.cp_method, self._context_group)
        if degrees.ep > 1 and model.moe is None:
            raise BadInput.single(
                "parallelism.ep", degrees.ep, f"model={model.name} has no experts", allowed="1"
            )
        cut: Cut | None = None
        if degrees.pp > 1:
            cut = cut_of(model, sequence_length, world, options)
        self.parts = self._build(model, sequence_length, seed, cut)
        self._module: nn.Module = self.parts[0]
        if is_plain(world):
            self._module = self._replicated(self.parts[0])
        self._tied: TiedCopies | None = None
        self._pipeline: Pipeline | None = None
        if cut is not None:
            flow = self._flow(model, sequence_length, micro_batch_size)
            self._pipeline = Pipeline(self.parts, cut, flow, world, options, self._loss)
            if model.tied_head:
                self._tied = TiedCopies(self.parts, cut, world)

    # -- what it is made of ----------------------------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        """All of this rank, both copies of a tied head where it holds both."""
        return [parameter for _, parameter in self.named_parameters()]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Full names of the model and this rank's pieces; a tied copy comes under the same name."""
        for part in self.parts:
            yield from part.named_parameters()

    def held(self) -> list[Held]:
        """This rank's parameters with their numbers of copies in the world, for `reduce`."""
        ranks = self.world.stage_ranks
        found = []
        for name, parameter in self.named_parameters():
            stages = 2 if self._tied is not None and name == TIED_NAME else 1
            found.append(Held(parameter, stages * copies_of(parameter, ranks)))
        return found

    def written_elsewhere(self) -> tuple[str, ...]:
        """Names whose copy on another rank is the one that a checkpoint holds."""
        first = any(part.first for part in self.parts)
        return () if first or self._tied is None else (TIED_NAME,)

    # -- a step ----------------------------------------------------------------------------------

    def step(self, tokens: Tensor) -> Tensor:
        """Gradients of a whole step; this rank's share of the global mean loss, on the device.

        `tokens` (micro-batches, micro-batch size, sequence_length + 1) are those of its data rank.
        """
        inputs, targets = self._pieces(tokens[..., :-1]), self._pieces(tokens[..., 1:])
        with loss_context(self._loss_mesh):
            if self._pipeline is None:
                mean: Tensor | None = self._accumulate(inputs, targets)
            else:
                mean = self._pipeline.run(inputs.flatten(0, 1), targets.flatten(0, 1))
        if self._tensor_mesh is not None and not uses_fsdp(self.world, self._options):
            settle_gradients(self.parameters(), self._tensor_mesh)
        if self._tied is not None:
            self._tied.add_gradients()
        if mean is None:
            return torch.zeros((), device=self.world.device)
        return mean / self.world.stage_ranks

    def finish_step(self, *, updates: bool = True) -> None:
        """What follows the optimizer's step, or would have: experts are kept equally busy."""
        balance(self.parts, self.world, updates=updates)

    def settle(self, tokens: Tensor) -> None:
        """Make DDP's gradient buckets final before the first step.

        DDP sorts its buckets anew after the first backward pass. The order in which an all-reduce
        adds three or more ranks depends on the place in a bucket, so that a resumed run, which
        would begin with unsorted buckets again, would differ in the last bit. One pass over
        `tokens`, whose gradients and random numbers are undone, takes that away.
        """
        if not isinstance(self._module, DistributedDataParallel):
            return
        devices = [self.world.device] if self.world.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            for _ in range(2):  # the second forward pass is what sorts
                with self._autocast():
                    logits = self._module(tokens)
                (logits.float().sum() * 0.0).backward()
        for parameter in self._module.parameters():
            parameter.grad = None
        balance(self.parts, self.world, updates=False)

    def _accumulate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), device=self.world.device)
        count = len(inputs)
        for number, (tokens, wanted) in enumerate(zip(inputs, targets, strict=True)):
            with self._micro_batch(last=number == count - 1):
                with self._autocast():
                    loss = self._loss(self._module(tokens), wanted) / count
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    @contextlib.contextmanager
    def _micro_batch(self, *, last: bool) -> Iterator[None]:
        """Wraps forward and backward of one micro-batch; gradients are whole after the last.

        DDP sums them locally, one reduction a step. FSDP scatters them at each micro-batch, since
        whole gradients would undo what sharding saves, and adds the replicas once a step.
        """
        module = self._module
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(last)
            module.set_is_last_backward(last)
            yield
        elif isinstance(module, DistributedDataParallel) and not last:
            with module.no_sync():
                yield
        else:
            yield

    def _autocast(self) -> AbstractContextManager[object]:
        if self._options.precision == "bf16" and is_plain(self.world):
            return torch.autocast(self.world.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def _pieces(self, tokens: Tensor) -> Tensor:
        """This rank's tokens of each sequence."""
        return tokens if self._layout is None else self._layout.shard(tokens, tokens.dim() - 1)

    # -- building --------------------------------------------------------------------------------

    def _build(
        self, model: ModelSpec, sequence_length: int, seed: int, cut: Cut | None
    ) -> list[Decoder]:
        world, options = self.world, self._options
        host = uses_fsdp(world, options) and options.cpu_offload
        parts = []
        for part in _on_meta(model, sequence_length, cut):
            spread_mixtures(part, world, self.micro_batches)
            if self._layout is not None:
                spread_sequence(part, sequence_length, self._layout, self._context_group)
            if self._tensor_mesh is not None:
                split(part, self._tensor_mesh, keep_logits_cut=self._loss_mesh is not None)
                if options.compile:
                    settle_embedding(part)
            prepare_blocks(part, options, exchanges=world.degrees.ep > 1)
            if uses_fsdp(world, options):
                shard(part, world, options)
            self._fill(part, model, seed, torch.device("cpu") if host else world.device)
            if host:
                _move_buffers(part, world.device)
            parts.append(part)
        return parts

    def _fill(self, part: Decoder, model: ModelSpec, seed: int, device: torch.device) -> None:
        """Storage and first weights."""
        initialize(part, model, seed, device)

    def _replicated(self, part: Decoder) -> nn.Module:
        return replicate(part, self.world)

    def _flow(self, model: ModelSpec, sequence_length: int, micro_batch_size: int) -> Flow:
        degrees = self.world.degrees
        tokens = sequence_length // degrees.cp
        vocabulary = model.vocab_size
        if self._loss_mesh is not None:
            vocabulary //= degrees.tp
        return Flow(
            self.micro_batches,
            micro_batch_size,
            tokens,
            (micro_batch_size, tokens // degrees.tp, model.dim),
            (micro_batch_size, tokens, vocabulary),
            torch.bfloat16 if self._options.precision == "bf16" else torch.float32,
        )


def _move_buffers(part: nn.Module, device: torch.device) -> None:
    """What stays on the device while the weights wait on the host."""
    for module in part.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _on_meta(model: ModelSpec, sequence_length: int, cut: Cut | None) -> list[Decoder]:
    """This rank's parts, shapes without storage."""
    if cut is None:
        return [on_meta(model, sequence_length)]
    last = len(cut.layers) - 1
    return [
        on_meta(model, sequence_length, cut.layers[stage], first=stage == 0, last=stage == last)
        for stage in cut.mine
    ]
