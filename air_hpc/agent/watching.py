"""What the coordinator watches while a generation runs: nodes that die, workers that hang.

`NodeWatch` joins the detector's questions with the prober's answers; `HangWatch` asks all nodes
what their workers are doing once one of them is overdue, and blames one. Both hold no decision of
their own: those are `recovery.detector`'s and `recovery.hang`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from air_hpc.agent.liveness import Prober
from air_hpc.agent.members import Member
from air_hpc.config.spec import RecoverySpec
from air_hpc.recovery.detector import Detector, DetectorPolicy, Lost, Probe
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
