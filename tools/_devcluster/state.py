"""The folder a cluster lives in, and what all clusters of this machine share.

A state folder is made by `up` and emptied by `down`; only names that `up` makes are ever removed,
and only where the marker `cluster.json` says that it is a cluster's. What is shared (munged, the
port numbers) stands in /run/air_hpc-devcluster under a file lock.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import BadArguments, DevclusterError
from .processes import Process, read_process

SHARED = Path("/run/air_hpc-devcluster")
FIRST_PORT = 10_000
# The longest socket below it is /spool/n1024/n1024_4294967295.4294967295 (46 characters), and
# a socket's path has room for 107 (unix(7)).
MAX_STATE_PATH = 60
FOLDERS = ("etc", "log", "run", "spool", "ctld", "devices", "mysql")


def default_state() -> str:
    """The state folder used when none is named."""
    return os.environ.get("AIR_HPC_DEVCLUSTER") or f"/tmp/air_hpc-devcluster-{os.getuid()}"


@dataclass(frozen=True)
class State:
    """One cluster's folder."""

    root: Path

    @property
    def slurm_conf(self) -> Path:
        """The file that SLURM_CONF names."""
        return self.root / "etc" / "slurm.conf"

    @property
    def marker(self) -> Path:
        """The file that makes the folder a cluster's; holds what was asked for."""
        return self.root / "cluster.json"

    def folder(self, name: str) -> Path:
        """One of FOLDERS."""
        return self.root / name

    def create(self) -> None:
        """Make an empty cluster folder; refuse one that holds something else."""
        if self.root.exists() and not self.marker.exists() and any(self.root.iterdir()):
            raise DevclusterError(
                f"{self.root} is not empty and no cluster of devcluster's: name another --state"
            )
        self.clear()
        self.root.mkdir(parents=True, exist_ok=True, mode=0o755)
        if self.root.stat().st_uid != os.geteuid():
            raise DevclusterError(f"{self.root} belongs to another user: name another --state")
        self.root.chmod(0o755)
        self.marker.write_text("{}\n")
        for name in FOLDERS:
            self.folder(name).mkdir(mode=0o755)
            self.folder(name).chmod(0o755)

    def clear(self, keep_logs: bool = False) -> None:
        """Remove what `create` and the daemons made; nothing else."""
        if not self.marker.exists():
            return
        for name in FOLDERS:
            if not (keep_logs and name == "log"):
                shutil.rmtree(self.folder(name), ignore_errors=True)
        if keep_logs:
            return
        (self.root / "daemons.jsonl").unlink(missing_ok=True)
        self.marker.unlink()
        with contextlib.suppress(OSError):  # not empty: what is left is not ours
            self.root.rmdir()

    def read(self) -> dict[str, object]:
        """What `up` wrote into the marker; empty where there is no cluster."""
        try:
            content = json.loads(self.marker.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise DevclusterError(f"{self.marker} is not readable: {error}") from None
        return content if isinstance(content, dict) else {}

    def write(self, content: dict[str, object]) -> None:
        """Replace the marker's content, whole or not at all."""
        aside = self.marker.with_suffix(".new")
        aside.write_text(json.dumps(content, indent=1) + "\n")
        aside.replace(self.marker)

    def record(self, role: str, process: Process) -> None:
        """Remember a daemon that was started, by pid and start time."""
        line = json.dumps({"role": role, "pid": process.pid, "start": process.start})
        with (self.root / "daemons.jsonl").open("a") as file:
            file.write(line + "\n")

    def recorded(self) -> dict[str, list[Process]]:
        """The remembered daemons that still run, by role."""
        found: dict[str, list[Process]] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self.root / "daemons.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    entry = json.loads(line)
                    process = read_process(entry["pid"])
                    if process and process.start == entry["start"] and process.alive():
                        found.setdefault(entry["role"], []).append(process)
        return found


def open_state(text: str) -> State:
    """The state folder called `text`; BadArguments where Slurm could not use such a path."""
    root = Path(os.path.realpath(os.path.abspath(os.path.expanduser(text))))
    problems = []
    if not re.fullmatch(r"[A-Za-z0-9_./+-]+", str(root)):
        problems.append("only letters, digits and _ . / + - may be in its path (slurm.conf)")
    if len(str(root)) > MAX_STATE_PATH:
        problems.append(
            f"its path has {len(str(root))} characters, at most {MAX_STATE_PATH} leave room "
            "for the names of Slurm's sockets"
        )
    if root.exists() and not root.is_dir():
        problems.append("it is no folder")
    if root == Path("/"):
        problems.append("it is the root folder")
    if problems:
        raise BadArguments("\n".join(f"--state {root}: {problem}" for problem in problems))
    return State(root)


def check_reachable(state: State) -> None:
    """Raise BadArguments where other users could not reach the state folder."""
    for parent in state.root.parents:
        if parent.exists() and not parent.stat().st_mode & 0o001:
            raise BadArguments(
                f"--state {state.root}: other users cannot pass {parent} (mode "
                f"{parent.stat().st_mode & 0o777:o}), so no ordinary user could read slurm.conf; "
                f"chmod o+x {parent}, or name a folder below /tmp"
            )


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold one of the machine's devcluster locks; waits for the holder."""
    SHARED.mkdir(mode=0o755, exist_ok=True)
    with (SHARED / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def cluster_lock(state: State) -> Iterator[None]:
    """One `up`, `down` or `revive-node` at a time for a cluster."""
    with locked("cluster-" + hashlib.sha256(str(state.root).encode()).hexdigest()[:16]):
        yield


def read_shared() -> dict[str, dict[str, object]]:
    """The claims of all clusters, by state folder; those whose folder is gone are left out."""
    try:
        content = json.loads((SHARED / "claims.json").read_text())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in content.items() if State(Path(k)).marker.exists()}


def write_shared(claims: dict[str, dict[str, object]]) -> None:
    """Replace the claims (under `locked("claims")`)."""
    aside = SHARED / "claims.json.new"
    aside.write_text(json.dumps(claims, indent=1) + "\n")
    aside.replace(SHARED / "claims.json")


def claim_ports(state: State, count: int) -> int:
    """The first of `count` port numbers in a row that are free now and no other cluster's.

    They are below the range that the kernel hands out by itself, so no client's socket can take
    the port of a node that is down for a while.
    """
    with locked("claims"):
        claims = read_shared()
        taken: set[int] = set()
        for key, claim in claims.items():
            first, length = claim.get("ports", (0, 0))  # type: ignore[misc]
            if key != str(state.root):
                taken.update(range(first, first + length))
        first = find_ports(count, taken)
        claims[str(state.root)] = {"ports": (first, count)}
        write_shared(claims)
    return first


def find_ports(count: int, taken: set[int]) -> int:
    """The lowest block of `count` bindable ports outside `taken` and the ephemeral range."""
    low, high = _ephemeral_range()
    run = 0
    for port in range(FIRST_PORT, 65_536):
        usable = not low <= port <= high and port not in taken and _can_bind(port)
        run = run + 1 if usable else 0
        if run == count:
            return port - count + 1
    raise DevclusterError(
        f"no {count} free ports in a row from {FIRST_PORT} on outside {low}-{high} "
        "(net.ipv4.ip_local_port_range): take fewer nodes, or end another cluster"
    )


def _ephemeral_range() -> tuple[int, int]:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32_768, 60_999


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
