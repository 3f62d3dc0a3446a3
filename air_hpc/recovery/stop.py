"""The stop agreement: one step at which every worker stops, whoever asked and however they run.

The coordinator's side of rule 2. Each worker publishes the step it begins, then reads the flag,
and begins no further step under it. So:

1. a stop is asked for: every node sets the flag for its workers (action `SET_FLAG`);
2. a node whose workers' flags are set reports the largest step that any of them has published:
   whoever missed the flag had published its step before, and none begins another one now;
3. with every node's report the target is the largest: it is sent to all (action `SET_TARGET`), and
   every worker runs up to it and leaves.

A node that never reports lets the deadline pass (action `GIVE_UP`): then there is no common step,
and the newest checkpoint is what the next attempt starts from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Action(StrEnum):
    """What the coordinator is to do now."""

    SET_FLAG = "set_flag"
    SET_TARGET = "set_target"
    GIVE_UP = "give_up"


@dataclass
class StopAgreement:
    """Agrees on a target step among `members`. Asked again, it keeps its first reason."""

    members: frozenset[str]
    timeout_s: float
    reason: str | None = None
    target: int | None = None
    _reports: dict[str, int] = field(default_factory=dict)
    _deadline: float | None = None
    _given_up: bool = False

    @classmethod
    def among(cls, members: Iterable[str], timeout_s: float) -> StopAgreement:
        """An agreement among nodes, none of which has been asked yet."""
        return cls(frozenset(members), timeout_s)

    @property
    def requested(self) -> bool:
        """Whether a stop was asked for."""
        return self.reason is not None

    @property
    def missing(self) -> tuple[str, ...]:
        """Nodes that have not reported, by name."""
        return tuple(sorted(self.members - self._reports.keys()))

    @property
    def deadline(self) -> float | None:
        """When a `tick` gives up, if nothing happens before; None where none will."""
        return None if self.target is not None or self._given_up else self._deadline

    def request(self, reason: str, now: float) -> Action | None:
        """Ask for a stop at time `now`; a second call changes nothing."""
        if self.requested:
            return None
        self.reason = reason
        self._deadline = now + self.timeout_s
        return Action.SET_FLAG

    def report(self, member: str, begun_step: int) -> Action | None:
        """A node's workers stand still; `begun_step` is the largest published (-1: none began)."""
        if member not in self.members or not self.requested or self.target is not None:
            return None
        if self._given_up:
            return None
        self._reports.setdefault(member, begun_step)
        if len(self._reports) < len(self.members):
            return None
        self.target = max(0, *self._reports.values())
        return Action.SET_TARGET

    def tick(self, now: float) -> Action | None:
        """Called as time passes."""
        if self.deadline is None or now < self.deadline:
            return None
        self._given_up = True
        return Action.GIVE_UP
