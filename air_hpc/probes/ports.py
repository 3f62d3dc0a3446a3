"""A port for the workers' rendezvous.

It lies outside the range that the kernel hands to outgoing connections, where a port that was free
a moment ago may be taken by anyone's next connection, and it was bound once to be sure. Another
process may still take it before the workers do; their start then fails, and the next one is given
another port.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from air_hpc.errors import EnvironmentFailure

LOWEST, HIGHEST = 20_000, 60_999
_DEFAULT_EPHEMERAL = (32_768, 60_999)


def ephemeral_range(
    source: Path = Path("/proc/sys/net/ipv4/ip_local_port_range"),
) -> tuple[int, int]:
    """The first and last port the kernel uses for outgoing connections."""
    try:
        low, high = source.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return _DEFAULT_EPHEMERAL


def port_is_free(port: int, host: str = "") -> bool:
    """Whether a TCP listener can be bound to `port` now (on all addresses, without `host`)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # What torch's own listener sets: a port in TIME_WAIT is free for it.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def usable_ports(ephemeral: tuple[int, int] | None = None) -> list[int]:
    """The ports between LOWEST and HIGHEST that the kernel hands to nobody's connection."""
    low, high = ephemeral_range() if ephemeral is None else ephemeral
    # A kernel that uses them all leaves only what lies below, where few services listen.
    return [p for p in range(LOWEST, HIGHEST + 1) if not low <= p <= high] or list(
        range(10_000, LOWEST)
    )


def spread(seed: str, ports: Sequence[int], step: int = 7919) -> Iterator[int]:
    """All of `ports` once, from a place that `seed` gives: other seeds begin far apart."""
    first = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big") % len(ports)
    while len(ports) % step == 0:
        step += 2
    return (ports[(first + index * step) % len(ports)] for index in range(len(ports)))


def free_ports(
    count: int, seed: str, *, host: str = "", ephemeral: tuple[int, int] | None = None
) -> list[int]:
    """Ports that are free now, found on a walk that `seed` begins (so that jobs seldom meet).

    Raises EnvironmentFailure when fewer than `count` are.
    """
    ports = usable_ports(ephemeral)
    walk = (port for port in spread(seed, ports) if port_is_free(port, host))
    found = list(islice(walk, count))
    if len(found) < count:
        raise EnvironmentFailure(
            f"no {count} free TCP ports among {len(ports)} from {ports[0]} on this node",
            tried=f"binding on {host or 'all addresses'}",
            next_step="look at what listens on the node (ss -tln)",
        )
    return found
