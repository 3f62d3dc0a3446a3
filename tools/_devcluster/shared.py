"""What all clusters of this machine share: munged, and the port numbers.

It stands in /run/air_hpc-devcluster under file locks, so that clusters may come and go at once.
"""

import contextlib
import fcntl
import hashlib
import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import DevclusterError
from .state import State

SHARED = Path("/run/air_hpc-devcluster")
FIRST_PORT = 10_000


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


@dataclass(frozen=True)
class Claim:
    """What one cluster uses of the machine."""

    first_port: int = 0
    ports: int = 0
    munge: bool = False


def read_claims() -> dict[str, Claim]:
    """The claims of all clusters, by state folder; those whose folder is gone are left out."""
    try:
        content = json.loads((SHARED / "claims.json").read_text())
        claims = {folder: Claim(**claim) for folder, claim in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return {folder: c for folder, c in claims.items() if State(Path(folder)).marker.exists()}


def write_claims(claims: dict[str, Claim]) -> None:
    """Replace the claims (under `locked("claims")`)."""
    aside = SHARED / "claims.json.new"
    aside.write_text(json.dumps({k: asdict(v) for k, v in claims.items()}, indent=1) + "\n")
    aside.replace(SHARED / "claims.json")


def claim_ports(state: State, count: int) -> int:
    """The first of `count` port numbers in a row that are free now and no other cluster's.

    They are below the range that the kernel hands out by itself, so no client's socket can take
    the port of a node that is down for a while.
    """
    with locked("claims"):
        claims = read_claims()
        taken: set[int] = set()
        for key, claim in claims.items():
            if key != str(state.root):
                taken.update(range(claim.first_port, claim.first_port + claim.ports))
        first = find_ports(count, taken)
        claims[str(state.root)] = Claim(first, count)
        write_claims(claims)
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
