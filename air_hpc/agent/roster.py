"""The nodes of an attempt as its coordinator knows them: who is here, fit, lost, and why.

It notes and tells; what follows from a node's loss is the restart machine's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from air_hpc.agent.channel import Message
from air_hpc.agent.environment import JobContext
from air_hpc.agent.liveness import Prober
from air_hpc.agent.members import Member
from air_hpc.agent.watching import FitnessWatch, NodeWatch
from air_hpc.plan.frozen import FrozenRun
from air_hpc.recovery.detector import Lost
from air_hpc.rundir.events import Kind


class Roster:
    """The members of one attempt."""

    def __init__(
        self,
        context: JobContext,
        frozen: FrozenRun,
        *,
        record: Callable[..., None],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        prober: Prober | None = None,
    ) -> None:
        self._context = context
        self._spec, self._plan = frozen.spec, frozen.plan
        self._record = record
        self._say = say
        self._clock = clock
        self._watch = NodeWatch(frozen.spec.recovery, clock=clock, prober=prober)
        self._members: dict[str, Member] = {}
        self._why_out: dict[str, str] = {}
        self._left: set[str] = set()
        self.fitness = FitnessWatch(frozen.spec.recovery.preflight)

    def __getitem__(self, node: str) -> Member:
        return self._members[node]

    def get(self, node: str) -> Member | None:
        """The member, or None for one that has not said hello."""
        return self._members.get(node)

    def welcome(self, node: str, hello: Message, now: float) -> None:
        """A node of the allocation says hello; the first time it becomes a member."""
        if node in self._members:
            return
        member = Member.from_hello(node, hello, now)
        self._members[node] = member
        self._watch.watch(member, now)
        checks = self.fitness.told(node, hello)
        if checks:
            seconds = hello["facts"].get("preflight_s")
            self._record(Kind.PREFLIGHT, node=node, seconds=seconds, checks=checks)

    def heard(self, node: str, now: float) -> Member | None:
        """Any message of a node."""
        member = self._members.get(node)
        if member is not None:
            member.heard = now
            self._watch.heard(node, now)
        return member

    def said_bye(self, node: str) -> None:
        """A node leaves."""
        self._left.add(node)
        self._watch.forget(node)

    def all_left_but(self, lost: Iterable[str]) -> bool:
        """Whether every node but the lost ones has said that it leaves."""
        return self._left | set(lost) >= set(self._context.nodes)

    def note_lost(self, node: str, why: str) -> None:
        """A node is given up."""
        member = self._members.get(node)
        silent_s = None if member is None else round(self._clock() - member.heard, 1)
        self._why_out[node] = why
        self._watch.forget(node)
        self._record(Kind.NODE_LOST, node=node, why=why, silent_s=silent_s)
        self._say(f"node {node} is lost: {why}")

    def unfit(self, nodes: Sequence[str]) -> Mapping[str, str]:
        """Which of these nodes must not train, and why, by what all of them said."""
        found = self.fitness.judge(nodes)
        for note in found.notes:
            self._say(f"pre-flight: {note}")
        for node, reason in found.unfit.items():
            self._why_out[node] = f"unfit: {reason}"
            self._say(f"{node} is unfit: {reason}")
        return found.unfit

    def why_missing(self, missing: Iterable[str]) -> str:
        """For the evidence: why each of these nodes takes no part."""
        missing = list(missing)
        found = [f"{node}: {self._why_out[node]}" for node in missing if node in self._why_out]
        silent = [self._with_ranks(node) for node in missing if node not in self._why_out]
        if silent:
            limit = f"launch.start_timeout_s={self._spec.launch.start_timeout_s:g}"
            found.append(f"did not arrive within {limit}: {', '.join(silent)}")
        return "; ".join(found)

    def _with_ranks(self, node: str) -> str:
        """A node with the ranks that it would have had."""
        per_node = self._plan.devices_per_node
        first = self._context.nodes.index(node) * per_node
        return f"{node} (ranks {first}-{first + per_node - 1})"

    # -- watching ----------------------------------------------------------------------------------

    def suspect_all(self, now: float) -> None:
        """A worker lost its connection to another: look at every node at once."""
        self._watch.suspect_all(now)

    def forgive(self, stalled_s: float, now: float) -> None:
        """The coordinator itself stood still so long."""
        self._watch.forgive(stalled_s, now)

    def tick(self, now: float) -> list[Lost]:
        """The nodes that are lost now; the caller notes them by `note_lost`."""
        if unproven := self._watch.newly_unproven():
            lease_s = self._spec.recovery.lease_s
            self._say(
                f"the probe port of {', '.join(unproven)} cannot be reached (a firewall between "
                f"the nodes?): their loss is found after recovery.lease_s={lease_s:g} only"
            )
        return self._watch.tick(now)

    def fileno(self) -> int:
        """Ready when a probe of a node has ended."""
        return self._watch.fileno()

    def close(self) -> None:
        """Give up the probes under way."""
        self._watch.close()
