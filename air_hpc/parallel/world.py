"""The process group, the device and the mesh of one worker.

Gloo on a CPU, NCCL on a GPU. Every group that exists here has the run's collective timeout: torch
2.13 gives mesh sub-groups and `new_group` 30 minutes whatever the default group was told, so a
hang inside a sub-mesh would outlive the allocation's patience; they are set one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from air_hpc.errors import BadInput, EnvironmentFailure, Problem, raise_if_any
from air_hpc.plan.types import MESH_AXES, Mesh

_NOT_YET = ("pp", "cp", "tp", "ep")


class RanksMissing(EnvironmentFailure):
    """The ranks did not come together: one was lost or late, or its port was taken meanwhile.

    Another start may find them all.
    """


@dataclass(frozen=True)
class World:
    """Where this worker stands.

    `mesh` has all of MESH_AXES by name. `control` is a gloo group of all ranks for objects and
    checkpoints, apart from the training's collectives, safe to use from another thread.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    degrees: Mesh
    mesh: DeviceMesh
    control: ProcessGroup
    timeout_s: float

    @property
    def data_rank(self) -> int:
        """Which of the `data_ranks` parts of a global batch is this worker's."""
        replicate = self.mesh.get_local_rank("dp_replicate")
        return replicate * self.degrees.dp_shard + self.mesh.get_local_rank("dp_shard")

    @property
    def data_ranks(self) -> int:
        """Into how many parts a global batch is divided."""
        return self.degrees.data_parallel_size


def require_supported(degrees: Mesh) -> None:
    """Raise BadInput naming every degree that this engine cannot do."""
    raise_if_any(
        Problem(
            f"parallelism.{axis}",
            str(getattr(degrees, axis)),
            "the native engine spreads over data-parallel ranks only",
            allowed="1",
        )
        for axis in _NOT_YET
        if getattr(degrees, axis) != 1
    )


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
    degrees that this engine cannot do or that do not multiply to the world.
    """
    require_supported(degrees)
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
    return World(rank, local_rank, world_size, device, degrees, mesh, control, timeout_s)


def backend_for(device: torch.device, *, cpu_offload: bool) -> str:
    """The collective backends; offloaded gradients are reduced on the host, so gloo joins NCCL."""
    if device.type == "cpu":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if cpu_offload else "nccl"


def build_mesh(degrees: Mesh, device_type: str, timeout: timedelta) -> DeviceMesh:
    """The mesh with every axis of MESH_AXES named (size 1 included), its groups under `timeout`."""
    sizes = tuple(getattr(degrees, axis) for axis in MESH_AXES)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=MESH_AXES)
    for group in mesh.get_all_groups():
        _set_pg_timeout(timeout, group)
    return mesh


def stop_world() -> None:
    """Leave the process group; does nothing where there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()
