"""The processes of a run, as /proc shows them: agents and workers by node, and all that is left."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from _devcluster.processes import Process, Table, process_table, with_descendants

LOCAL = ""
"""The node of a process that no Slurm started."""


@dataclass
class RunProcesses:
    """Who works for one run now, by node."""

    agents: dict[str, Process] = field(default_factory=dict)
    workers: dict[str, list[Process]] = field(default_factory=dict)

    def worker_nodes(self) -> list[str]:
        """The nodes that have workers, in the order of their names."""
        return sorted(node for node, found in self.workers.items() if found)


def node_of(process: Process) -> str:
    """The node that a task of a job runs on."""
    return process.environment().get("SLURMD_NODENAME", LOCAL)


def run_processes(run_dir: Path, table: Table | None = None) -> RunProcesses:
    """The agents and workers of a run.

    A worker that was forked keeps the command and the environment of its template, so workers are
    known by their place: children of the agent or of its template, in a session of their own.
    """
    table = process_table() if table is None else table
    children: dict[int, list[Process]] = {}
    for process in table.values():
        if process.state not in "ZX":
            children.setdefault(process.parent, []).append(process)
    found = RunProcesses()
    words = ["-m", "air_hpc.agent", str(run_dir)]
    kept = [process for process in table.values() if process.command()[1:4] == words]
    keepers = {process.parent for process in kept}
    for process in kept:
        if process.pid in keepers:
            continue  # the agent is its child
        node = node_of(process)
        found.agents[node] = process
        found.workers[node] = []
        for child in children.get(process.pid, []):
            command = child.command()
            if "air_hpc.session.template" in command:
                found.workers[node] += children.get(child.pid, [])
            elif "air_hpc.train" in command:
                found.workers[node].append(child)
        found.workers[node].sort(key=lambda worker: worker.pid)
    return found


def left_of(folder: Path) -> set[Process]:
    """Every process that names this folder in its command or environment, with its children."""
    table = process_table()
    word = str(folder)
    roots = [
        process
        for process in table.values()
        if process.state not in "ZX"
        and (
            any(word in argument for argument in process.command())
            or any(word in value for value in process.environment().values())
        )
    ]
    return with_descendants(table, roots)
