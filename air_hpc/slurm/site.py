"""What a site's Slurm is, as types: partitions, nodes, configuration, associations and QOS.

Times are Slurm's minutes, memory is bytes. None: unlimited, or not known.
"""

from __future__ import annotations

from dataclasses import dataclass

from air_hpc.slurm.records import Gres
from air_hpc.slurm.version import SlurmVersion


@dataclass(frozen=True)
class Partition:
    """One partition. An empty `allow_*` means everybody."""

    name: str
    state: str = "UP"
    default: bool = False
    max_time_min: int | None = None
    default_time_min: int | None = None
    max_nodes: int | None = None
    min_nodes: int = 0
    total_nodes: int = 0
    allow_accounts: tuple[str, ...] = ()
    deny_accounts: tuple[str, ...] = ()
    allow_groups: tuple[str, ...] = ()
    allow_qos: tuple[str, ...] = ()
    deny_qos: tuple[str, ...] = ()
    grace_time_s: int = 0
    preempt_mode: str = ""
    qos: str | None = None
    root_only: bool = False


@dataclass(frozen=True)
class Node:
    """One node. `states` are lower-case without Slurm's flag characters."""

    name: str
    states: tuple[str, ...] = ()
    cpus: int = 0
    memory_bytes: int = 0
    gres: tuple[Gres, ...] = ()
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()

    def devices(self, gres_type: str | None = None) -> int:
        """How many gpus (of a type) the node has."""
        return sum(
            gres.count
            for gres in self.gres
            if gres.name == "gpu" and (gres_type is None or gres.type == gres_type)
        )

    @property
    def usable(self) -> bool:
        """Whether the node takes part at all: not down, drained, failed or planned away."""
        return not {"down", "drain", "drained", "fail", "failing", "future"} & set(self.states)


@dataclass(frozen=True)
class SiteConfig:
    """What `scontrol show config` says that matters to a submission or a restart."""

    cluster_name: str
    version: SlurmVersion
    max_array_size: int = 1001
    max_array_tasks: int | None = None
    job_requeue: bool = True
    kill_wait_s: int = 30
    preempt_type: str = ""
    preempt_mode: str = ""
    accounting: bool = False
    accounting_enforce: tuple[str, ...] = ()
    scheduler_parameters: str = ""


@dataclass(frozen=True)
class Association:
    """One (account, partition) the user may charge, with the limits in force on it."""

    account: str
    partition: str | None = None
    qos: tuple[str, ...] = ()
    default_qos: str | None = None
    max_jobs: int | None = None
    max_submit_jobs: int | None = None
    max_wall_min: int | None = None
    grp_submit_jobs: int | None = None


@dataclass(frozen=True)
class Qos:
    """One QOS and the limits it puts on a user's jobs."""

    name: str
    max_wall_min: int | None = None
    max_jobs_per_user: int | None = None
    max_submit_jobs_per_user: int | None = None
    grp_submit_jobs: int | None = None
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """A site as one user sees it at one time (`taken_at`, seconds since the epoch).

    `associations` and `qos` are None where the site has no accounting or would not say.
    """

    taken_at: float
    user: str
    groups: tuple[str, ...]
    config: SiteConfig
    partitions: tuple[Partition, ...]
    nodes: tuple[Node, ...]
    associations: tuple[Association, ...] | None = None
    qos: tuple[Qos, ...] | None = None
    default_account: str | None = None

    def partition(self, name: str | None) -> Partition | None:
        """The partition of this name, or the default one for None; None where there is none."""
        for partition in self.partitions:
            if partition.name == name or (name is None and partition.default):
                return partition
        return None

    def nodes_of(self, partition: str) -> tuple[Node, ...]:
        """The nodes of a partition."""
        return tuple(node for node in self.nodes if partition in node.partitions)

    def named_qos(self, name: str | None) -> Qos | None:
        """The QOS of this name where it is known."""
        return next((qos for qos in self.qos or () if qos.name == name), None)
