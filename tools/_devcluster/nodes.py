"""The nodes of a cluster: start their slurmd, ask for their states, wait for them."""

import os
import subprocess
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from .daemons import record_daemons
from .errors import BadArguments, DevclusterError
from .install import Install
from .spec import ClusterSpec, expand_nodes
from .state import State

START_TIMEOUT_S = 60
READY_STATES = ("idle", "mixed", "allocated")


def start_slurmds(install: Install, state: State, names: Iterable[str]) -> None:
    """Start the slurmd of each node, some at once; each returns when it is a daemon."""
    names = list(names)
    environment = install.environment(str(state.slurm_conf))

    def start(name: str) -> str:
        """The node's name if its slurmd did not start."""
        argv = install.command("slurmd", "-f", str(state.slurm_conf), "-N", name)
        try:
            done = subprocess.run(
                argv,
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                timeout=START_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return name
        return name if done.returncode else ""

    with ThreadPoolExecutor(max_workers=2 * (os.cpu_count() or 1)) as pool:
        failed = [name for name in pool.map(start, names) if name]
    record_daemons(state, names)
    if failed:
        raise DevclusterError(
            f"{len(failed)} slurmd did not start: {', '.join(failed[:10])}; the last lines of "
            f"{failed[0]}'s log:\n{_log_tail(state, failed[0])}"
        )


def node_states(install: Install, state: State) -> dict[str, str]:
    """Each node's state in sinfo's long form: idle, allocated*, draining, down* ..."""
    text = install.run("sinfo", "-h", "-N", "-o", "%N %T", slurm_conf=str(state.slurm_conf))
    return dict(line.split() for line in text.splitlines() if line.strip())


def wait_for_nodes(install: Install, state: State, names: Iterable[str], deadline: float) -> None:
    """Return when every node takes jobs (or has got one already); else name those that do not."""
    wanted = list(names)
    while True:
        states = node_states(install, state)
        late = [name for name in wanted if states.get(name) not in READY_STATES]
        if not late:
            return
        if time.monotonic() > deadline:
            raise DevclusterError(
                f"{len(late)} of {len(wanted)} nodes did not register in time: "
                + ", ".join(f"{name} ({states.get(name, 'unknown')})" for name in late[:20])
                + f"; the last lines of {late[0]}'s log:\n{_log_tail(state, late[0])}"
            )
        time.sleep(0.2)


def _log_tail(state: State, node: str) -> str:
    try:
        text = (state.folder("log") / f"slurmd.{node}.log").read_text(errors="replace")
    except OSError:
        return "(no log)"
    return "\n".join(text.splitlines()[-5:])


def known_nodes(spec: ClusterSpec, words: Iterable[str]) -> list[str]:
    """The nodes that `words` (n3, n[1-4] ...) name; DevclusterError lists unknown ones."""
    names, problems = [], []
    for word in words:
        try:
            names += expand_nodes(word)
        except BadArguments as error:
            problems.append(str(error))
    known = set(spec.node_names())
    problems += [
        f"{name}: no such node, they are n1 to n{spec.nodes}" for name in names if name not in known
    ]
    if problems:
        raise BadArguments("\n".join(problems))
    return list(dict.fromkeys(names))
