"""Which processes are a cluster's: its daemons, its job steps, and what the steps started."""

import subprocess
from collections.abc import Iterable

from .install import Install
from .processes import Process, Table, process_table, with_descendants
from .state import State

SERVERS = ("slurmctld", "slurmdbd", "mariadbd")


def start_daemon(
    install: Install, state: State, program: str, options: list[str], environment: dict[str, str]
) -> None:
    """Start a daemon in a session of its own, with no file of ours but a log open."""
    with (state.folder("log") / f"{program}.out").open("ab") as log:
        subprocess.Popen(
            install.command(program, *options),
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def servers(table: Table, state: State) -> dict[str, Process]:
    """This cluster's slurmctld, slurmdbd and mariadbd that run, by name.

    slurmctld and mariadbd have the folder in their arguments, slurmdbd finds its file by
    SLURM_CONF.
    """
    found = {}
    for process in table.values():
        if process.name in SERVERS and process.state not in "ZX":
            words = " ".join(process.command())
            conf = process.environment().get("SLURM_CONF")
            if f"{state.root}/" in words or conf == str(state.slurm_conf):
                found[process.name] = process
    return found


def slurmds(table: Table, state: State) -> dict[str, Process]:
    """This cluster's slurmd that run, by node: `slurmd -f CONF -N NODE`."""
    found = {}
    for process in table.values():
        if process.name == "slurmd" and process.state not in "ZX":
            words = process.command()
            if str(state.slurm_conf) in words and "-N" in words[:-1]:
                found[words[words.index("-N") + 1]] = process
    return found


def stepds(table: Table, state: State) -> dict[Process, str]:
    """This cluster's slurmstepd that run, each with its node.

    A slurmstepd rewrites its title and leaves slurmd's tree, but it keeps its node's log open.
    """
    head = f"{state.folder('log')}/slurmd."
    found = {}
    for process in table.values():
        if process.name == "slurmstepd" and process.state not in "ZX":
            for path in process.open_files():
                if path.startswith(head):
                    found[process] = path.removeprefix(head).split(".log")[0]
                    break
    return found


def task_node(process: Process, state: State) -> str:
    """The node of this cluster that the process is a task of; empty if it is none.

    slurmd puts both words into the environment of every batch script and task.
    """
    environment = process.environment()
    mine = environment.get("SLURM_CONF") == str(state.slurm_conf)
    return environment.get("SLURMD_NODENAME", "") if mine else ""


def tasks(table: Table, state: State) -> dict[Process, str]:
    """What this cluster's jobs started and what kept its environment, each with its node."""
    found = {process: task_node(process, state) for process in table.values()}
    return {process: node for process, node in found.items() if node}


def of_nodes(table: Table, state: State, nodes: Iterable[str]) -> set[Process]:
    """All that runs on `nodes`: slurmd, slurmstepd, every task and every child of theirs."""
    wanted = set(nodes)
    roots = [process for node, process in slurmds(table, state).items() if node in wanted]
    roots += [process for process, node in stepds(table, state).items() if node in wanted]
    roots += [process for process, node in tasks(table, state).items() if node in wanted]
    return with_descendants(table, roots)


def of_cluster(table: Table, state: State) -> set[Process]:
    """All that runs of this cluster: its servers and all of all its nodes."""
    roots = [
        *servers(table, state).values(),
        *slurmds(table, state).values(),
        *stepds(table, state),
        *tasks(table, state),
        *state.recorded(),
    ]
    return with_descendants(table, roots)


def record_daemons(state: State, names: Iterable[str]) -> None:
    """Record this cluster's servers and slurmd of these names, by pid and start time."""
    table = process_table()
    found = servers(table, state) | slurmds(table, state)
    for name in names:
        if name in found:
            state.record(name, found[name])
