"""The table of failures: which rule of `recovery.rules` takes the evidence of a failed worker.

    RuleTable.of(spec.recovery.rules)      sorted and compiled once
    table.search_log(lines)                on the node: which patterns stand in the log's last lines
    table.match(evidence)                  at the coordinator: the first rule that holds, or None

Rules are tried by priority, the largest first, then by name. All conditions of a rule must hold,
and one that asks for what is not known does not. A pattern is searched for in the text of the error
and of its causes. The log is evidence only where the worker told no error (it was killed, or
aborted), or where the rule has the priority of a user's own: a line that an earlier, survived
trouble left there must not explain a plain mistake.

The log stays on its node. Only the lines that a pattern was found in travel, a few, cut to length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from air_hpc.config.spec import OWN_PRIORITY, FailureRule
from air_hpc.rundir.words import FailureClass

RuleAction = Literal["restart", "exclude", "stop"]

LINE_CHARS = 300
"""Of a line that travels or stands as evidence."""
SEARCHED_CHARS = 1000
"""Of a line of a log that patterns are searched for in: a bad pattern must not stall its agent."""
MOST_LOG_MATCHES = 4


def rule_action(word: object) -> RuleAction | None:
    """An action as a ledger holds it; None for anything else."""
    return next((known for known in _ACTIONS if known == word), None)


_ACTIONS: tuple[RuleAction, ...] = ("restart", "exclude", "stop")


@dataclass(frozen=True)
class LogMatch:
    """A line of a worker's log, and the rule whose pattern was found in it."""

    rule: str
    line: str


@dataclass(frozen=True)
class Evidence:
    """What is known of one failed worker. None, or an empty tuple: not known, or nothing told.

    `texts` are the error (`type: message`) and its causes, the error first; `exceptions` its type
    and those it derives from, by qualified name.
    """

    exit_code: int | None = None
    signal: str | None = None
    exceptions: tuple[str, ...] = ()
    errno: str | None = None
    texts: tuple[str, ...] = ()
    origin: str | None = None
    log_matches: tuple[LogMatch, ...] = ()
    oom_killed: bool | None = None
    xids: tuple[int, ...] = ()
    slurm_state: str | None = None
    slurm_reason: str | None = None


@dataclass(frozen=True)
class Match:
    """What a rule makes of the evidence. `line`: what it was found in, where that is a text."""

    failure_class: FailureClass
    rule: str
    line: str = ""
    action: RuleAction | None = None
    hint: str = ""


@dataclass(frozen=True)
class _Compiled:
    name: str
    rule: FailureRule
    pattern: re.Pattern[str] | None


@dataclass(frozen=True)
class RuleTable:
    """The rules in the order they are tried."""

    _rules: tuple[_Compiled, ...] = ()

    @classmethod
    def of(cls, rules: Mapping[str, FailureRule | None]) -> RuleTable:
        """The table of a RecoverySpec's rules; those that are null are switched off."""
        kept = [(name, rule) for name, rule in rules.items() if rule is not None]
        kept.sort(key=lambda item: (-item[1].priority, item[0]))
        return cls(
            tuple(
                _Compiled(name, rule, re.compile(rule.pattern) if rule.pattern else None)
                for name, rule in kept
            )
        )

    def names(self) -> tuple[str, ...]:
        """The rules' names in the order they are tried."""
        return tuple(compiled.name for compiled in self._rules)

    def match(self, evidence: Evidence) -> Match | None:
        """What the first rule that holds makes of the evidence; None where none does."""
        for compiled in self._rules:
            line = _found(compiled, evidence)
            if line is None:
                continue
            rule = compiled.rule
            failure_class = FailureClass(rule.failure_class)
            return Match(failure_class, compiled.name, line, rule.action, rule.hint)
        return None

    def search_log(self, lines: Sequence[str]) -> tuple[LogMatch, ...]:
        """The last line for each pattern that is found in `lines`, in the order of the table."""
        cut = [line[:SEARCHED_CHARS] for line in reversed(lines)]
        found: list[LogMatch] = []
        for compiled in self._rules:
            if compiled.pattern is None or len(found) == MOST_LOG_MATCHES:
                continue
            line = next((line for line in cut if compiled.pattern.search(line)), None)
            if line is not None:
                found.append(LogMatch(compiled.name, line.strip()[:LINE_CHARS]))
        return tuple(found)


def _found(compiled: _Compiled, evidence: Evidence) -> str | None:
    """The text that a rule was found in (empty where it asks for none); None: it does not hold."""
    rule = compiled.rule
    holds = (
        _is_in(evidence.exit_code, rule.exit_code)
        and _is_in(evidence.signal, rule.signal)
        and _meet(evidence.exceptions, rule.exception)
        and _is_in(evidence.errno, rule.errno)
        and rule.origin in (None, evidence.origin)
        and rule.oom_killed in (None, evidence.oom_killed)
        and _meet(evidence.xids, rule.xid)
        and _is_in(evidence.slurm_state, rule.slurm_state)
        and _is_in(evidence.slurm_reason, rule.slurm_reason)
    )
    if not holds:
        return None
    return "" if compiled.pattern is None else _text_with(compiled, compiled.pattern, evidence)


def _text_with(compiled: _Compiled, pattern: re.Pattern[str], evidence: Evidence) -> str | None:
    for text in evidence.texts:
        if pattern.search(text):
            return text
    if evidence.texts and compiled.rule.priority < OWN_PRIORITY:
        return None
    return next((m.line for m in evidence.log_matches if m.rule == compiled.name), None)


def _is_in(value: object, wanted: Iterable[object]) -> bool:
    wanted = tuple(wanted)
    return not wanted or value in wanted


def _meet(values: Iterable[object], wanted: Iterable[object]) -> bool:
    wanted = frozenset(wanted)
    return not wanted or not wanted.isdisjoint(values)
