"""Slurm's hostlists (`n[1-4,7]`), by ClusterShell's NodeSet, without its group look-ups."""

from __future__ import annotations

from collections.abc import Iterable

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from air_hpc.errors import EnvironmentFailure

_NONE = {"", "(null)", "None", "N/A", "None assigned"}


def expand(hostlist: str) -> tuple[str, ...]:
    """The node names of a hostlist in NodeSet's order; raises EnvironmentFailure if malformed."""
    if hostlist.strip() in _NONE:
        return ()
    try:
        return tuple(NodeSet(hostlist, resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise EnvironmentFailure(f"not a hostlist: {hostlist!r} ({error})") from None


def fold(nodes: Iterable[str]) -> str:
    """The shortest hostlist of these nodes; the empty text for none."""
    names = list(nodes)
    if not names:
        return ""
    return str(NodeSet.fromlist(names, resolver=RESOLVER_NOGROUP))
