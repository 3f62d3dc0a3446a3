"""The process group, the device and the meshes of one worker.

    mesh           pp × dp_replicate × dp_shard × cp × tp, every axis named, size 1 included
    mesh["fsdp"]   dp_shard and cp as one axis: the ranks that weights are sharded over. Context
                   ranks hold other tokens of the same weights, as data ranks do.
    expert_mesh    pp × dp_replicate × efsdp × ep × tp over the same ranks, where ep > 1: ep takes
                   the innermost of the dp_shard and cp ranks, what is left of them shards experts

Gloo on a CPU, NCCL on a GPU. Every group that exists here has the run's collective timeout: torch
2.13 gives mesh sub-groups and `new_group` 30 minutes whatever the default group was told, so a
hang inside a sub-mesh would outlive the allocation's patience; they are set one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from air_hpc.errors import BadInput, EnvironmentFailure
from air_hpc.plan.types import MESH_AXES, Mesh

EXPERT_AXES = ("pp", "dp_replicate", "efsdp", "ep", "tp")


class RanksMissing(EnvironmentFailure):
    """The ranks did not come together: one was lost or late, or its port was taken meanwhile.

    Another start may find them all.
    """


@dataclass(frozen=True)
class World:
    """Where this worker stands.

    `mesh` has all of MESH_AXES by name, and "fsdp"; `expert_mesh` those of EXPERT_AXES, None
    without expert parallelism. `control` is a gloo group of all ranks for objects and checkpoints,
    apart from the training's collectives, safe to use from another thread.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    degrees: Mesh
    mesh: DeviceMesh
    control: ProcessGroup
    timeout_s: float
    expert_mesh: DeviceMesh | None = None

    @property
    def data_rank(self) -> int:
        """Which of the `data_ranks` parts of a global batch is this worker's."""
        replicate = self.mesh.get_local_rank("dp_replicate")
        return replicate * self.degrees.dp_shard + self.mesh.get_local_rank("dp_shard")

    @property
    def data_ranks(self) -> int:
        """Into how many parts a global batch is divided."""
        return self.degrees.data_parallel_size

    @property
    def sharding_mesh(self) -> DeviceMesh:
        """What FSDP spreads over: the sharding ranks, under the replicas where there are some."""
        axis = "fsdp" if self.degrees.cp > 1 else "dp_shard"
        return self.mesh["dp_replicate", axis] if self.degrees.dp_replicate > 1 else self.mesh[axis]

    @property
    def stage_ranks(self) -> int:
        """How many ranks hold the same stages of the pipeline: all, where there is no pipeline."""
        return self.world_size // self.degrees.pp

    @property
    def stage_rank(self) -> int:
        """Which of the `stage_ranks` this worker is."""
        return self.rank % self.stage_ranks

    def axes_of_groups(self) -> dict[str, tuple[str, ...]]:
        """The axes of each group of more than one rank, by torch's name of the group.

        Torch describes a group by its axis, but where an axis spans all ranks: that is its default
        group, which two axes may share.
        """
        found: dict[str, list[str]] = {}
        axes = [(self.mesh, axis) for axis in MESH_AXES]
        if self.degrees.cp > 1:
            axes.append((self.mesh, "fsdp"))
        if self.expert_mesh is not None:
            axes += [(self.expert_mesh, axis) for axis in EXPERT_AXES]
        for mesh, axis in axes:
            group = mesh[axis].get_group()
            named = found.setdefault(group.group_name, [])
            if group.size() > 1 and axis not in named:
                named.append(axis)
        return {name: tuple(named) for name, named in found.items() if named}

    def group(self, ranks: Sequence[int]) -> ProcessGroup | None:
        """A new group of some ranks under the run's timeout; None where this rank is not in it.

        Collective: every rank of the world calls it, in the same order.
        """
        made = dist.new_group(list(ranks), timeout=timedelta(seconds=self.timeout_s))
        return made if self.rank in ranks else None


def choose_device(kind: str, local_rank: int) -> torch.device:
    """The device of this worker for an accelerator kind.

    The one of its local rank among those that are bound to the job. Raises EnvironmentFailure when
    there is no such device: there is no fall-back to another kind, and workers that shared one
    would die in their first collective, for a reason that looks like the network's.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if kind not in ("cuda", "rocm"):
        raise BadInput.single(
            "accelerator.kind", kind, "the native engine has no backend for it", allowed="cpu, cuda"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= count:
        raise EnvironmentFailure(
            f"local rank {local_rank} has no GPU: torch {torch.__version__} sees {count}",
            next_step="check the node's driver, the job's GPU binding, and that torch has CUDA",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def start_world(
    degrees: Mesh,
    *,
    rank: int,
    local_rank: int,
    world_size: int,
    kind: str,
    timeout_s: float,
    store: Store | None = None,
    cpu_offload: bool = False,
) -> World:
    """Join the process group (at MASTER_ADDR and MASTER_PORT, or through `store`), make the mesh.

    Raises RanksMissing when the ranks do not come together within `timeout_s`, BadInput for
    degrees that do not multiply to the world.
    """
    if degrees.world_size != world_size:
        raise BadInput.single(
            "parallelism",
            f"a mesh of {degrees.world_size}",
            f"does not multiply to the {world_size} workers that were started",
        )
    device = choose_device(kind, local_rank)
    timeout = timedelta(seconds=timeout_s)
    try:
        dist.init_process_group(
            backend_for(device, cpu_offload=cpu_offload),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            store=store,
            device_id=None if device.type == "cpu" else device,
        )
        control = dist.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise RanksMissing(
            f"rank {rank} of {world_size} could not join the others: {error}",
            tried=f"a rendezvous of at most {timeout_s:g} s",
            next_step="look at the logs of the other ranks and at the network interface chosen",
        ) from error
    mesh = build_mesh(degrees, device.type, timeout)
    experts = build_expert_mesh(degrees, device.type, timeout) if degrees.ep > 1 else None
    return World(rank, local_rank, world_size, device, degrees, mesh, control, timeout_s, experts)


def backend_for(device: torch.device, *, cpu_offload: bool) -> str:
    """The collective backends; offloaded gradients are reduced on the host, so gloo joins NCCL."""
    if device.type == "cpu":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if cpu_offload else "nccl"


def build_mesh(degrees: Mesh, device_type: str, timeout: timedelta) -> DeviceMesh:
    """The mesh with every axis of MESH_AXES named (size 1 included), and "fsdp" where cp > 1."""
    sizes = tuple(getattr(degrees, axis) for axis in MESH_AXES)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=MESH_AXES)
    if degrees.cp > 1:
        flat = mesh["dp_shard", "cp"]._flatten("fsdp")
        _set_pg_timeout(timeout, flat.get_group())
    return _bounded(mesh, timeout)


def build_expert_mesh(degrees: Mesh, device_type: str, timeout: timedelta) -> DeviceMesh:
    """The ranks once more, with the axes of EXPERT_AXES."""
    sharding = degrees.dp_shard * degrees.cp
    if sharding % degrees.ep:
        raise BadInput.single(
            "parallelism.ep",
            degrees.ep,
            f"ep lies inside dp_shard {degrees.dp_shard} × cp {degrees.cp} = {sharding} ranks",
            allowed=f"a divisor of {sharding}",
        )
    sizes = (degrees.pp, degrees.dp_replicate, sharding // degrees.ep, degrees.ep, degrees.tp)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=EXPERT_AXES)
    return _bounded(mesh, timeout)


def _bounded(mesh: DeviceMesh, timeout: timedelta) -> DeviceMesh:
    for group in mesh.get_all_groups():
        _set_pg_timeout(timeout, group)
    return mesh


def stop_world() -> None:
    """Leave the process group; does nothing where there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()
