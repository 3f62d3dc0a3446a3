"""From how the workers of a generation ended to one failure class and one line of evidence.

The first failing rank is found by time, not by who printed last. Two kinds of end are consequences
and count only where there is no other: when one worker dies, the others see their connections break
a moment later (class `network`); and those that hang on for the dead one are killed by their agent.

What an end means is said by the table of failures (`rules`), from facts that the worker and its
agent report. Two things go before the table: the words of the contract itself (left without having
saved), and the class that a worker gives for an error of this project's own, which knows what it
means. Without a rule that holds the class is `unknown`.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from air_hpc.recovery.cause import Cause, SlurmWord
from air_hpc.recovery.decide import NOT_RETRIED
from air_hpc.recovery.rules import Evidence, LogMatch, Match, RuleAction, RuleTable
from air_hpc.rundir.words import FailureClass

EVIDENCE_CHARS = 500
_EMPTY = RuleTable()


@dataclass(frozen=True)
class SeenXid:
    """An Xid that the driver logged while the worker ran; `device` is a UUID or a bus id."""

    xid: int
    device: str | None = None


@dataclass(frozen=True)
class WorkerEnd:
    """How one worker ended; `arrived` orders the ends, `last_words` closed its session."""

    rank: int
    node: str
    exit_status: int | None
    phase: str
    done_step: int
    last_words: Mapping[str, Any] | None
    arrived: float
    killed_by_agent: bool = False
    """Whether it was still there when the agents were told to kill what is left."""
    log_matches: tuple[LogMatch, ...] = ()
    oom_killed: bool | None = None
    """Whether the kernel's oom-killer counted a kill in the node's memory group; None: unknown."""
    xids: tuple[SeenXid, ...] = ()

    @classmethod
    def from_report(
        cls, facts: Mapping[str, Any], node: str, arrived: float, *, killed_by_agent: bool
    ) -> Self:
        """The end that a node reports (`agent.workers.Worker.end`)."""
        return cls(
            rank=facts["rank"],
            node=node,
            exit_status=facts["exit_status"],
            phase=facts["phase"],
            done_step=facts["done_step"],
            last_words=facts["last_words"],
            arrived=arrived,
            killed_by_agent=killed_by_agent,
            log_matches=tuple(LogMatch(*found) for found in facts.get("log_match") or ()),
            oom_killed=facts.get("oom_killed"),
            xids=tuple(_seen_xid(entry) for entry in facts.get("xids") or ()),
        )

    @property
    def finished(self) -> bool:
        """Whether it did all its steps."""
        return self._said("finished")

    @property
    def stopped(self) -> bool:
        """Whether it left at the agreed step."""
        return self._said("stopped")

    def _said(self, kind: str) -> bool:
        return (
            self.exit_status == 0
            and self.last_words is not None
            and self.last_words.get("kind") == kind
        )

    @property
    def failed(self) -> bool:
        """Whether it ended in any other way."""
        return not (self.finished or self.stopped)

    @property
    def is_cause(self) -> bool:
        """Whether no other rank's end can have brought this one about: what a rank does when it
        loses another is to raise an error, or to abort, and never to be killed from outside."""
        killed = self.exit_status is not None and self.exit_status < 0
        return self.failed and killed and self.exit_status != -signal.SIGABRT

    @property
    def told_error(self) -> bool:
        """Whether it closed its session with an error."""
        return self.last_words is not None and self.last_words.get("kind") == "error"


def _seen_xid(entry: Any) -> SeenXid:
    """An entry of a report: the number alone, or with its device."""
    if isinstance(entry, Mapping):
        device = entry.get("device")
        return SeenXid(int(entry["xid"]), None if device is None else str(device))
    return SeenXid(int(entry))


@dataclass(frozen=True)
class Failure:
    """The end that started it all. `rule` decided its class; None: no rule was asked, or held."""

    failure_class: FailureClass
    evidence: str
    phase: str
    rank: int
    node: str = ""
    device: str | None = None
    rule: str | None = None
    action: RuleAction | None = None
    hint: str = ""


def classify(end: WorkerEnd, table: RuleTable = _EMPTY, word: SlurmWord | None = None) -> Failure:
    """The class and the line of evidence of one failed worker; `word` is Slurm's, where asked."""
    words = end.last_words or {}
    device = next((seen.device for seen in end.xids if seen.device), None)
    found = Failure(FailureClass.UNKNOWN, "", end.phase, end.rank, end.node, device)
    if words.get("kind") == "stopped" and words.get("saved") is False:
        text = f"left at step {words.get('step')}, whose state could not be saved"
        return _with_line(replace(found, failure_class=FailureClass.STORAGE), text)
    text = _how(end)
    if end.told_error:
        given = _given_class(words)
        if given is not None:
            return _with_line(replace(found, failure_class=given), text)
    if end.killed_by_agent and end.exit_status == -signal.SIGKILL:
        return _with_line(found, text)
    match = table.match(evidence_of(end, word))
    if match is None:
        return _with_line(found, text)
    return _with_line(
        replace(
            found,
            failure_class=match.failure_class,
            rule=match.rule,
            action=match.action,
            hint=match.hint,
        ),
        _and_found(end, text, match),
    )


def evidence_of(end: WorkerEnd, word: SlurmWord | None = None) -> Evidence:
    """What the table of failures is asked about one end."""
    words = end.last_words if end.told_error and end.last_words is not None else {}
    status = end.exit_status
    frame = words.get("frame")
    return Evidence(
        exit_code=status if status is not None and status >= 0 else None,
        signal=_signal_name(-status) if status is not None and status < 0 else None,
        exceptions=tuple(map(str, words.get("exceptions") or ())),
        errno=words.get("errno"),
        texts=(_error_text(words), *map(str, words.get("causes") or ())) if words else (),
        origin=frame.get("origin") if isinstance(frame, Mapping) else None,
        log_matches=end.log_matches,
        oom_killed=end.oom_killed,
        xids=tuple(seen.xid for seen in end.xids),
        slurm_state=None if word is None else word.state,
        slurm_reason=None if word is None or not word.reason else word.reason,
    )


def _given_class(words: Mapping[str, Any]) -> FailureClass | None:
    """The class that the worker gives for an error of this project's own."""
    try:
        given = FailureClass(str(words.get("failure_class")))
    except ValueError:
        return None
    return None if given is FailureClass.UNKNOWN else given


def _error_text(words: Mapping[str, Any]) -> str:
    return f"{words.get('type')}: {words.get('message')}"


def _how(end: WorkerEnd) -> str:
    """How a worker ended, in words."""
    status, words = end.exit_status, end.last_words
    if end.told_error and words is not None:
        frame = words.get("frame")
        where = ""
        if isinstance(frame, Mapping) and frame.get("origin") == "user":
            where = f" ({frame.get('file')}:{frame.get('line')})"
        return _error_text(words) + where
    if status is not None and status < 0:
        text = f"killed by {_signal_name(-status)} in phase {end.phase}"
        if end.killed_by_agent:
            text += ", by its agent"
        elif status == -signal.SIGKILL and not end.oom_killed:
            counted = "; no oom-kill was counted" if end.oom_killed is False else ""
            text += f" (by hand, or out of memory: see the kernel's log{counted})"
        return text
    silence = " without a word" if words is None else ""
    return f"ended with exit status {status} in phase {end.phase}{silence}"


def _and_found(end: WorkerEnd, text: str, match: Match) -> str:
    """The line, with what the rule was found in where the line does not say it yet."""
    if match.line and match.line not in text:
        text += f"; {match.line}" if end.told_error else f"; its log says: {match.line}"
    if end.oom_killed and end.exit_status == -signal.SIGKILL:
        text += ", by the kernel's oom-killer"
    if end.xids:
        seen = ", ".join(
            f"Xid {one.xid}" + (f" of {one.device}" if one.device else "") for one in end.xids
        )
        text += f"; the driver logged {seen}"
    return text


def _with_line(failure: Failure, text: str) -> Failure:
    line = " ".join(f"rank {failure.rank} on {failure.node}: {text}".split())
    if len(line) > EVIDENCE_CHARS:
        line = line[: EVIDENCE_CHARS - 2] + " …"
    return replace(failure, evidence=line)


_SIGNALS = {int(number) for number in signal.Signals}


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in _SIGNALS else f"signal {number}"


def first_failure(
    ends: Sequence[WorkerEnd], table: RuleTable = _EMPTY, word: SlurmWord | None = None
) -> Failure | None:
    """The failure that the others followed from, or None when no worker failed.

    Causes before consequences, then by time, then by rank.
    """
    broken: Failure | None = None
    killed: WorkerEnd | None = None
    for end in sorted((e for e in ends if e.failed), key=lambda e: (e.arrived, e.rank)):
        if end.killed_by_agent and end.exit_status == -signal.SIGKILL:
            killed = killed or end
            continue
        failure = classify(end, table, word)
        if failure.failure_class is not FailureClass.NETWORK:
            return failure
        broken = broken or failure
    if broken is not None or killed is None:
        return broken
    return classify(killed, table, word)


@dataclass(frozen=True)
class GenerationEnd:
    """How a generation ended, as its coordinator saw it.

    `silent` has the nodes that were lost, with the last step each was heard at. `signal_name` asked
    for a stop, whose agreed step is `target`; `committed` is the newest committed step.
    `never_started` counts the workers that were killed before there was a process of them.
    """

    workers: tuple[WorkerEnd, ...]
    silent: Mapping[str, int]
    signal_name: str | None = None
    target: int | None = None
    committed: int | None = None
    never_started: int = 0

    @property
    def completed(self) -> bool:
        """Whether every worker did all its steps. Where no worker was, nothing was done."""
        if self.silent or self.never_started or not self.workers:
            return False
        return all(worker.finished for worker in self.workers)

    @property
    def step(self) -> int | None:
        """The largest step that a worker is known to have completed."""
        done = [worker.done_step for worker in self.workers if worker.done_step >= 0]
        return max(done) if done else None

    @property
    def saved_its_target(self) -> bool:
        """Whether what the stop was for is committed (a stop before the first step has nothing)."""
        return self.target is not None and (
            self.target == 0 or (self.committed or 0) >= self.target
        )


@dataclass(frozen=True)
class Classified:
    """The class of a generation's end and its line of evidence; the failure behind it, if any."""

    failure_class: FailureClass
    evidence: str
    failure: Failure | None = None
    node: str | None = None
    """The node that it was, where no worker's failure says so."""

    @classmethod
    def of(cls, failure: Failure) -> Self:
        """A failure as the end's class."""
        return cls(failure.failure_class, failure.evidence, failure)

    @property
    def action(self) -> RuleAction | None:
        """What the rule asks for that decided the class; None leaves it to the class."""
        return self.failure.action if self.by_failure and self.failure else None

    @property
    def by_failure(self) -> bool:
        """Whether the class is that of the failure: not a signal's, a lost node's or a hang's."""
        return self.failure is not None and self.failure.failure_class is self.failure_class

    def facts(self) -> dict[str, Any]:
        """For the ledger: class, evidence, and where the failure was first, by which rule."""
        known = self.failure if self.by_failure else None
        return {
            "failure_class": self.failure_class,
            "evidence": self.evidence,
            "rule": None if known is None else known.rule,
            "action": None if known is None else known.action,
            "hint": None if known is None or not known.hint else known.hint,
            "rank": None if known is None else known.rank,
            "node": self.node if known is None else known.node,
            "device": None if known is None else known.device,
            "phase": None if known is None else known.phase,
        }


def classify_generation(
    end: GenerationEnd,
    cause: Cause | None,
    table: RuleTable = _EMPTY,
    word: SlurmWord | None = None,
) -> Classified:
    """What a generation's end was; `cause` is behind its signal, `word` is Slurm's, where asked.

    A failure that would come again wins over the loss of a node: a program that raises an error
    on one node and hangs another must not be tried again for ever.
    """
    if end.completed:
        alone = len(end.workers) == 1
        words = "the worker finished" if alone else f"all {len(end.workers)} workers finished"
        return Classified(FailureClass.COMPLETED, words)
    failure = first_failure(end.workers, table, word)
    silent = ", ".join(f"{node} (at step {step})" for node, step in sorted(end.silent.items()))
    what = failure.evidence if failure else f"no word from {silent}"
    if failure is None and not silent and end.never_started:
        what = f"{end.never_started} workers were ended before they were started"
    if cause is not None:
        done = f"stopped at step {end.target}" if end.saved_its_target else f"not saved: {what}"
        if end.target == 0:
            done = "stopped before a step began"
        return Classified(cause.failure_class, f"{cause.evidence}; {done}", failure)
    if failure is not None and (not silent or _comes_again(failure)):
        return Classified.of(failure)
    if silent:
        lost = min(end.silent)
        return Classified(FailureClass.NODE_LOST, f"no word from {silent}", failure, lost)
    if end.never_started:
        return Classified(FailureClass.UNKNOWN, what)
    return Classified(FailureClass.UNKNOWN, "workers left without being asked to stop")


def _comes_again(failure: Failure) -> bool:
    """Whether another try would end the same."""
    if failure.action is not None:
        return failure.action == "stop"
    return failure.failure_class in NOT_RETRIED
