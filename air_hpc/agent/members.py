"""The members of an attempt, and whether they can train together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any


@dataclass
class Member:
    """One node that said hello. `heard` is the coordinator's clock at its last message."""

    node: str
    index: int
    boot_id: str
    address: str
    ports: tuple[int, ...]
    devices: tuple[Mapping[str, Any], ...]
    heard: float
    done_step: int = -1
    phases: tuple[str, ...] = ()
    arrived: bool = False
    """Whether it has beaten since it was welcomed."""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_hello(cls, node: str, message: Mapping[str, Any], now: float) -> Member:
        """The member behind a hello message."""
        return cls(
            node=node,
            index=int(message["index"]),
            boot_id=str(message["boot_id"]),
            address=str(message["address"]),
            ports=tuple(message["ports"]),
            devices=tuple(message["devices"]),
            heard=now,
            facts=message.get("facts", {}),
        )


def problems_of(
    members: Sequence[Member], devices_per_node: int, *, allow_mixed: bool
) -> list[str]:
    """Everything that keeps these nodes from training together, in words; empty if nothing does."""
    found = []
    for member in members:
        if len(member.devices) < devices_per_node:
            found.append(
                f"{member.node} has {len(member.devices)} devices bound to the job, "
                f"launch.devices_per_node asks for {devices_per_node} (accelerator=cpu needs none)"
            )
    kinds = _kinds(members)
    if len(kinds) > 1 and not allow_mixed:
        described = "; ".join(f"{kind} on {', '.join(nodes)}" for kind, nodes in kinds.items())
        found.append(
            f"the allocation mixes devices ({described}): add a launch.constraint, "
            "or set cluster.allow_mixed_devices=true"
        )
    if len({member.boot_id for member in members}) > 1:
        loopback = [m.node for m in members if ip_address(m.address).is_loopback]
        if loopback:
            found.append(
                f"{', '.join(loopback)} would be reached over a loopback address by other "
                "machines: set cluster.network_interface"
            )
    return found


def _kinds(members: Iterable[Member]) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for member in members:
        for device in member.devices:
            memory = device.get("memory_bytes")
            size = "" if memory is None else f" {int(memory) / 2**30:.0f} GiB"
            nodes = kinds.setdefault(f"{device['model']}{size}", [])
            if member.node not in nodes:
                nodes.append(member.node)
    return kinds
