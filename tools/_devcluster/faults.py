"""A node's faults: death, isolation, drain; and its revival."""

import re
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from .daemons import of_nodes, slurmds, stepds, task_node
from .errors import DevclusterError
from .install import Install, require_root
from .nodes import node_states, start_slurmds, wait_for_nodes
from .processes import Process, Table, kill_all, process_table
from .report import require_cluster
from .shared import cluster_lock
from .state import State


def kill_nodes(state: State, nodes: Iterable[str]) -> int:
    """The nodes die: slurmd, slurmstepd, srun, the batch script and every task; how many."""
    names = set(nodes)
    return _kill(
        lambda table: of_nodes(table, state, names),
        lambda process: task_node(process, state) in names,
    )


def isolate_nodes(state: State, nodes: Iterable[str]) -> int:
    """Slurm loses the nodes, and their tasks live on: only slurmd and slurmstepd are killed."""
    names = set(nodes)

    def find(table: Table) -> list[Process]:
        daemons = [process for node, process in slurmds(table, state).items() if node in names]
        return daemons + [
            process for process, node in stepds(table, state).items() if node in names
        ]

    return _kill(find, lambda process: False)


def _kill(find: Callable[[Table], Iterable[Process]], spot: Callable[[Process], bool]) -> int:
    require_root()
    found, alive = kill_all(find, spot)
    if alive:
        raise DevclusterError(
            "still alive after SIGKILL: " + ", ".join(f"{p.pid} ({p.name})" for p in alive)
        )
    return len(found)


def revive_nodes(
    install: Install, state: State, nodes: Iterable[str], timeout_s: float, at_once: bool = False
) -> None:
    """Start the slurmd that are missing, take back a drain, and wait until the nodes take jobs.

    A dead node with a job on it comes back only after Slurm has taken the job off it, as a real
    one would: started sooner (`at_once`), its slurmd registers, Slurm never notices, and the job
    stays RUNNING with its tasks dead (seen on 22.05.8). And one that died so shortly ago that
    Slurm still calls it idle counts as back only when the new slurmd has registered.
    """
    require_root()
    require_cluster(state)
    names = list(nodes)
    deadline = time.monotonic() + timeout_s
    with cluster_lock(state):
        running = slurmds(process_table(), state)
        missing = [name for name in names if name not in running]
        if missing and not at_once:
            _wait_for_loss(install, state, missing, deadline)
        begun = datetime.now(UTC).replace(microsecond=0, tzinfo=None)
        start_slurmds(install, state, missing)
    while missing and (late := [n for n, t in _start_times(install, state, missing) if t < begun]):
        if time.monotonic() > deadline:
            raise DevclusterError(f"{', '.join(late[:20])} did not register in {timeout_s:g} s")
        time.sleep(0.1)
    while True:
        states = node_states(install, state)
        # A drained or failed node stays so when it registers; a down one comes back by itself.
        stuck = [name for name in names if states.get(name, "").startswith(("dr", "fail", "down"))]
        if stuck:
            _resume(install, state, stuck)
        try:
            return wait_for_nodes(install, state, names, min(deadline, time.monotonic() + 3))
        except DevclusterError:
            if time.monotonic() > deadline:
                raise


def _wait_for_loss(install: Install, state: State, names: list[str], deadline: float) -> None:
    while jobs := install.run(
        "squeue", "-h", "-t", "RUNNING,SUSPENDED", "-w", ",".join(names), "-o", "%i",
        slurm_conf=str(state.slurm_conf),
    ).split():  # fmt: skip
        if time.monotonic() > deadline:
            raise DevclusterError(
                f"Slurm still has running jobs on the dead nodes: {', '.join(jobs[:10])}"
            )
        time.sleep(0.2)


def _start_times(install: Install, state: State, names: list[str]) -> list[tuple[str, datetime]]:
    """When each node's slurmd started, in UTC, as slurmctld heard from it."""
    text = install.run("scontrol", "-o", "show", "node", ",".join(names),
                       slurm_conf=str(state.slurm_conf))  # fmt: skip
    found = re.findall(r"^NodeName=(\S+) .*?\bSlurmdStartTime=(\S+)", text, flags=re.MULTILINE)
    return [
        (name, datetime.fromisoformat(value) if value[:1].isdigit() else datetime.min)
        for name, value in found
    ]


def _resume(install: Install, state: State, names: list[str]) -> None:
    for name in names:
        try:
            install.run("scontrol", "update", f"nodename={name}", "state=resume",
                        slurm_conf=str(state.slurm_conf))  # fmt: skip
        except DevclusterError as error:
            if "Invalid node state" not in str(error):  # it came back by itself meanwhile
                raise


def drain_nodes(install: Install, state: State, nodes: Iterable[str]) -> None:
    """The nodes take no further job; running ones go on."""
    install.run("scontrol", "update", f"nodename={','.join(nodes)}", "state=drain",
                "reason=devcluster drain-node", slurm_conf=str(state.slurm_conf))  # fmt: skip
