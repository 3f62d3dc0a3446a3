"""Whether the nodes of an allocation are fit to train on, from what their checks said. Pure.

A check speaks against its node when it failed, with one exception: what is the same for all nodes
(the shared file system full, or hanging everywhere) is nobody's own fault, and excluding nodes for
it would help nobody. A check that could not be told speaks against nobody.

Checks come as messages carry them (`probes.result.Check.to_json`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

COMMON = frozenset({"run_dir_space"})
"""Checks of what all nodes share: never evidence against one of them."""
SHARED = frozenset({"run_dir_write", "clock"})
"""Checks of one node's way to what all share: evidence, unless more than half of the nodes fail."""

Checks = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class NodeWord:
    """What a node said of itself.

    `clock_offset_s` is the node's wall clock when it spoke less the coordinator's when it heard.
    It is not taken from a hello, which may have waited long for a coordinator that was not there.
    """

    checks: tuple[Mapping[str, Any], ...] = ()
    devices: tuple[Mapping[str, Any], ...] = ()
    clock_offset_s: float | None = None

    @classmethod
    def from_hello(cls, hello: Mapping[str, Any]) -> NodeWord:
        """Of a hello message."""
        facts = hello.get("facts", {})
        return cls(tuple(facts.get("preflight", ())), tuple(hello.get("devices", ())))


@dataclass(frozen=True)
class Fitness:
    """`unfit` has the reason for each node that must not train, `notes` what only is to be said."""

    unfit: Mapping[str, str]
    notes: tuple[str, ...] = ()


def unfit(checks: Checks) -> str | None:
    """Why a node with these checks must not train, in one line; None where nothing is against it.

    Every failed check is named.
    """
    return _reason(checks, COMMON)


def compare(words: Mapping[str, NodeWord], max_clock_skew_s: float | None) -> dict[str, str]:
    """What only the nodes' words together show, by node: a clock that is off, a device twice.

    With three nodes or more a clock is held against their median, with two against the
    coordinator's. Of two nodes that name the same device the later by name is at fault.
    """
    found = _odd_clocks(words, max_clock_skew_s)
    owners: dict[str, str] = {}
    for node in sorted(words):
        for device in words[node].devices:
            uuid = device.get("uuid")
            if uuid is None:
                continue
            owner = owners.setdefault(uuid, node)
            if owner != node:
                found.setdefault(node, f"device {uuid} is bound on {owner} too")
    return found


def judge(words: Mapping[str, NodeWord], max_clock_skew_s: float | None) -> Fitness:
    """Which of these nodes must not train, and what is worth a line.

    `unfit` and `compare` together; what more than half of the nodes fail of what they share is
    noted, and held against none of them.
    """
    notes: list[str] = []
    common = set(COMMON)
    for name in sorted(COMMON | SHARED):
        failing = [node for node, word in words.items() if name in _failed(word.checks)]
        if failing and (name in COMMON or 2 * len(failing) > len(words) > 1):
            common.add(name)
            said = _failed(words[failing[0]].checks)[name]
            notes.append(f"{name} fails on {len(failing)} of {len(words)} nodes: {said}")
    reasons = compare(words, max_clock_skew_s)
    for node, word in words.items():
        reason = _reason(word.checks, common)
        if reason is not None:
            reasons[node] = reason
    versions: dict[str, list[str]] = {}
    for node, word in sorted(words.items()):
        for check in word.checks:
            if check["name"] == "driver" and check.get("value") is not None:
                versions.setdefault(str(check["value"]), []).append(node)
    if len(versions) > 1:
        told = "; ".join(f"{v} on {', '.join(nodes[:4])}" for v, nodes in sorted(versions.items()))
        notes.append(f"the nodes' drivers differ: {told}")
    return Fitness(dict(sorted(reasons.items())), tuple(notes))


def _failed(checks: Checks) -> dict[str, str]:
    return {c["name"]: str(c.get("said", "")) for c in checks if c.get("ok") is False}


def _reason(checks: Checks, passed_over: Iterable[str]) -> str | None:
    failed = {name: said for name, said in _failed(checks).items() if name not in passed_over}
    return "; ".join(f"{name}: {said}" for name, said in failed.items()) or None


def _odd_clocks(words: Mapping[str, NodeWord], limit_s: float | None) -> dict[str, str]:
    offsets = {n: w.clock_offset_s for n, w in words.items() if w.clock_offset_s is not None}
    if limit_s is None or not offsets:
        return {}
    several = len(offsets) > 2
    middle = median(offsets.values()) if several else 0.0
    among = f"the median of {len(offsets)} nodes" if several else "the coordinator's"
    return {
        node: f"clock: {abs(offset - middle):.1f} s {'ahead of' if offset > middle else 'behind'} "
        f"{among}, at most {limit_s:g} s are allowed"
        for node, offset in offsets.items()
        if abs(offset - middle) > limit_s
    }
