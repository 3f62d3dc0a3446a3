"""Which rank sits where: one ordered list, from which every rank variable derives.

Nodes are taken in the order Slurm lists them (by name). Ranks fill a node before the next, so that
the innermost mesh axes stay inside one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlace:
    """Where one rank runs."""

    rank: int
    node: str
    node_rank: int
    local_rank: int


def assign_ranks(nodes: Sequence[str], devices_per_node: int) -> tuple[RankPlace, ...]:
    """A place for each rank; `nodes` in the order that decides NODE_RANK. Names are distinct."""
    if len(set(nodes)) != len(nodes):
        raise ValueError(f"a node is named twice: {sorted(nodes)}")
    return tuple(
        RankPlace(node_rank * devices_per_node + local_rank, node, node_rank, local_rank)
        for node_rank, node in enumerate(nodes)
        for local_rank in range(devices_per_node)
    )
