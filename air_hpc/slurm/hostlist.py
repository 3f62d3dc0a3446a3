"""Slurm's hostlists (`n[1-4,7]`), by ClusterShell's NodeSet, without its group look-ups."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from air_hpc.errors import EnvironmentFailure

_NONE = {"", "(null)", "None", "N/A", "None assigned"}


def expand(hostlist: str) -> tuple[str, ...]:
    """The node names of a hostlist, in the order in which it names them.

    The order is Slurm's: SLURM_NODEID counts in it, also where prefixes are mixed (`b[1-2],a1`),
    which NodeSet would sort. Raises EnvironmentFailure if malformed.
    """
    if hostlist.strip() in _NONE:
        return ()
    try:
        return tuple(
            str(name)
            for group in _top_level_groups(hostlist)
            for name in NodeSet(group, resolver=RESOLVER_NOGROUP)
        )
    except NodeSetException as error:
        raise EnvironmentFailure(f"not a hostlist: {hostlist!r} ({error})") from None


def _top_level_groups(hostlist: str) -> list[str]:
    """`a[1,3],b2` is `a[1,3]` and `b2`: cut at the commas outside of brackets."""
    return [group for group in re.split(r",(?![^\[]*\])", hostlist) if group.strip()]


def fold(nodes: Iterable[str]) -> str:
    """The shortest hostlist of these nodes; the empty text for none."""
    names = list(nodes)
    if not names:
        return ""
    return str(NodeSet.fromlist(names, resolver=RESOLVER_NOGROUP))
