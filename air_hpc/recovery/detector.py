"""Which nodes are dead: silence raises the question, the node's own kernel answers it.

A node beats every `heartbeat_interval_s`. A beat that stays away has many harmless reasons: the
agent waits for a slow store, its core is starved, the network is slow for a moment. So silence
alone decides only after `patience_s`. Earlier there is a second witness: a TCP connect to a port
that the agent listens on, which the node's kernel answers even when the agent itself cannot.

    silent for `suspect_s` -> probe, and again every `probe_interval_s`:
      REFUSED    nobody listens: the agent's process is gone     lost, now
      SILENT     the machine answers nothing                     lost, when neither a beat nor an
                                                                 answer comes for `timeout_s`
      CONNECTED  the machine lives: starved, stopped or hung     lost after `patience_s` of silence
      UNKNOWN    the observer could not ask                      says nothing

One refusal is enough for a node that is silent for `suspect_s`; one that was looked at because
others suspect it (`suspect_all`) must refuse twice, `probe_timeout_s` apart: a beat would have come
in between. Any beat clears what was held against a node.

The probes are trusted only where they were seen to work: each node is probed once while it beats,
and where its port does not answer then (a firewall between the nodes, say) its later refusals and
silences prove nothing; it is lost after `patience_s` alone. `unproven` names those nodes.

What may go wrong. A stranger may listen on a dead agent's port: its CONNECTED buys `patience_s`,
never health. A machine that is cut off for nearly `timeout_s` and comes back was taken for dead:
nothing can tell it from one that is; its lease and the token keep it from doing harm. (An outage
that ends before the last probe, 4.2 s after the last beat by default, is survived.) The
observer itself may stall: it then reads what has arrived and calls `forgive` before `tick`.

Pure: the caller's clock (seconds, never backward) comes in with every call. `heard` is a store;
`tick` looks at the nodes whose next moment has come, not at all of them.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from air_hpc.config.spec import RecoverySpec

PROBES_IN_PATIENCE = 64
"""At most so many probes in `patience_s`: nobody takes them from the queue of a starved agent's
port, and the smallest limit that kernels put on it is 128 (net.core.somaxconn before Linux 5.4)."""
_MARGIN_S = 0.3
"""The probe whose silence decides ends this much before `timeout_s`: three ticks of an agent."""
_LOST_ANSWER = 3.0
"""A probe without an answer for so many of its own time-outs is taken for UNKNOWN."""
_RARELY_S = 60.0
"""Between the tries of a port that never answered."""

_GONE = "its agent is gone: nobody listens on its port"
_CUT_OFF = "neither its agent nor its machine answers"
_HELD = "its machine answers, its agent does not: starved, stopped or hung"
_UNTOLD = "its agent is not heard, and its port was never reached"


class Answer(StrEnum):
    """What a connect to an agent's port came to."""

    CONNECTED = "connected"
    REFUSED = "refused"
    SILENT = "silent"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class DetectorPolicy:
    """The times of the rules above, in seconds."""

    suspect_s: float = 1.5
    timeout_s: float = 5.0
    patience_s: float = 15.0
    probe_timeout_s: float = 0.5
    probe_interval_s: float = 1.0

    @classmethod
    def from_spec(cls, spec: RecoverySpec) -> Self:
        """Three beats missed, at least 1.5 s, raise the question; times that a config sets below
        that are kept to in proportion."""
        timeout_s = spec.heartbeat_timeout_s
        patience_s = max(spec.lease_s, timeout_s)
        return cls(
            suspect_s=min(max(3 * spec.heartbeat_interval_s, 1.5), timeout_s / 2),
            timeout_s=timeout_s,
            patience_s=patience_s,
            probe_timeout_s=min(0.5, timeout_s / 4),
            probe_interval_s=max(1.0, patience_s / PROBES_IN_PATIENCE),
        )


@dataclass(frozen=True)
class Probe:
    """Try the port of this node's agent, and tell `probed` what came of it."""

    node: str


@dataclass(frozen=True)
class Lost:
    """This node is lost, and no longer watched. `silent_s`: since its last beat."""

    node: str
    why: str
    silent_s: float

    @property
    def machine_is_gone(self) -> bool:
        """Whether the machine itself answers nothing, and not only the agent on it."""
        return self.why == _CUT_OFF


@dataclass
class _Node:
    """What is known of one node; times are the observer's, without its stalls."""

    name: str
    order: int
    heard: float
    due: float
    proven: bool = False
    """Its port answered once."""
    tries: int = 0
    """Of a port that never answered."""
    asked: bool = False
    """By `suspect_all`, until it beats again."""
    begun: float | None = None
    """When the newest probe began."""
    in_flight: bool = False
    connected: float = field(default=float("-inf"))
    refused: int = 0
    verdict: str | None = None
    """Set by an answer that decides."""

    def silent_s(self, now: float) -> float:
        return now - self.heard


class Detector:
    """Watches nodes; `tick` says which to probe and which are lost."""

    def __init__(self, policy: DetectorPolicy) -> None:
        self.policy = policy
        self._nodes: dict[str, _Node] = {}
        self._heap: list[tuple[float, int, _Node]] = []
        self._order = 0
        self._stalled_s = 0.0

    @property
    def watched(self) -> tuple[str, ...]:
        """The nodes that are watched, in the order they came."""
        return tuple(self._nodes)

    @property
    def unproven(self) -> tuple[str, ...]:
        """Nodes whose port was tried while they beat and never answered: found dead only after
        `patience_s`."""
        return tuple(n.name for n in self._nodes.values() if not n.proven and n.tries > 2)

    # -- what happened ---------------------------------------------------------------------------

    def watch(self, node: str, now: float) -> None:
        """Watch a node from now on; one that is watched already was heard."""
        if node in self._nodes:
            self.heard(node, now)
            return
        at = now - self._stalled_s
        self._order += 1
        found = _Node(node, self._order, heard=at, due=at)
        self._nodes[node] = found
        self._push(found, at)

    def forget(self, node: str) -> None:
        """Stop watching a node: it left, or is given up for another reason."""
        self._nodes.pop(node, None)

    def heard(self, node: str, now: float) -> None:
        """Any message of a node; of one that is not watched it is no news."""
        found = self._nodes.get(node)
        if found is not None:
            found.heard = now - self._stalled_s
            found.refused = 0
            found.asked = False
            found.verdict = None

    def probed(self, node: str, answer: Answer, now: float) -> None:
        """What a probe of `tick` came to."""
        found = self._nodes.get(node)
        if found is None or not found.in_flight:
            return
        at = now - self._stalled_s
        begun = found.begun if found.begun is not None else at
        found.in_flight = False
        if answer is Answer.CONNECTED:
            found.proven = True
            found.connected = at
            found.refused = 0
        elif found.proven and answer is Answer.REFUSED and begun >= found.heard:
            self._refused(found, at)
        elif found.proven and answer is Answer.SILENT:
            self._unanswered(found, begun)
        self._push(found, at)

    def suspect_all(self, now: float) -> None:
        """Something on the network broke: look at every node now, beating or not."""
        at = now - self._stalled_s
        for node in self._nodes.values():
            if not node.asked:
                node.asked = True
                self._push(node, at)

    def forgive(self, seconds: float, now: float) -> None:
        """The observer stood still for `seconds` until now: that is held against no node."""
        self._stalled_s += max(0.0, seconds)
        at = now - self._stalled_s
        for node in self._nodes.values():
            # What was read after the stall has been noted by the clock with the stall in it.
            node.heard = min(node.heard, at)
            node.connected = min(node.connected, at)
            node.begun = None if node.begun is None else min(node.begun, at)
            if node.due > at:
                self._push(node, at)

    # -- what follows ----------------------------------------------------------------------------

    def tick(self, now: float) -> list[Probe | Lost]:
        """What is to be done now, the nodes in the order of their moments."""
        at = now - self._stalled_s
        actions: list[Probe | Lost] = []
        heap = self._heap
        while heap and heap[0][0] <= at:
            due, _, node = heapq.heappop(heap)
            if due != node.due or self._nodes.get(node.name) is not node:
                continue  # looked at since, or no longer watched
            action = self._look(node, at)
            if action is not None:
                actions.append(action)
        return actions

    def _look(self, node: _Node, at: float) -> Probe | Lost | None:
        policy = self.policy
        silent_s = node.silent_s(at)
        if node.verdict is None and silent_s >= policy.patience_s:
            answered = node.connected > node.heard
            node.verdict = _HELD if answered else _UNTOLD
        if node.verdict is not None:
            del self._nodes[node.name]
            return Lost(node.name, node.verdict, silent_s)
        if node.in_flight and at - _begun(node) >= _LOST_ANSWER * policy.probe_timeout_s:
            node.in_flight = False
        probe_at = self._probe_at(node)
        if probe_at <= at:
            node.in_flight, node.begun = True, at
            node.tries += not node.proven
            self._push(node, self._next_look(node))
            return Probe(node.name)
        self._push(node, min(probe_at, self._next_look(node)))
        return None

    def _next_look(self, node: _Node) -> float:
        """When a node is looked at though nothing is heard of it or of a probe."""
        lost_at = node.heard + self.policy.patience_s
        if not node.in_flight:
            return lost_at
        return min(lost_at, _begun(node) + _LOST_ANSWER * self.policy.probe_timeout_s)

    def _probe_at(self, node: _Node) -> float:
        """When the next probe of a node begins."""
        policy = self.policy
        if node.in_flight:
            return float("inf")
        free_at = float("-inf")
        if node.begun is not None:
            free_at = node.begun + policy.probe_interval_s
            if node.refused:
                free_at = node.begun + policy.probe_timeout_s
            if not node.proven:
                free_at = node.begun + min(_RARELY_S, policy.probe_interval_s * 2**node.tries)
        if not node.proven:
            return free_at
        probe_at = free_at if node.asked else max(node.heard + policy.suspect_s, free_at)
        decides_at = self._decides_at(node)
        if probe_at < decides_at < probe_at + policy.probe_interval_s:
            # Or the one that decides could not begin when it is due.
            return decides_at
        return probe_at

    def _decides_at(self, node: _Node) -> float:
        """When a probe begins that makes a node lost by being unanswered."""
        policy = self.policy
        alive = max(node.heard, node.connected)
        last = policy.timeout_s - policy.probe_timeout_s - _MARGIN_S
        return alive + max(policy.suspect_s, last)

    def _refused(self, node: _Node, at: float) -> None:
        node.refused += 1
        if node.refused > 1 or node.silent_s(at) >= self.policy.suspect_s:
            node.verdict = _GONE
        else:
            # What is missing is the second witness, whichever of the two comes first.
            node.asked = True

    def _unanswered(self, node: _Node, begun: float) -> None:
        if begun >= self._decides_at(node):
            node.verdict = _CUT_OFF

    def _push(self, node: _Node, due: float) -> None:
        node.due = due
        heapq.heappush(self._heap, (due, node.order, node))


def _begun(node: _Node) -> float:
    return float("-inf") if node.begun is None else node.begun
