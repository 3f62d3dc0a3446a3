"""What the coordinator watches: nodes that die or are unfit, workers that hang.

`NodeWatch` joins the detector's questions with the prober's answers; `HangWatch` asks all nodes
what their workers are doing once one of them is overdue, and blames one; `FitnessWatch` holds what
nodes say of themselves. No decision is made here: those are `recovery`'s (detector, hang, fitness).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from air_hpc.agent.liveness import Prober
from air_hpc.agent.members import Member
from air_hpc.config.spec import PreflightSpec, RecoverySpec
from air_hpc.recovery.detector import Detector, DetectorPolicy, Lost, Probe
from air_hpc.recovery.fitness import Fitness, NodeWord, judge
from air_hpc.recovery.hang import Blame, RankReport, blame

INSPECT_S = 8.0
"""How long the nodes' reports on their workers are awaited."""


class NodeWatch:
    """Finds the nodes that are lost. `fileno` is ready when a probe has ended."""

    def __init__(
        self,
        recovery: RecoverySpec,
        *,
        clock: Callable[[], float] = time.monotonic,
        prober: Prober | None = None,
    ) -> None:
        policy = DetectorPolicy.from_spec(recovery)
        self._detector = Detector(policy)
        self._prober = prober or Prober(policy.probe_timeout_s, clock=clock)
        self._where: dict[str, tuple[str, int]] = {}
        self._told_unproven: set[str] = set()

    def fileno(self) -> int:
        """For the loop's poll."""
        return self._prober.fileno()

    def watch(self, member: Member, now: float) -> None:
        """A node has arrived."""
        port = member.facts.get("liveness_port")
        if isinstance(port, int):
            self._where[member.node] = (member.address, port)
        self._detector.watch(member.node, now)

    def heard(self, node: str, now: float) -> None:
        """Any message of a node."""
        self._detector.heard(node, now)

    def forget(self, node: str) -> None:
        """A node left, or was given up."""
        self._detector.forget(node)

    def suspect_all(self, now: float) -> None:
        """A worker lost its connection to another: look at every node at once."""
        self._detector.suspect_all(now)

    def forgive(self, seconds: float, now: float) -> None:
        """The coordinator itself stood still so long."""
        self._detector.forgive(seconds, now)

    def newly_unproven(self) -> list[str]:
        """Nodes whose port never answered while they beat, each told once."""
        found = [node for node in self._detector.unproven if node not in self._told_unproven]
        self._told_unproven.update(found)
        return found

    def tick(self, now: float) -> list[Lost]:
        """Begin the probes that are due; the nodes that are lost now."""
        for node, answer in self._prober.poll():
            self._detector.probed(node, answer, now)
        lost = []
        for action in self._detector.tick(now):
            if isinstance(action, Lost):
                lost.append(action)
            elif isinstance(action, Probe) and action.node in self._where:
                self._prober.begin(action.node, *self._where[action.node])
        return lost

    def close(self) -> None:
        """Give up what is under way."""
        self._prober.close()


class HangWatch:
    """One generation's: told of overdue workers, it asks once and says whom to blame."""

    def __init__(self, nodes: Mapping[int, str]) -> None:
        """`nodes`: where each rank runs."""
        self._nodes = dict(nodes)
        self._reports: dict[str, list[RankReport]] | None = None
        self._answer_by = 0.0
        self._quiet_until = float("-inf")
        self.overdue: dict[str, Any] | None = None
        """The first overdue worker as its node told it, while it is being looked into."""

    def late(self, overdue: Iterable[dict[str, Any]], now: float) -> bool:
        """A heartbeat told of overdue workers; whether every node is to be asked now."""
        first = next(iter(overdue), None)
        if first is None or self._reports is not None or now < self._quiet_until:
            return False
        self.overdue = first
        self._reports = {}
        self._answer_by = now + INSPECT_S
        return True

    def inspected(self, node: str, reports: Iterable[Mapping[str, Any]]) -> None:
        """A node's answer."""
        if self._reports is not None:
            self._reports[node] = [RankReport.from_json(report) for report in reports]

    def tick(self, now: float) -> Blame | None:
        """Whom to blame, once all have answered or the time for it is over.

        None also where the rank that is waited for may still take its time: it is asked again
        when that is over, if somebody is overdue then.
        """
        if self._reports is None:
            return None
        missing = {rank: node for rank, node in self._nodes.items() if node not in self._reports}
        if missing and now < self._answer_by:
            return None
        found = blame([one for part in self._reports.values() for one in part], missing)
        self._reports = None
        if found.patience_s > 0:
            self._quiet_until = now + found.patience_s
            return None
        return found


class FitnessWatch:
    """What the nodes of an attempt said of themselves, at their hello and after a device failed."""

    SLACK_S = 2.0
    """Beside the checks' own time-out, for the question and the answer."""

    def __init__(self, spec: PreflightSpec) -> None:
        self._spec = spec
        self._words: dict[str, NodeWord] = {}
        self._clock_offsets: dict[str, float] = {}
        self._failed: dict[str, int] = {}
        self._awaited: set[str] | None = None
        self._answer_by = 0.0
        self._ask_at = 0.0
        self.ranks_due = spec.enabled
        """Whether the next generation's ranks try their devices and links."""

    def told(self, node: str, hello: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A node's hello; the checks it carries."""
        word = NodeWord.from_hello(hello)
        self._words[node] = word
        return [dict(check) for check in word.checks]

    def beat(self, node: str, wall_time: Any, heard_at: float) -> None:
        """A heartbeat that was sent at `wall_time` by its node's clock and `heard_at` by ours.

        What is under way for long seems to come from a clock that is behind: the largest counts.
        """
        if isinstance(wall_time, int | float):
            offset = wall_time - heard_at
            self._clock_offsets[node] = max(offset, self._clock_offsets.get(node, offset))

    def judge(self, nodes: Iterable[str]) -> Fitness:
        """Which of these nodes must not train."""
        words = {
            node: replace(self._words[node], clock_offset_s=self._clock_offsets.get(node))
            for node in nodes
            if node in self._words
        }
        return judge(words, self._spec.max_clock_skew_s)

    def failed_before(self, node: str) -> bool:
        """Note that a node's device failed; whether it is not the first time."""
        self._failed[node] = self._failed.get(node, 0) + 1
        return self._failed[node] > 1

    def ask_again(self, now: float) -> None:
        """Have all nodes checked anew before the next generation."""
        if self._spec.enabled:
            self.ranks_due = True
            self._awaited = None
            self._answer_by = now + self._spec.timeout_s + self.SLACK_S
            self._ask_at = now

    def to_ask(self, nodes: Iterable[str], now: float) -> list[str]:
        """The nodes to send the question to now: all, and once a second those that are silent."""
        if now >= self._answer_by or now < self._ask_at:
            return []
        if self._awaited is None:
            self._awaited = set(nodes)
        self._ask_at = now + 1.0
        return sorted(self._awaited)

    def told_again(self, node: str, message: Mapping[str, Any]) -> None:
        """A node's answer to the question."""
        if self._awaited is not None and node in self._awaited:
            self._awaited.discard(node)
            former = self._words.get(node, NodeWord())
            self._words[node] = NodeWord(tuple(message["checks"]), former.devices)

    def awaits(self, nodes: Iterable[str], now: float) -> bool:
        """Whether an answer of one of these nodes is still worth waiting for."""
        return now < self._answer_by and not (self._awaited or set()).isdisjoint(nodes)
