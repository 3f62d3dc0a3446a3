"""Start and end a cluster."""

import json
import os
import pwd
import socket
import stat
import sys
import time
from dataclasses import dataclass

from . import accounting, munge
from .configs import Ports, gres_conf, slurm_conf
from .daemons import of_cluster, record_daemons, servers, slurmds, start_daemon, task_node
from .errors import DevclusterError
from .install import ACCOUNTING, CORE, USERS, Install, require_root
from .nodes import start_slurmds, wait_for_nodes
from .processes import kill_all, process_table
from .shared import claim_ports, cluster_lock
from .spec import ClusterSpec
from .state import State, check_reachable

MEMORY_PER_SLURMD_BYTES = 3_500_000  # 1,024 slurmd held 3.4 GB


@dataclass(frozen=True)
class Started:
    """What `up` did."""

    spec: ClusterSpec
    already_up: bool
    seconds: float


def say(text: str) -> None:
    """Progress, for people: on stderr, so that stdout holds only what a shell evaluates."""
    print(f"devcluster: {text}", file=sys.stderr, flush=True)


def up(install: Install, spec: ClusterSpec, state: State, timeout_s: float) -> Started:
    """Have the cluster run with every node idle, or raise and leave nothing running."""
    require_root()
    install.require([*CORE, *USERS, *(ACCOUNTING if spec.accounting else ())])
    check_reachable(state)
    begun = time.monotonic()
    with cluster_lock(state):
        if runs_already(spec, state):
            return Started(spec, True, time.monotonic() - begun)
        end_leftovers(state)
        state.create()
        try:
            _start(install, spec, state, begun + timeout_s)
        except BaseException:
            say(f"up failed; ending what was started (the logs stay in {state.folder('log')})")
            _end(state)
            state.clear(keep_logs=True)
            raise
    return Started(spec, False, time.monotonic() - begun)


def runs_already(spec: ClusterSpec, state: State) -> bool:
    """Whether this very cluster runs; DevclusterError where another, or half of one, does."""
    if not state.marker.exists():
        return False
    table = process_table()
    nodes = slurmds(table, state)
    has_controller = "slurmctld" in servers(table, state)
    interrupted = not state.read().get("complete")  # we hold the lock: no other `up` goes on
    if interrupted or (not has_controller and not nodes):
        return False
    down = f"`devcluster down --state {state.root}`"
    if not has_controller:
        raise DevclusterError(
            f"the cluster in {state.root} has lost its slurmctld (its log: "
            f"{state.folder('log')}/slurmctld.log): do {down}, then `up` again"
        )
    content = state.read().get("spec")
    old = content if isinstance(content, dict) else {}
    new = json.loads(json.dumps(spec.to_json()))
    if different := [key for key in new if old.get(key) != new[key]]:
        changes = ", ".join(
            f"{key} is {_short(old.get(key))}, asked for {_short(new[key])}" for key in different
        )
        raise DevclusterError(
            f"a cluster of another shape runs in {state.root} ({changes}): do {down} first, or "
            "name another --state"
        )
    if dead := [name for name in spec.node_names() if name not in nodes]:
        say(f"{len(dead)} nodes have no slurmd: `devcluster revive-node {' '.join(dead[:8])}`")
    return True


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 40 else text[:36] + "..." + text[-1]


def end_leftovers(state: State) -> None:
    """End what an interrupted `up` or a lost slurmctld left."""
    if state.marker.exists():
        _end(state)


def _start(install: Install, spec: ClusterSpec, state: State, deadline: float) -> None:
    _warn_of_memory(spec)
    make_user(install, spec.user)
    ports = Ports(claim_ports(state, Ports.count(spec)))
    state.write({"spec": spec.to_json(), "first_port": ports.first})
    munge.ensure_munged(install, state)
    write_configs(install, spec, state, ports)
    if spec.accounting:
        say("starting mariadbd and slurmdbd")
        accounting.start_accounting(install, spec, state, ports)
    say(f"starting slurmctld and {spec.nodes} slurmd")
    environment = install.environment(str(state.slurm_conf))
    start_daemon(install, state, "slurmctld", ["-f", str(state.slurm_conf)], environment)
    wait_for_controller(install, state, deadline)
    record_daemons(state, ["slurmctld"])
    if spec.accounting:
        accounting.add_accounts(install, spec, state)
    start_slurmds(install, state, spec.node_names())
    wait_for_nodes(install, state, spec.node_names(), deadline)
    state.write({"spec": spec.to_json(), "first_port": ports.first, "complete": True})


def make_user(install: Install, name: str) -> None:
    """Make the ordinary user, with a home, if there is none of that name."""
    try:
        if pwd.getpwnam(name).pw_uid == 0:
            raise DevclusterError(f"the user {name} has uid 0: an ordinary user is needed")
    except KeyError:
        say(f"making the user {name}")
        install.run("useradd", "--create-home", "--shell", "/bin/bash", name)


def write_configs(install: Install, spec: ClusterSpec, state: State, ports: Ports) -> None:
    """All files of etc/, readable by everyone, and the fake GPUs."""
    hostname = socket.gethostname().split(".")[0]
    version = install.version()
    texts = {"slurm.conf": slurm_conf(spec, state, ports, hostname, version)}
    if spec.topology:
        texts["topology.conf"] = spec.topology
    if spec.devices_per_node:
        texts["gres.conf"] = gres_conf(spec, state)
    if version >= (23, 2):
        texts["cgroup.conf"] = "CgroupPlugin=disabled\n"
    for name, text in texts.items():
        path = state.folder("etc") / name
        path.write_text(text)
        path.chmod(0o644)
    for number in range(spec.devices_per_node):
        device = state.folder("devices") / f"nvidia{number}"
        try:
            os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))  # another /dev/null
        except PermissionError:
            raise DevclusterError(
                f"mknod {device} is not allowed here (a container without CAP_MKNOD?): "
                "use --devices-per-node 0"
            ) from None
        device.chmod(0o666)


def wait_for_controller(install: Install, state: State, deadline: float) -> None:
    """Return when slurmctld answers."""
    while True:
        try:
            install.run("scontrol", "ping", slurm_conf=str(state.slurm_conf), timeout_s=20)
            return
        except DevclusterError:
            log = state.folder("log")
            if time.monotonic() > deadline:
                raise DevclusterError(
                    f"slurmctld gives no answer: see {log}/slurmctld.log and {log}/slurmctld.out"
                ) from None
            if "slurmctld" not in servers(process_table(), state):
                time.sleep(1)  # between the fork of the daemon and the end of its parent
                if "slurmctld" not in servers(process_table(), state):
                    tail = "\n".join(
                        (log / name).read_text(errors="replace")[-1500:]
                        for name in ("slurmctld.out", "slurmctld.log")
                        if (log / name).exists()
                    )
                    raise DevclusterError(f"slurmctld ended at once; it said:\n{tail}") from None
            time.sleep(0.2)


def _warn_of_memory(spec: ClusterSpec) -> None:
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":", 1) for line in file)
    available = int(lines.get("MemAvailable", "0 kB").split()[0]) * 1024
    needed = spec.nodes * MEMORY_PER_SLURMD_BYTES
    if 0 < available < needed:
        say(
            f"{spec.nodes} slurmd hold about {needed / 1e9:.1f} GB, and {available / 1e9:.1f} GB "
            "of memory are available"
        )


def down(state: State, keep_logs: bool = False) -> int:
    """End the cluster and remove its files; the number of processes ended. Nothing runs: 0."""
    require_root()
    with cluster_lock(state):
        if not state.marker.exists():
            return 0
        ended = _end(state)
        state.clear(keep_logs)
    return ended


def _end(state: State) -> int:
    found, alive = kill_all(
        lambda table: of_cluster(table, state), lambda process: bool(task_node(process, state))
    )
    munge.release_munged(state)
    if alive:
        pids = ", ".join(f"{process.pid} ({process.name})" for process in alive)
        raise DevclusterError(f"still alive after SIGKILL: {pids}; nothing was removed")
    return len(found)
