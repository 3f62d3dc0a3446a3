"""A port for the workers' rendezvous.

It lies outside the range that the kernel hands to outgoing connections, where a port that was free
a moment ago may be taken by anyone's next connection, and it was bound once to be sure. Another
process may still take it before the workers do; their start then fails, and the next one is given
another port.
"""

from __future__ import annotations

import socket
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


def find_free_port(
    start: int, host: str = "", *, ephemeral: tuple[int, int] | None = None, tries: int = 200
) -> int:
    """The first free port of a walk that `start` (a job id, say) begins.

    Different starts begin far apart, so that jobs on one node seldom meet. Raises
    EnvironmentFailure when none of `tries` ports is free.
    """
    low, high = ephemeral_range() if ephemeral is None else ephemeral
    ports = [p for p in range(LOWEST, HIGHEST + 1) if not low <= p <= high]
    if not ports:  # the kernel uses them all: stay below, where few services listen
        ports = list(range(10_000, 20_000))
    first = (start * 7919) % len(ports)
    for offset in range(min(tries, len(ports))):
        port = ports[(first + offset) % len(ports)]
        if port_is_free(port, host):
            return port
    raise EnvironmentFailure(
        f"no free port among {min(tries, len(ports))} from {ports[first]}",
        tried=f"binding on {host or 'all addresses'}",
        next_step="look at what listens on the node (ss -tln)",
    )
