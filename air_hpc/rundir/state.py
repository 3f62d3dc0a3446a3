"""The fold of the ledger: what state a run is in, what it did, and where its time went.

`fold` is a pure function of the events and of now. It never raises: facts that are missing or of
another type are unknown (None). The seconds of all categories sum to the time from the first event
to the end of the run (or to now).

What a fenced attempt or generation writes after a newer one began moves nothing but its own `End`:
the run is the newer one's.

Goodput here: seconds spent on training steps that were kept, over the seconds in which the run held
its allocation (from each attempt's start to its end; waiting in the queue is not counted).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from air_hpc.rundir.events import Event, Kind
from air_hpc.rundir.fence import Token
from air_hpc.rundir.words import TERMINAL, FailureClass, RunState, Verdict, terminal_state


@dataclass(frozen=True)
class TimeSpent:
    """Seconds of a run's life by what they went to."""

    queued_s: float = 0.0
    starting_s: float = 0.0
    training_s: float = 0.0
    lost_s: float = 0.0
    """Training that was rolled back: after the checkpoint that the next generation resumed from."""
    stopping_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """Everything together."""
        return self.queued_s + self.allocated_s

    @property
    def allocated_s(self) -> float:
        """The time in which the run held its nodes."""
        return self.starting_s + self.training_s + self.lost_s + self.stopping_s

    @property
    def goodput(self) -> float | None:
        """Kept training over allocated time, or None before the first start."""
        return self.training_s / self.allocated_s if self.allocated_s > 0 else None


@dataclass(frozen=True)
class End:
    """How one generation or attempt ended; `committed_step` is the newest commit known then."""

    token: Token | None
    failure_class: FailureClass
    committed_step: int | None
    evidence: str = ""
    action: str | None = None
    """What the rule asked for that gave the class (`recovery.rules`), if it asked."""
    went_on: bool = False
    """Whether the attempt went on after it: what ends the attempt later is another end."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that computes more slowly than the others: `ratio` times the median a step."""

    rank: int
    node: str | None
    device: str | None
    ratio: float

    def __str__(self) -> str:
        """`rank 5 on n3 is 18 % slower than the median`."""
        where = "" if self.node is None else f" on {self.node}"
        device = "" if self.device is None else f" ({self.device})"
        return (
            f"rank {self.rank}{where}{device} is {100 * (self.ratio - 1):.0f} % slower "
            "than the median"
        )


@dataclass(frozen=True)
class RunStatus:
    """What the ledger says about a run."""

    state: RunState = RunState.PENDING
    job_id: str | None = None
    array_task_id: int | None = None
    attempt: int | None = None
    generation: int | None = None
    restart_count: int | None = None
    nodes: tuple[str, ...] | None = None
    step: int | None = None
    committed_step: int | None = None
    resume_step: int | None = None
    failure_class: FailureClass | None = None
    verdict: Verdict | None = None
    evidence: str | None = None
    mlflow_run_id: str | None = None
    cancel_requested: bool = False
    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
    bad_steps: tuple[int, ...] = ()
    ends: tuple[End, ...] = ()
    rolled_back: tuple[tuple[int, int], ...] = ()
    """Ranges of steps (first, last) that were trained and then rolled back."""
    stragglers: tuple[SlowRank, ...] = ()
    """The slow ranks of the present generation, by rank."""
    skipped_batches: tuple[tuple[int, int], ...] = ()
    """Ranges of batches (first, last) that the loss guard's rollbacks step over."""
    guard_skips: int = 0
    """Steps whose update the loss guard left out."""
    excluded: tuple[str, ...] = ()
    """Nodes that this run's failures were held against."""
    measured: dict[str, Any] = field(default_factory=dict)
    time: TimeSpent = field(default_factory=TimeSpent)
    last_event: float | None = None

    @property
    def terminal(self) -> bool:
        """Whether nothing will ever start this run again."""
        return self.state in TERMINAL


def fold(events: Sequence[Event], now: float | None = None) -> RunStatus:
    """The status of a run after `events` (in the order of `events.merge`), its clock at `now`.

    `now` defaults to the time of the last event, which makes the fold a function of the ledger.
    """
    folding = _Fold()
    for event in events:
        folding.take(event)
    return folding.result(now)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _seconds(value: Any) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    with contextlib.suppress(OverflowError):
        if math.isfinite(value):
            return float(value)
    return None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


class _Fold:
    """Walks the events once. Time runs in one category at a time, `_bucket`."""

    def __init__(self) -> None:
        self.status = RunStatus()
        self._bucket = "queued_s"
        self._since: float | None = None
        self._spent = {name: 0.0 for name in TimeSpent.__dataclass_fields__}
        self._commits: dict[int, float] = {}
        """For each committed step: kept training seconds when its state was taken."""
        self._trained_to: int | None = None
        self._trained_until: float | None = None
        """The clock when training last ran."""
        self._newest: Token | None = None
        self._refused_at: float | None = None
        """The clock when the scheduler refused the run, until it accepts it."""
        self._signalled = False

    def take(self, event: Event) -> None:
        """Advance the clock to the event and apply it."""
        self._advance(event.time)
        self.status = replace(self.status, last_event=self._since)
        if event.token is not None and self._newest is not None and event.token < self._newest:
            if event.kind == Kind.ATTEMPT_ENDED:
                self._note_end(event)
            return
        self._newest = event.token or self._newest
        handler = getattr(self, f"_on_{event.kind}", None)
        if handler is not None:
            handler(event)

    def result(self, now: float | None) -> RunStatus:
        if now is not None and not self.status.terminal:
            self._advance(now)
        return replace(self.status, time=TimeSpent(**self._spent))

    def _advance(self, to: float) -> None:
        if self._since is None:
            self._since = to
        if to > self._since:
            if not self.status.terminal:
                self._spent[self._bucket] += to - self._since
                if self._bucket == "training_s":
                    self._trained_until = to
            self._since = to

    def _training_at(self, moment: float) -> float:
        """Kept training seconds up to a wall-clock moment shortly before now."""
        late = 0.0 if self._trained_until is None else max(0.0, self._trained_until - moment)
        return max(0.0, self._spent["training_s"] - late)

    def _reach(self, step: int | None) -> None:
        if step is not None:
            self._trained_to = max(step, self._trained_to or 0)
            self.status = replace(self.status, step=step)

    def _on_submitted(self, event: Event) -> None:
        if self._refused_at is not None:
            self._spent["queued_s"] += (self._since or self._refused_at) - self._refused_at
            self._refused_at = None
            self.status = replace(
                self.status,
                state=RunState.PENDING,
                failure_class=None,
                evidence=None,
                ended=None,
            )
        # Without sbatch a submission names a process of the machine: that is no job's id.
        is_job = event.facts.get("cluster", "slurm") == "slurm"
        self.status = replace(
            self.status,
            job_id=_text(event.facts.get("job_id")) if is_job else None,
            array_task_id=_whole(event.facts.get("array_task_id")),
            submitted=self.status.submitted or event.time,
        )

    def _on_submit_failed(self, event: Event) -> None:
        if self.status.attempt is None and not self.status.terminal:
            self._refused_at = self._since
            self.status = replace(
                self.status,
                state=RunState.FAILED,
                failure_class=FailureClass.ENVIRONMENT,
                evidence=_text(event.facts.get("reason")),
                ended=event.time,
            )

    def _on_attempt_started(self, event: Event) -> None:
        if self.status.terminal:
            return
        nodes = event.facts.get("nodes")
        self._end_silent_attempt()
        self._signalled = False
        self._bucket = "starting_s"
        self.status = replace(
            self.status,
            state=RunState.STARTING,
            job_id=_text(event.facts.get("job_id")) or self.status.job_id,
            array_task_id=_whole(event.facts.get("array_task_id")),
            restart_count=_whole(event.facts.get("restart_count")),
            attempt=event.token.attempt if event.token else (self.status.attempt or 0) + 1,
            generation=event.token.generation if event.token else None,
            nodes=tuple(map(str, nodes)) if isinstance(nodes, list) else None,
            started=self.status.started or event.time,
            failure_class=None,
            verdict=None,
            evidence=None,
        )

    def _end_silent_attempt(self) -> None:
        """An attempt before that wrote no end: its coordinator was killed, or its node was lost.

        It counts, or the budget of restarts would never stop a run that takes its first node down.
        After a signal it was Slurm that ended it and started the next one, which is free.
        """
        status = self.status
        if status.attempt is None or status.state not in _UNDER_WAY:
            return
        failure_class = FailureClass.REQUEUED if self._signalled else FailureClass.UNKNOWN
        token = Token(status.attempt, status.generation or 1)
        evidence = f"attempt {status.attempt} ended without a word"
        end = End(token, failure_class, status.committed_step, evidence)
        self.status = replace(status, ends=(*status.ends, end))

    def _on_signal(self, event: Event) -> None:
        self._signalled = True

    def _on_generation_started(self, event: Event) -> None:
        if self.status.terminal:
            return
        self._bucket = "starting_s"
        self.status = replace(
            self.status,
            state=RunState.STARTING,
            generation=event.token.generation if event.token else self.status.generation,
            resume_step=_whole(event.facts.get("resume_step")),
            stragglers=(),
            failure_class=None,
            verdict=None,
            evidence=None,
        )

    def _on_resumed(self, event: Event) -> None:
        step = _whole(event.facts.get("step"))
        if step is None or self.status.terminal:
            return
        self._roll_back(step)
        committed = max(step, self.status.committed_step or 0)
        self.status = replace(
            self.status, resume_step=step, step=step, committed_step=committed or None
        )

    def _on_training_started(self, event: Event) -> None:
        if self.status.terminal:
            return
        first = _whole(event.facts.get("step"))
        if first is not None:
            self._roll_back(first - 1)
        self._bucket = "training_s"
        self.status = replace(self.status, state=RunState.RUNNING)

    def _roll_back(self, step: int) -> None:
        """Everything trained past `step` is lost: its seconds and its steps.

        The seconds also where no step past it is known: a lost node says no last word.
        """
        trained = self._spent["training_s"]
        # A commit may have no event (its writer died with it): then all until now counts as kept.
        kept = 0.0 if step == 0 else min(trained, self._commits.setdefault(step, trained))
        self._spent["training_s"] = kept
        self._spent["lost_s"] += trained - kept
        if self._trained_to is None or self._trained_to <= step:
            self._trained_to = step
            return
        lost_range = (step + 1, self._trained_to)
        self._trained_to = step
        self._commits = {s: at for s, at in self._commits.items() if s <= step}
        self.status = replace(
            self.status, rolled_back=(*self.status.rolled_back, lost_range), step=step
        )

    def _on_checkpoint_committed(self, event: Event) -> None:
        step = _whole(event.facts.get("step"))
        if step is None:
            return
        taken = _seconds(event.facts.get("started"))
        self._commits[step] = self._training_at(event.time if taken is None else taken)
        self._reach(max(step, self.status.step or 0))
        committed = max(step, self.status.committed_step or 0)
        self.status = replace(self.status, committed_step=committed)

    def _on_checkpoint_bad(self, event: Event) -> None:
        step = _whole(event.facts.get("step"))
        if step is not None and step not in self.status.bad_steps:
            self.status = replace(self.status, bad_steps=(*self.status.bad_steps, step))

    def _on_straggler(self, event: Event) -> None:
        rank, ratio = _whole(event.facts.get("rank")), _seconds(event.facts.get("ratio"))
        if rank is None or ratio is None:
            return
        others = [slow for slow in self.status.stragglers if slow.rank != rank]
        if event.facts.get("change") != "ended":
            node, device = _text(event.facts.get("node")), _text(event.facts.get("device"))
            others.append(SlowRank(rank, node, device, ratio))
        ordered = sorted(others, key=lambda slow: slow.rank)
        self.status = replace(self.status, stragglers=tuple(ordered))

    def _on_stop_agreed(self, event: Event) -> None:
        if self.status.terminal:
            return
        self._bucket = "stopping_s"
        self.status = replace(self.status, state=RunState.SAVING)

    def _on_generation_ended(self, event: Event) -> None:
        if self.status.terminal:
            return
        self._reach(_whole(event.facts.get("step")))
        self.status = replace(
            self.status,
            failure_class=_failure_class(event),
            evidence=_text(event.facts.get("evidence")),
        )
        if event.facts.get("verdict") == Verdict.CONTINUE:
            self._note_end(event, went_on=True)
            self._bucket = "starting_s"
            self.status = replace(self.status, state=RunState.STARTING, verdict=Verdict.CONTINUE)
        else:
            self._bucket = "stopping_s"

    def _on_attempt_ended(self, event: Event) -> None:
        if self.status.terminal:
            return
        self._reach(_whole(event.facts.get("step")))
        failure_class, verdict = _failure_class(event), _verdict(event)
        self._note_end(event)
        self._bucket = "queued_s"
        state = terminal_state(failure_class, verdict)
        self.status = replace(
            self.status,
            state=state,
            failure_class=failure_class,
            verdict=verdict,
            evidence=_text(event.facts.get("evidence")),
            ended=event.time if state in TERMINAL else None,
        )

    def _note_end(self, event: Event, *, went_on: bool = False) -> None:
        end = End(
            event.token,
            _failure_class(event),
            self.status.committed_step,
            str(event.facts.get("evidence", "")),
            _text(event.facts.get("action")),
            went_on,
        )
        self.status = replace(self.status, ends=(*_without(self.status.ends, event.token), end))

    def _on_data_skipped(self, event: Event) -> None:
        first = _whole(event.facts.get("first_batch"))
        last = _whole(event.facts.get("last_batch"))
        if first is not None and last is not None and (first, last) not in self._skipped:
            self.status = replace(self.status, skipped_batches=(*self._skipped, (first, last)))

    @property
    def _skipped(self) -> tuple[tuple[int, int], ...]:
        return self.status.skipped_batches

    def _on_batch_skipped(self, event: Event) -> None:
        self.status = replace(self.status, guard_skips=self.status.guard_skips + 1)

    def _on_node_excluded(self, event: Event) -> None:
        node = _text(event.facts.get("node"))
        if node is not None and node not in self.status.excluded:
            self.status = replace(self.status, excluded=(*self.status.excluded, node))

    def _on_cancel_requested(self, event: Event) -> None:
        self.status = replace(self.status, cancel_requested=True)
        if self.status.attempt is None and not self.status.terminal:
            self.status = replace(
                self.status,
                state=RunState.CANCELLED,
                failure_class=FailureClass.CANCELLED,
                verdict=Verdict.STOP,
                ended=event.time,
            )

    def _on_tracking_started(self, event: Event) -> None:
        self.status = replace(self.status, mlflow_run_id=_text(event.facts.get("mlflow_run_id")))

    def _on_measured(self, event: Event) -> None:
        self.status = replace(self.status, measured={**self.status.measured, **event.facts})


_UNDER_WAY = frozenset({RunState.STARTING, RunState.RUNNING, RunState.SAVING})


def _without(ends: tuple[End, ...], token: Token | None) -> tuple[End, ...]:
    """The ends but the one that was assumed for `token`: its word came late, by a clock behind.

    An end that the attempt went on after stays, though no newer token was claimed before the next.
    """
    return tuple(end for end in ends if token is None or end.token != token or end.went_on)


def _failure_class(event: Event) -> FailureClass:
    try:
        return FailureClass(str(event.facts.get("failure_class")))
    except ValueError:
        return FailureClass.UNKNOWN


def _verdict(event: Event) -> Verdict:
    try:
        return Verdict(str(event.facts.get("verdict")))
    except ValueError:
        return Verdict.STOP
