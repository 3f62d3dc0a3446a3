"""How long a collective takes on a two-level network: a fast link inside a domain, a slow one out.

Promises: seconds for one collective of one group of ranks, when every group of its kind runs at the
same time. Pure arithmetic; the figures are an accelerator's (`links_of`).

How it works: a ring. With n ranks and a whole of S bytes, an all-gather or a reduce-scatter moves
S·(n-1)/n through every rank, an all-reduce twice that, and each of the n-1 (or 2(n-1)) steps costs
the latency of its hop. A group that lies in one domain moves at the fast link's rate. One that
spans domains has as many rings as it has ranks in each domain, and each ring leaves the domain on
its own device's share of the network, so the whole moves at the smaller of the fast link and
(ranks in a domain) x (a device's share). What is known of rings: NCCL, src/graph/tuning.cc.

What may go wrong: rates are the datasheet's, and what collectives reach of them is the caller's
(`plan.step_time` fits it). Congestion, oversubscribed switches and trees are not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from air_hpc.hardware.accelerator import AcceleratorSpec

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p"]
Level = Literal["scale_up", "scale_out"]


@dataclass(frozen=True)
class Links:
    """The links of a cluster of one device model. None: not known.

    `domain` ranks share the fast link. Rates are those of one device, in one direction.
    """

    domain: int
    scale_up_bytes_per_s: float | None
    scale_up_latency_s: float
    scale_out_bytes_per_s: float | None
    scale_out_latency_s: float


@dataclass(frozen=True)
class Group:
    """A group of ranks: `size` of them, `stride` ranks apart (a mesh axis among inner ones)."""

    size: int
    stride: int = 1

    def per_domain(self, domain: int) -> int:
        """How many of its ranks lie in one domain; 1 at the least."""
        return max(1, min(self.size, domain // self.stride))

    def level(self, domain: int) -> Level:
        """Whether it stays inside a domain."""
        return "scale_up" if self.per_domain(domain) >= self.size else "scale_out"


def links_of(accelerator: AcceleratorSpec, devices_per_node: int) -> Links:
    """The links of nodes of `devices_per_node`; a domain is a node where no other is known.

    A domain smaller than a node (a bridge of two cards) counts as it is.
    """
    return Links(
        domain=accelerator.scale_up_devices or devices_per_node,
        scale_up_bytes_per_s=accelerator.scale_up_bytes_per_s,
        scale_up_latency_s=accelerator.scale_up_latency_s or 0.0,
        scale_out_bytes_per_s=accelerator.scale_out_bytes_per_s,
        scale_out_latency_s=accelerator.scale_out_latency_s or 0.0,
    )


def bytes_per_s(group: Group, links: Links) -> float | None:
    """The rate at which each rank of a group gets and gives, None where a link is not known."""
    up = links.scale_up_bytes_per_s
    inside = group.per_domain(links.domain)
    if inside >= group.size:
        return up
    if links.scale_out_bytes_per_s is None or (inside > 1 and up is None):
        return None
    out = inside * links.scale_out_bytes_per_s
    return min(out, up) if up is not None and inside > 1 else out


def moved(collective: Collective, group: Group, whole_bytes: float) -> float:
    """Bytes that each rank gets (and gives) of a whole of `whole_bytes`.

    The whole of an all-gather is its result, of a reduce-scatter its input, of an all-reduce the
    tensor, of an all-to-all what one rank gives, of p2p the message.
    """
    if group.size == 1:
        return 0.0
    if collective == "p2p":
        return whole_bytes
    share = whole_bytes * (group.size - 1) / group.size
    return 2 * share if collective == "all_reduce" else share


def latency_s(collective: Collective, group: Group, links: Links) -> float:
    """What the steps of a collective cost whatever its size: a ring's hops, one for p2p."""
    if group.size == 1:
        return 0.0
    inside = group.per_domain(links.domain)
    domains = -(-group.size // inside)
    if collective in ("p2p", "all_to_all"):
        return links.scale_out_latency_s if domains > 1 else links.scale_up_latency_s
    out = domains - 1
    once = (group.size - 1 - out) * links.scale_up_latency_s + out * links.scale_out_latency_s
    return 2 * once if collective == "all_reduce" else once


def collective_s(
    collective: Collective,
    group: Group,
    whole_bytes: float,
    links: Links,
    *,
    share: float = 1.0,
) -> float | None:
    """Seconds of one collective, None where a link that it needs is not known.

    `share` is the part of a link's rate that collectives reach.
    """
    if group.size == 1 or whole_bytes == 0:
        return 0.0
    if collective == "all_to_all":
        return _all_to_all_s(group, whole_bytes, links, share)
    rate = bytes_per_s(group, links)
    if rate is None:
        return None
    return latency_s(collective, group, links) + moved(collective, group, whole_bytes) / (
        share * rate
    )


def _all_to_all_s(group: Group, whole_bytes: float, links: Links, share: float) -> float | None:
    """Both links at once: what stays inside on one, what leaves on the device's own share."""
    inside = group.per_domain(links.domain)
    times = [0.0]
    for peers, rate in (
        (inside - 1, links.scale_up_bytes_per_s),
        (group.size - inside, links.scale_out_bytes_per_s),
    ):
        if peers:
            if rate is None:
                return None
            times.append(whole_bytes * peers / group.size / (share * rate))
    return latency_s("all_to_all", group, links) + max(times)
