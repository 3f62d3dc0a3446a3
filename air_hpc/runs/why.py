"""Why a run is where it is: what failed first, what was done about it, what comes next.

`explain` is a pure function of the ledger's events and of what `runs.status` found out; `why` reads
them and adds the last lines of the log of the rank that failed first. Nothing here raises for what
a ledger holds or lacks: what is not known is None, and lines that cannot be read are counted.

An end is told once for each generation: its GENERATION_ENDED, with the verdict of the
ATTEMPT_ENDED under the same token where the attempt ended with it. Attempts that left no word at
all are those that the fold of the ledger assumed. What an end cost: the steps and the seconds of
training that were rolled back by the next start, and the seconds from the end until training began
again.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from air_hpc.errors import BadInput
from air_hpc.plan.fit import Fit, what_fits
from air_hpc.plan.frozen import FrozenRun, read_run_yaml
from air_hpc.rundir.events import Event, Kind, read_ledger
from air_hpc.rundir.fence import Token
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.state import fold
from air_hpc.rundir.words import FREE, FailureClass, RunState, Verdict
from air_hpc.runs.hints import hint_of
from air_hpc.runs.logs import Selection, tail
from air_hpc.runs.status import RunView, view_run

LOG_LINES = 8
"""Of the rank that failed first: what is shown of its log."""
_FOLDS_AT_MOST = 64
"""Ends whose rolled-back seconds are worked out one by one; each takes a fold of the ledger."""


@dataclass(frozen=True)
class EndTold:
    """One end of a generation or an attempt. `device` is a UUID; times are of the wall clock."""

    attempt: int | None
    generation: int | None
    time: float | None
    failure_class: FailureClass
    verdict: Verdict | None = None
    reason: str | None = None
    evidence: str | None = None
    rule: str | None = None
    hint: str | None = None
    rank: int | None = None
    node: str | None = None
    device: str | None = None
    phase: str | None = None
    step: int | None = None
    lost_steps: int | None = None
    lost_s: float | None = None
    down_s: float | None = None
    stacks: str | None = None

    @property
    def failed(self) -> bool:
        """Whether something was wrong: neither done, nor stopped by its owner, nor free."""
        fine = (FailureClass.COMPLETED, FailureClass.CANCELLED, FailureClass.FENCED)
        return self.failure_class not in fine and self.failure_class not in FREE


@dataclass(frozen=True)
class Next:
    """What comes next. `at` is when Slurm expects it; `command` goes on, where somebody must."""

    what: str
    at: float | None = None
    command: str | None = None


@dataclass(frozen=True)
class Why:
    """All of it. `first` is what failed first in the newest end that was a failure."""

    view: RunView
    ends: tuple[EndTold, ...]
    first: EndTold | None
    log: tuple[str, ...]
    fit: Fit | None
    next: Next
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Plain data; what is not known is None."""
        status = self.view.status
        return {
            "run_id": self.view.run.run_id,
            "state": str(status.state),
            "reason": self.view.reason,
            "step": self.view.step,
            "committed_step": status.committed_step,
            "job_id": self.view.jobs.last,
            "first": None if self.first is None else asdict(self.first),
            "log": list(self.log),
            "ends": [asdict(end) for end in self.ends],
            "fit": None if self.fit is None else {**asdict(self.fit), "text": self.fit.sentence()},
            "next": asdict(self.next),
            "notes": list(self.notes),
            "unreadable_ledger_lines": self.view.unreadable_lines,
        }


def why(run: RunDir, *, ask_slurm: bool = True, view: RunView | None = None) -> Why:
    """Why a run stands as it does; `view` is its status where it is known already."""
    view = view or view_run(run, ask_slurm=ask_slurm)
    ledger = read_ledger(run)
    frozen = _frozen(run)
    told = explain(ledger.events, view, frozen)
    return replace(told, log=_log_of(run, told.first))


def explain(events: Sequence[Event], view: RunView, frozen: FrozenRun | None = None) -> Why:
    """`why` without its log, from events and the status alone."""
    ends = _ends(events, view)
    first = _first(ends, view.status.state)
    fit = None
    if first is not None and first.failure_class is FailureClass.DEVICE_MEMORY and frozen:
        fit = what_fits(frozen.spec, frozen.plan)
    notes = tuple(_notes(view, frozen))
    return Why(view, ends, first, (), fit, _next(view, frozen, fit), notes)


# -- ends ------------------------------------------------------------------------------------------


def _ends(events: Sequence[Event], view: RunView) -> tuple[EndTold, ...]:
    told: dict[Token | None, EndTold] = {}
    hangs: dict[Token | None, Event] = {}
    for event in events:
        if event.kind in (Kind.GENERATION_ENDED, Kind.ATTEMPT_ENDED):
            told[event.token] = _merged(told.get(event.token), _told(event))
        elif event.kind == Kind.HANG_FOUND:
            hangs.setdefault(event.token, event)
    ended = [_with_hang(end, hangs.get(token)) for token, end in told.items()]
    ended += _wordless(events, set(told))
    ended.sort(key=lambda end: (end.time or 0.0, end.attempt or 0, end.generation or 0))
    costed = _costed(events, ended)
    return (*costed, *_told_elsewhere(view, costed))


def _with_hang(end: EndTold, found: Event | None) -> EndTold:
    """An end by a hang, with the place and the stacks that were found before the kill."""
    if found is None or end.failure_class is not FailureClass.HANG:
        return end
    facts = found.facts
    return replace(
        end,
        rank=_whole(facts.get("rank")) if end.rank is None else end.rank,
        node=end.node or _text(facts.get("node")),
        phase=end.phase or _text(facts.get("phase")),
        stacks=_text(facts.get("stacks")),
    )


def _told(event: Event) -> EndTold:
    facts, token = event.facts, event.token
    return EndTold(
        attempt=None if token is None else token.attempt,
        generation=None if token is None else token.generation,
        time=event.time,
        failure_class=_failure_class(facts),
        verdict=_verdict(facts),
        reason=_text(facts.get("reason")),
        evidence=_text(facts.get("evidence")),
        rule=_text(facts.get("rule")),
        hint=_text(facts.get("hint")),
        rank=_whole(facts.get("rank")),
        node=_text(facts.get("node")),
        device=_text(facts.get("device")),
        phase=_text(facts.get("phase")),
        step=_whole(facts.get("step")),
    )


def _merged(before: EndTold | None, later: EndTold) -> EndTold:
    """The later word of the same token wins; what it leaves out stays."""
    if before is None:
        return later
    kept = {k: v for k, v in vars(later).items() if v is not None}
    return replace(before, **kept)


def _wordless(events: Sequence[Event], told: set[Token | None]) -> list[EndTold]:
    """Attempts that ended without a word: the fold assumes an end when the next one starts."""
    starts = {
        event.token.attempt: event.time
        for event in events
        if event.kind == Kind.ATTEMPT_STARTED and event.token is not None
    }
    found = []
    for end in fold(events).ends:
        if end.token is None or end.token in told:
            continue
        following = [at for attempt, at in starts.items() if attempt > end.token.attempt]
        found.append(
            EndTold(
                end.token.attempt,
                end.token.generation,
                min(following, default=None),
                end.failure_class,
                evidence=end.evidence or None,
            )
        )
    return found


def _told_elsewhere(view: RunView, ends: Sequence[EndTold]) -> list[EndTold]:
    """An end that Slurm, the machine or the submission knows of, and no agent told."""
    status = view.status
    told_here = view.source == "ledger" and ends
    if told_here or not status.terminal or status.failure_class is None:
        return []
    return [
        EndTold(
            status.attempt,
            status.generation,
            status.ended,
            status.failure_class,
            evidence=status.evidence,
            step=status.step,
        )
    ]


def _costed(events: Sequence[Event], ends: Sequence[EndTold]) -> list[EndTold]:
    """The ends with what each cost, as far as the ledger goes on after it."""
    one_by_one = len(ends) <= _FOLDS_AT_MOST
    costed = []
    for index, end in enumerate(ends):
        if end.time is None or end.verdict is Verdict.STOP:
            costed.append(end)
            continue
        until = ends[index + 1].time if index + 1 < len(ends) else None
        after = [
            event
            for event in events
            if event.time >= end.time and (until is None or event.time <= until)
        ]
        resumed = next((e for e in after if e.kind == Kind.RESUMED), None)
        trained = next((e for e in after if e.kind == Kind.TRAINING_STARTED), None)
        lost_steps = None if resumed is None else _whole(resumed.facts.get("lost_steps"))
        if resumed is None and trained is not None and trained.facts.get("step") == 1:
            lost_steps = end.step
        lost_s = None
        if trained is not None and one_by_one:
            earlier = [event for event in events if event.time < end.time]
            so_far = [event for event in events if event.time <= trained.time]
            lost_s = max(0.0, fold(so_far).time.lost_s - fold(earlier).time.lost_s)
        down_s = None if trained is None else max(0.0, trained.time - end.time)
        costed.append(replace(end, lost_steps=lost_steps, lost_s=lost_s, down_s=down_s))
    return costed


def _first(ends: Sequence[EndTold], state: RunState) -> EndTold | None:
    """The newest end that was a failure, one that says why before one that does not.

    Where nothing failed, what a run that stands still was ended by.
    """
    failed = [end for end in ends if end.failed]
    said = [end for end in failed if end.evidence is not None]
    found = next(reversed(said or failed), None)
    if found is None and state in _STANDING and ends:
        return ends[-1]
    return found


_STANDING = (RunState.REQUEUED, RunState.CANCELLED, RunState.HELD, RunState.FAILED)


# -- what comes next -------------------------------------------------------------------------------


def _next(view: RunView, frozen: FrozenRun | None, fit: Fit | None) -> Next:
    status, job = view.status, view.jobs.last
    state = status.state
    if state is RunState.FINISHED:
        return Next("nothing: the run is complete")
    if state is RunState.HELD:
        command = None if job is None else f"scontrol release {job}"
        return Next(f"held: {view.reason or 'Slurm will not start it'}", command=command)
    if state is RunState.CANCELLED:
        return Next("nothing: it was cancelled, and stays so", command=_again(frozen, None))
    if state is RunState.FAILED:
        what = "nothing: the verdict stands, also under scontrol requeue"
        if view.source != "ledger":
            what = "nothing: no job of it is left"
        if fit is not None and fit.overrides:
            what += "; a new run that would fit by the estimate"
        else:
            what += "; a new run, once the cause is mended"
        return Next(what, command=_again(frozen, fit))
    if state in (RunState.PENDING, RunState.REQUEUED):
        at = view.slurm.start_time if view.slurm is not None else None
        goes_on = "starts" if state is RunState.PENDING else "restarts"
        if status.committed_step:
            goes_on += f" from step {status.committed_step}"
        waits = f": {view.reason}" if view.reason else ""
        return Next(f"{goes_on} when Slurm gives it nodes{waits}", at=at)
    if state is RunState.SAVING:
        return Next("it saves the agreed step and leaves")
    if state is RunState.STARTING:
        return Next("it is starting")
    return Next("it trains on")


def _again(frozen: FrozenRun | None, fit: Fit | None) -> str | None:
    if frozen is None:
        return None
    changed = () if fit is None else fit.overrides
    keys = {text.partition("=")[0] for text in changed}
    kept = [text for text in frozen.overrides if text.lstrip("+").partition("=")[0] not in keys]
    return shlex.join(["python", "-m", "air_hpc", *kept, *changed])


def _notes(view: RunView, frozen: FrozenRun | None) -> Iterable[str]:
    if view.unreadable_lines:
        count = view.unreadable_lines
        lines = "line" if count == 1 else "lines"
        yield f"{count} {lines} of the ledger could not be read; the others are what is told here"
    if frozen is None:
        yield "run.yaml could not be read"
    if view.status.bad_steps:
        steps = ", ".join(map(str, view.status.bad_steps))
        yield f"checkpoints that are marked bad and never used again: {steps}"


# -- facts -----------------------------------------------------------------------------------------


def hint_for(end: EndTold) -> str:
    """What the user can do about an end: its rule's word, else its class's."""
    return end.hint or hint_of(end.failure_class)


def _log_of(run: RunDir, end: EndTold | None) -> tuple[str, ...]:
    if end is None or end.rank is None or end.attempt is None or end.generation is None:
        return ()
    chosen = Selection(end.rank, end.attempt, end.generation, end.node)
    try:
        return tuple(line.text for line in tail(run, chosen, LOG_LINES))
    except OSError:
        return ()


def _frozen(run: RunDir) -> FrozenRun | None:
    try:
        return read_run_yaml(run.run_yaml.read_text("utf-8"), str(run.run_yaml))
    except (OSError, BadInput, UnicodeDecodeError):
        return None


def _failure_class(facts: Mapping[str, Any]) -> FailureClass:
    try:
        return FailureClass(str(facts.get("failure_class")))
    except ValueError:
        return FailureClass.UNKNOWN


def _verdict(facts: Mapping[str, Any]) -> Verdict | None:
    try:
        return Verdict(str(facts.get("verdict")))
    except ValueError:
        return None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
