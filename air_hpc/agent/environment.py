"""Where this agent is: scheduler, node, job and addresses. Read once, from Slurm's word.

A node is its SLURMD_NODENAME and a machine is its boot id; hostnames and indices are never used,
since they need not differ.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal

import psutil

from air_hpc.errors import EnvironmentFailure
from air_hpc.slurm.hostlist import expand


@dataclass(frozen=True)
class JobContext:
    """One start of a job, seen from one node. Local runs have no job id and one node."""

    scheduler: Literal["slurm", "local"]
    node: str
    node_index: int
    nodes: tuple[str, ...]
    job_id: str | None
    array_job_id: str | None
    array_task_id: int | None
    restart_count: int
    launch_address: str | None

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the first node's agent."""
        return self.node_index == 0

    @property
    def requeue_id(self) -> str | None:
        """What `scontrol requeue` must be given: in an array always ARRAYJOB_TASK."""
        if self.array_job_id is not None and self.array_task_id is not None:
            return f"{self.array_job_id}_{self.array_task_id}"
        return self.job_id

    @property
    def start_id(self) -> str:
        """Tells this start of the job from every other one of the run."""
        return f"{self.job_id or 'local'}.{self.restart_count}"


def read_job_context(environ: Mapping[str, str]) -> JobContext:
    """The context from the environment; raises EnvironmentFailure where Slurm's word is partial."""
    if "SLURM_JOB_ID" not in environ:
        return JobContext("local", "local", 0, ("local",), None, None, None, 0, None)
    try:
        nodelist = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
        task = environ.get("SLURM_ARRAY_TASK_ID")
        return JobContext(
            scheduler="slurm",
            node=environ["SLURMD_NODENAME"],
            node_index=int(environ["SLURM_NODEID"]),
            nodes=tuple(expand(nodelist)),
            job_id=environ["SLURM_JOB_ID"],
            array_job_id=environ.get("SLURM_ARRAY_JOB_ID"),
            array_task_id=None if task is None else int(task),
            restart_count=int(environ.get("SLURM_RESTART_COUNT") or 0),
            launch_address=environ.get("SLURM_LAUNCH_NODE_IPADDR"),
        )
    except (KeyError, ValueError) as error:
        raise EnvironmentFailure(
            f"inside a Slurm job, but its environment lacks {error}",
            next_step="start the agent with srun, one task a node",
        ) from None


def coordinator_addresses(context: JobContext) -> list[str]:
    """Addresses to try for the first node, best first.

    Its name need not resolve, and may resolve to a loopback address (Debian maps a machine's own
    name to 127.0.1.1); srun's own address is the first node's in a batch job only.
    """
    if len(context.nodes) == 1:
        return ["127.0.0.1"]
    found = []
    with contextlib.suppress(OSError):
        found.append(socket.gethostbyname(context.nodes[0]))
    if context.launch_address and context.launch_address not in found:
        found.append(context.launch_address)
    found.sort(key=lambda address: ip_address(address).is_loopback)
    if not found:
        raise EnvironmentFailure(
            f"the first node {context.nodes[0]} has no address",
            tried=f"resolving {context.nodes[0]}, SLURM_LAUNCH_NODE_IPADDR",
            next_step="ask the site how nodes reach each other; set cluster.network_interface",
        )
    return found


def own_address(towards: str, interface: str | None) -> str:
    """This node's address: of the configured interface, else of the route to the coordinator."""
    if interface:
        for address in psutil.net_if_addrs().get(interface, []):
            if address.family == socket.AF_INET:
                return str(address.address)
        raise EnvironmentFailure(
            f"cluster.network_interface={interface} has no IPv4 address on this node",
            tried=f"interfaces here: {', '.join(sorted(psutil.net_if_addrs()))}",
            next_step="name one of them",
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
        except OSError as error:
            raise EnvironmentFailure(
                f"this node has no route to the first node ({error.strerror})",
                tried=towards,
                next_step="name the interface between the nodes in cluster.network_interface",
            ) from None
        return str(probe.getsockname()[0])


def thread_affinity(local_rank: int, workers: int) -> set[int] | None:
    """The CPUs of one worker: an equal piece of this node's, or None where there are too few."""
    cpus = sorted(os.sched_getaffinity(0))
    share = len(cpus) // workers
    if share == 0:
        return None
    return set(cpus[local_rank * share : (local_rank + 1) * share])
