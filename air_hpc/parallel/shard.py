"""Data parallelism: a part of the model on the ranks that see other tokens than this one.

    one rank, or pure dp_replicate    the part itself, or DistributedDataParallel around it
    anything else                     FSDP2, each block and then the root, over `sharding_mesh`

FSDP also serves where nothing is sharded but the weights are bf16: it keeps float32 masters and
casts what it gathers. Under bf16 the masters, the gradients' reduction and the optimizer stay
float32; the two plain ways compute under autocast instead.

FSDP averages over all ranks of the data, those of a sequence's pieces included. Experts have fewer
ranks to average over, and divide by as many all the same: each has gathered the tokens of its whole
group.
"""

from __future__ import annotations

from typing import Any

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

from air_hpc.parallel.options import EngineOptions
from air_hpc.parallel.world import World


def is_plain(world: World) -> bool:
    """Whether each rank holds the whole model as ordinary tensors: one process, or DDP."""
    degrees = world.degrees
    return degrees.world_size == degrees.dp_replicate


def uses_fsdp(world: World, options: EngineOptions) -> bool:
    """Whether the parts are FSDP modules."""
    if is_plain(world):
        return False
    degrees = world.degrees
    spreads = degrees.data_parallel_size * degrees.cp > 1
    return spreads or options.precision == "bf16" or options.cpu_offload


def replicate(part: nn.Module, world: World) -> nn.Module:
    """`part` as DDP calls it, or itself on a single rank."""
    if world.degrees.dp_replicate == 1:
        return part
    return DistributedDataParallel(
        part,
        process_group=world.mesh.get_group("dp_replicate"),
        gradient_as_bucket_view=True,
        broadcast_buffers=False,  # the rotation table is equal everywhere and never changes
    )


def shard(part: nn.Module, world: World, options: EngineOptions) -> None:
    """Make `part` and its blocks FSDP modules.

    In a pipeline the weights stay gathered from a step's first micro-batch to its last, whatever
    `reshard_after_forward` says: gathering them for each micro-batch would cost more than it saves.
    """
    reshard = options.reshard_after_forward and world.degrees.pp == 1
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
    shared: dict[str, Any] = {"mp_policy": policy, "offload_policy": offload}
    mesh = world.sharding_mesh
    layers = list(part.get_submodule("layers").children())
    for layer in layers:
        _shard_experts(layer, world, reshard, shared)
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, **shared)
    # The root's own parameters are needed again at the start of the backward pass.
    fully_shard(part, mesh=mesh, reshard_after_forward=False, **shared)
    _prefetch(layers, options.prefetch)


def _shard_experts(layer: nn.Module, world: World, reshard: bool, shared: dict[str, Any]) -> None:
    if world.expert_mesh is None:
        return
    experts = getattr(layer.get_submodule("feed_forward"), "experts", None)
    if experts is None:
        return
    mesh = world.expert_mesh
    degrees = world.degrees
    over = mesh["dp_replicate", "efsdp"] if degrees.dp_replicate > 1 else mesh["efsdp"]
    fully_shard(experts, mesh=over, reshard_after_forward=reshard, **shared)
    experts.set_gradient_divide_factor(float(degrees.data_parallel_size * degrees.cp))
    if world.device.type == "cpu" and mesh["efsdp"].size() > 1:
        # gloo cannot multiply inside a reduction, as NCCL does for a factor of one's own. With
        # nothing to reduce torch 2.13 divides beforehand, and would divide once more.
        experts.set_force_sum_reduction_for_comms(True)


def _prefetch(layers: list[nn.Module], depth: int) -> None:
    """Gather `depth` blocks ahead. One is what FSDP does by itself."""
    if depth == 1:
        return
    for index, layer in enumerate(layers):
        assert isinstance(layer, FSDPModule)
        following = layers[index + 1 : index + 1 + depth]
        before = layers[max(0, index - depth) : index][::-1]
        layer.set_modules_to_forward_prefetch(following)  # type: ignore[arg-type]
        # An empty list would mean FSDP's own choice; what is gathered already costs nothing.
        layer.set_modules_to_backward_prefetch(before or [layer])  # type: ignore[arg-type]
