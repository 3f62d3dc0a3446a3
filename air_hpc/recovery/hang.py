"""When a worker's silence is a hang, and which rank fell silent first.

A sign of progress is a change of what a worker's page says: its phase, the step begun, the step
done. Between two signs lies a stretch. A stretch may last as long as its phase's limit: `factor`
times the longest stretch of that phase that the node's workers were seen to end in good health, and
never less than the floor of the config. No collective and no message takes part in it.

In a synchronous run all ranks fall silent together, since all wait for the one that hangs. So a
silence only says *that* something hangs; `blame` says *who*, from a report on every rank. Its
rules, first match first: a process that is stopped or gone; a node or a worker that does not answer
while others do; the rank that has not entered a collective that others of its group wait in; the
rank behind in its step or phase. Where none of them tells a rank apart, no rank is named.

What may go wrong: a rank may rightly take long (a save) while the others wait past the limit of
*their* phase. `Blame.patience_s` then says how long the rank waited for still has by its own limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from air_hpc.config.spec import HangSpec
from air_hpc.session.page import NONE

LONGEST_EVIDENCE = 500
"""Characters of an evidence line."""

_ORDER = (
    "start", "init", "preflight", "data", "load", "compile", "step", "eval", "save", "finish",
)  # fmt: skip
"""The order in which a worker comes through its phases, at one and the same step."""

STOPPED = ("T", "t")
"""States of a process (proc(5), /proc/pid/status): stopped by a signal or a tracer."""
GONE = ("X", "x", "Z")
_IN_KERNEL = "D"


@dataclass(frozen=True)
class Overdue:
    """A worker without a sign of progress for longer than its phase may last. Seconds."""

    rank: int
    phase: str
    step: int
    for_s: float
    limit_s: float

    def to_json(self) -> dict[str, Any]:
        """For a heartbeat."""
        return asdict(self)


class PhaseDurations:
    """The longest stretch seen of each phase, of all workers of a node and all its generations."""

    def __init__(self) -> None:
        self._longest: dict[str, float] = {}

    def learn(self, phase: str, duration_s: float) -> None:
        """Take in a stretch that ended in good health."""
        self._longest[phase] = max(duration_s, self._longest.get(phase, 0.0))

    def limit_s(self, phase: str, spec: HangSpec, *, first_step: bool = False) -> float:
        """How long a stretch of this phase may last."""
        floor: float = getattr(spec, f"{phase}_s")
        if first_step:
            floor = max(floor, spec.first_step_s)
        return max(floor, spec.factor * self._longest.get(phase, 0.0))


class PhaseWatch:
    """The clock of one worker in one generation. `now` is any clock that never goes back."""

    def __init__(self, rank: int, spec: HangSpec, durations: PhaseDurations) -> None:
        self.rank = rank
        self._spec = spec
        self._durations = durations
        self._phase, self._begun, self._done = "start", NONE, NONE
        self._since: float | None = None
        self._learns = True

    def observe(
        self,
        phase: str,
        begun_step: int,
        done_step: int,
        now: float,
        *,
        stalled_s: float = 0.0,
        awaits_target: bool = False,
    ) -> None:
        """Take in what the page says now.

        `stalled_s` is how long the observer itself stood still since it last looked: that is held
        against nobody. `awaits_target`: a stop was asked for and its step is not agreed yet. The
        workers then stand still as they should, for `stop_timeout_s` at most by their own clock.
        """
        if self._since is None:
            self._since = now
        self._since = min(now, self._since + stalled_s)
        if awaits_target:
            self._since, self._learns = now, False
        if (phase, begun_step, done_step) == (self._phase, self._begun, self._done):
            return
        duration_s = now - self._since
        # A first step builds communicators and kernels: it says nothing about the next ones.
        if self._learns and not self._first_step and duration_s <= self._limit_s:
            self._durations.learn(self._phase, duration_s)
        self._phase, self._begun, self._done = phase, begun_step, done_step
        self._since, self._learns = now, not awaits_target

    @property
    def _first_step(self) -> bool:
        return self._phase == "step" and self._done == NONE

    @property
    def _limit_s(self) -> float:
        return self._durations.limit_s(self._phase, self._spec, first_step=self._first_step)

    def standing(self, now: float) -> tuple[float, float]:
        """(seconds since the last sign of progress, seconds that the present phase may last)."""
        return 0.0 if self._since is None else max(0.0, now - self._since), self._limit_s

    def overdue(self, now: float) -> Overdue | None:
        """The silence, when it is longer than the phase's limit."""
        for_s, limit_s = self.standing(now)
        if for_s <= limit_s:
            return None
        step = self._begun if self._phase == "step" else self._done
        return Overdue(self.rank, self._phase, step, round(for_s, 3), round(limit_s, 3))


@dataclass(frozen=True)
class GroupReport:
    """A process group as one of its ranks sees it.

    `group` names it and its members, equal on all of them. `sequence` is the number of the newest
    collective that this rank has entered (0: none yet, None: not counted), `in_flight` the
    operation that it is in.
    """

    group: str
    sequence: int | None
    in_flight: str | None = None


@dataclass(frozen=True)
class RankReport:
    """What an inspection found out about one rank.

    `state` is the process's letter in /proc (None: not known), `answered` whether the worker's own
    thread did, `top` the innermost frames of its main thread. `for_s` and `limit_s` as in Overdue.
    """

    rank: int
    node: str
    state: str | None
    answered: bool
    phase: str
    begun: int
    done: int
    groups: tuple[GroupReport, ...] = ()
    top: str | None = None
    for_s: float = 0.0
    limit_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """For the channel."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> RankReport:
        """Read back `to_json`."""
        groups = tuple(GroupReport(**group) for group in body["groups"])
        return cls(**{**body, "groups": groups})

    @property
    def in_flight(self) -> GroupReport | None:
        """The collective that this rank waits in."""
        return next((group for group in self.groups if group.in_flight is not None), None)

    @property
    def progress(self) -> tuple[int, int, int]:
        """Comparable: the lower, the further behind."""
        return self.done, self.begun, _ORDER.index(self.phase)


@dataclass(frozen=True)
class Blame:
    """The first silent rank and its host (None where nothing tells one apart), with the evidence.

    `patience_s`: how long the named rank may still take by the limit of its own phase. Where it is
    not zero the others wait for one that does nothing wrong yet.
    """

    rank: int | None
    node: str | None
    evidence: str
    patience_s: float = 0.0


def blame(reports: Iterable[RankReport], missing: Mapping[int, str] | None = None) -> Blame:
    """Name the first silent rank of a generation.

    `missing` are ranks of which there is no report since their node did not answer, with its name.
    """
    known = sorted(reports, key=lambda report: report.rank)
    if found := _broken(known):
        return found
    if missing:
        rank = min(missing)
        node = missing[rank]
        return Blame(
            rank, node, _line(f"rank {rank} on {node} is silent: its agent did not answer")
        )
    for rule in (_unanswering, _behind_in_group, _behind_in_step, _alone):
        if found := rule(known):
            return found
    return Blame(None, None, _line(_nobody(known)))


def _broken(reports: Sequence[RankReport]) -> Blame | None:
    """A process that is stopped, or gone: sure signs, whatever its limit is."""
    for states, why in (
        (STOPPED, "its process is stopped (SIGSTOP)"),
        (GONE, "its process has ended"),
    ):
        found = [report for report in reports if report.state in states]
        if found:
            return _named(found, reports, why, patience=False)
    return None


def _unanswering(reports: Sequence[RankReport]) -> Blame | None:
    silent = [report for report in reports if not report.answered]
    if len(silent) in (0, len(reports)):
        return None
    return _named(silent, reports, "it does not answer, while others do")


def _behind_in_group(reports: Sequence[RankReport]) -> Blame | None:
    """The rank that others wait for in a collective. One that waits in another itself comes after
    those that wait in none: it is behind because somebody else is."""
    newest: dict[str, int] = {}
    for report in reports:
        for group in report.groups:
            if group.sequence is not None:
                newest[group.group] = max(group.sequence, newest.get(group.group, 0))
    behind = {
        report.rank: group
        for report in reports
        for group in report.groups
        if group.sequence is not None and group.sequence < newest[group.group]
    }
    if not behind:
        return None
    late = [report for report in reports if report.rank in behind]
    chosen = _furthest_behind([report for report in late if report.in_flight is None] or late)
    group = behind[chosen.rank]
    why = f"it has not gone past #{group.sequence} of group {group.group}, where others are at "
    why += f"#{newest[group.group]}"
    if waits := chosen.in_flight:
        why += f" (it waits in {waits.in_flight} of group {waits.group} itself)"
    return _named([chosen], reports, why)


def _behind_in_step(reports: Sequence[RankReport]) -> Blame | None:
    if not reports:
        return None
    least = min(report.progress for report in reports)
    behind = [report for report in reports if report.progress == least]
    if len(behind) == len(reports):
        return None
    ahead = max(reports, key=lambda report: report.progress)
    at = f"step {ahead.begun}, phase {ahead.phase}" if ahead.begun >= 0 else f"phase {ahead.phase}"
    return _named(behind, reports, f"it lies behind the others, which are at {at}")


def _alone(reports: Sequence[RankReport]) -> Blame | None:
    return _named(reports, reports, "it is the only rank") if len(reports) == 1 else None


def _nobody(reports: Sequence[RankReport]) -> str:
    if not reports:
        return "no rank could be told apart: nobody reported"
    told = f"no rank could be told apart: all {len(reports)} are in phase {reports[0].phase}"
    if reports[0].begun >= 0:
        told += f" at step {reports[0].begun}"
    if not any(report.answered for report in reports):
        told += ", and none of them answers"
    waits = _waits(reports)
    return told if waits is None else f"{told}; they wait in {waits}, which all have entered"


def _furthest_behind(reports: Sequence[RankReport]) -> RankReport:
    return min(reports, key=lambda report: (report.progress, report.rank))


def _named(
    found: Sequence[RankReport], reports: Sequence[RankReport], why: str, *, patience: bool = True
) -> Blame:
    """Blame the one of `found` that is furthest behind; how many more there are is said."""
    chosen = _furthest_behind(found)
    at = f" at step {chosen.begun}" if chosen.begun >= 0 else ""
    told = f"rank {chosen.rank} on {chosen.node} is silent{at} in phase {chosen.phase}: {why}"
    if chosen.state == _IN_KERNEL:
        told += ", and stands in the kernel (a disk or a device does not answer)"
    others = [report for report in reports if report.rank != chosen.rank]
    if len(found) > 1:
        told += f"; so do {len(found) - 1} more"
    if waits := _waits(others):
        told += f"; the others wait in {waits}"
    if chosen.top:
        told += f"; it is at {chosen.top}"
    left_s = max(0.0, chosen.limit_s - chosen.for_s) if patience else 0.0
    return Blame(chosen.rank, chosen.node, _line(told), round(left_s, 3))


def _waits(reports: Sequence[RankReport]) -> str | None:
    """The collective that most of these ranks are in."""
    counted = Counter(
        f"{group.in_flight} of group {group.group}"
        for report in reports
        if (group := report.in_flight) is not None
    )
    return counted.most_common(1)[0][0] if counted else None


def _line(text: str) -> str:
    one = " ".join(text.split())
    return one if len(one) <= LONGEST_EVIDENCE else one[: LONGEST_EVIDENCE - 1] + "…"
