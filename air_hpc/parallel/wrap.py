"""Spread a model over the data-parallel axes of a mesh.

    dp_shard 1, dp_replicate 1    the model itself
    dp_shard 1, dp_replicate n    DistributedDataParallel
    dp_shard n                    FSDP2, each block and then the root
    both                          FSDP2 over the two axes (HSDP)

Under bf16 the master weights, the gradients' reduction and the optimizer stay float32: FSDP2
casts what it gathers, the other two compute under autocast. The gradients of the micro-batches
of a step are summed locally by DDP (one reduction a step); FSDP2 scatters them at each
micro-batch, since whole gradients would undo what sharding saves, and HSDP adds the replicas
together once a step.

A model too big for a device is built on meta and given storage after it was cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from air_hpc.config.spec import ModelSpec
from air_hpc.models import initialize, on_meta
from air_hpc.parallel.world import World


@dataclass(frozen=True)
class WrapOptions:
    """How to spread. `precision` is `fp32` or `bf16`."""

    precision: str = "fp32"
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    compile: bool = False


@dataclass
class Spread:
    """A model on its mesh. `module` is what is called; `precision` what it computes in."""

    module: nn.Module
    device: torch.device
    precision: str

    def autocast(self) -> AbstractContextManager[object]:
        """The context of the forward pass and the loss."""
        if self.precision == "bf16" and not isinstance(self.module, FSDPModule):
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Wraps forward and backward of one micro-batch; gradients are whole after the last."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_all_reduce(last)
            self.module.set_is_last_backward(last)
            yield
        elif isinstance(self.module, DistributedDataParallel) and not last:
            with self.module.no_sync():
                yield
        else:
            yield

    def settle(self, tokens: torch.Tensor) -> None:
        """Make DDP's gradient buckets final before the first step.

        DDP sorts its buckets anew after the first backward pass. The order in which an all-reduce
        adds three or more ranks depends on the place in a bucket, so that a resumed run, which
        would begin with unsorted buckets again, would differ in the last bit. One pass over
        `tokens`, whose gradients and random numbers are undone, takes that away.
        """
        if not isinstance(self.module, DistributedDataParallel):
            return
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            for _ in range(2):  # the second forward pass is what sorts
                with self.autocast():
                    logits = self.module(tokens)
                (logits.float().sum() * 0.0).backward()
        for parameter in self.module.parameters():
            parameter.grad = None


def build_spread(
    spec: ModelSpec, sequence_length: int, seed: int, world: World, options: WrapOptions
) -> Spread:
    """The model of `spec`, cut over `world` and initialised from `seed`."""
    model = on_meta(spec, sequence_length)
    sharded = world.degrees.dp_shard > 1
    if options.compile:
        for layer in model.layers.values():
            layer.compile(fullgraph=True)
    if sharded:
        _shard(model, world, options)
    host = sharded and options.cpu_offload
    initialize(model, spec, seed, torch.device("cpu") if host else world.device)
    if host:
        model.table = model.table.to(world.device)
    module: nn.Module = model
    if not sharded and world.degrees.dp_replicate > 1:
        module = DistributedDataParallel(
            model,
            process_group=world.mesh.get_group("dp_replicate"),
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # the rotation table is equal everywhere and never changes
        )
    return Spread(module, world.device, options.precision)


def _shard(model: nn.Module, world: World, options: WrapOptions) -> None:
    mesh = (
        world.mesh["dp_replicate", "dp_shard"]
        if world.degrees.dp_replicate > 1
        else world.mesh["dp_shard"]
    )
    policy = MixedPrecisionPolicy()
    if options.precision == "bf16":
        # Inputs are not cast: activations are bf16 from the embedding on, and all that a cast
        # would reach is the rotation table, which must stay float32 (`models.rope`).
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    offload = OffloadPolicy()
    if options.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    layers = model.get_submodule("layers")
    for layer in layers.children():
        fully_shard(
            layer,
            mesh=mesh,
            reshard_after_forward=options.reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
        )
    # The root's own parameters are needed again at the start of the backward pass.
    fully_shard(
        model, mesh=mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=offload
    )
