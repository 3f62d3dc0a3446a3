"""Follows a run on this machine: a bar with loss, tokens/s and MFU, what happens as lines above it.

Where the stream is no terminal, a plain line comes every few seconds instead. The run does not
depend on this process: Ctrl-C asks it to save and end, a second Ctrl-C leaves it to that.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from air_hpc.cli.texts import duration, number, rate, ratio, size
from air_hpc.errors import (
    EXIT_DO_NOT_RESTART,
    EXIT_ENVIRONMENT,
    EXIT_OK,
    EnvironmentFailure,
)
from air_hpc.rundir.events import Event, Kind
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.spool import LOSS, MFU, TOKENS_PER_S
from air_hpc.rundir.state import RunStatus
from air_hpc.rundir.words import FailureClass, RunState
from air_hpc.runs.cancel import cancel_runs
from air_hpc.runs.jobs import jobs_of
from air_hpc.runs.status import RunView, view_run
from air_hpc.runs.watch import Watch

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

POLL_S = 0.2
_LINE_EVERY_S = 5.0
_LOST_AFTER_S = 3.0
_LINGER_S = 30.0
"""How long a run's process may take, after the run has ended, to hand its last metrics over."""

EXIT_INTERRUPTED: Final = 130
_ENVIRONMENT = frozenset(
    {
        FailureClass.ENVIRONMENT,
        FailureClass.NODE_LOST,
        FailureClass.NOT_ARRIVED,
        FailureClass.NETWORK,
        FailureClass.STORAGE,
        FailureClass.TIME_LIMIT,
        FailureClass.PREEMPTED,
        FailureClass.UNKNOWN,
    }
)


@dataclass(frozen=True)
class Outcome:
    """How following ended. `left`: the user left the run to itself; `interrupted`: by Ctrl-C."""

    view: RunView
    interrupted: bool = False
    left: bool = False

    @property
    def exit_code(self) -> int:
        """0 finished, 130 ended by Ctrl-C, 93 a verdict not to restart, 1 anything else."""
        if self.interrupted:
            return EXIT_INTERRUPTED
        return exit_code_of(self.view.status)


def exit_code_of(status: RunStatus) -> int:
    """The exit code that a run's end has."""
    if status.state is RunState.FINISHED:
        return EXIT_OK
    if status.state is not RunState.FAILED or status.verdict is None:
        return EXIT_ENVIRONMENT
    return EXIT_ENVIRONMENT if status.failure_class in _ENVIRONMENT else EXIT_DO_NOT_RESTART


class Display(Protocol):
    """Where progress goes."""

    def line(self, text: str) -> None:
        """Say that something happened."""
        ...

    def show(self, watch: Watch, status: RunStatus) -> None:
        """Show how far the run is."""
        ...

    def wait_for(self, what: str) -> None:
        """Show what is waited for after the end."""
        ...


def follow(
    run: RunDir,
    steps: int | None,
    *,
    others: Sequence[RunDir] = (),
    on_stderr: bool = False,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Show the run until it ends, or nothing runs it any more, or until a second Ctrl-C.

    The first Ctrl-C asks it and `others` (what a sweep would start after it) to end.
    """
    stream = sys.stderr if on_stderr else sys.stdout
    watch = Watch(run)
    asked = False
    with _display(steps, stream_is_terminal=stream.isatty(), on_stderr=on_stderr) as display:
        while True:
            try:
                view = _until_end(watch, display, sleep, clock)
                display.wait_for("handing metrics over")
                _linger(watch, sleep, clock)
                return Outcome(view, interrupted=asked)
            except KeyboardInterrupt:
                if asked:
                    display.line(
                        "Left to itself: the run goes on saving. "
                        f"See: python -m air_hpc status {run.path}"
                    )
                    return Outcome(view_run(run), interrupted=True, left=True)
                asked = True
                _ask_to_stop([run, *others], display)


def _ask_to_stop(runs: Sequence[RunDir], display: Display) -> None:
    display.line("Ctrl-C: the run saves its state and ends. Press again to leave it to that.")
    try:
        done = cancel_runs(runs)[0]
    except EnvironmentFailure as error:
        display.line(f"Could not stop it: {error}")
        return
    if not done.asked:
        display.line(f"The run {done.done}")


def _until_end(
    watch: Watch, display: Display, sleep: Callable[[float], None], clock: Callable[[], float]
) -> RunView:
    silent_since: float | None = None
    while True:
        for event in watch.look():
            text = notice(event)
            if text:
                display.line(text)
        status = watch.status()
        display.show(watch, status)
        if status.terminal:
            return view_run(watch.run)
        # Started from here, so what cannot be seen here any more is gone.
        if not jobs_of(watch.events).alive():
            # Its last words may be on their way: look a little longer before it is given up.
            silent_since = clock() if silent_since is None else silent_since
            if clock() - silent_since > _LOST_AFTER_S:
                return view_run(watch.run)
        else:
            silent_since = None
        sleep(POLL_S)


def _linger(watch: Watch, sleep: Callable[[float], None], clock: Callable[[], float]) -> None:
    process = jobs_of(watch.events).process
    deadline = clock() + _LINGER_S
    while process is not None and process.alive() and clock() < deadline:
        sleep(POLL_S)


def notice(event: Event) -> str | None:
    """What a person is told when an event happens; None for what the bar shows anyway."""
    facts = event.facts
    match event.kind:
        case Kind.ATTEMPT_STARTED if event.token is not None and event.token.attempt > 1:
            return f"Attempt {event.token.attempt} starts."
        case Kind.RESUMED:
            lost = facts.get("lost_steps")
            tail = f", {lost} steps are trained again" if lost else ""
            return f"Resumed from the checkpoint of step {facts.get('step')}{tail}."
        case Kind.TRAINING_STARTED:
            return f"Training begins with step {facts.get('step')}."
        case Kind.CHECKPOINT_COMMITTED:
            return f"Saved step {facts.get('step')} ({_saved(event)})."
        case Kind.CHECKPOINT_FAILED:
            return f"Step {facts.get('step')} was not saved: {facts.get('reason')}"
        case Kind.CHECKPOINT_BAD:
            return f"The checkpoint of step {facts.get('step')} is bad: {facts.get('reason')}"
        case Kind.SIGNAL:
            return f"A stop was asked for ({facts.get('name')})."
        case Kind.STOP_AGREED:
            return f"Stopping: all run to step {facts.get('target_step')} and save it."
        case Kind.GENERATION_ENDED if facts.get("failure_class") not in _QUIET_ENDS:
            return f"The workers ended ({facts.get('failure_class')}): {facts.get('evidence')}"
        case Kind.ATTEMPT_ENDED if facts.get("verdict") not in ("stop", None):
            return f"The attempt ended ({facts.get('failure_class')}); next: {facts['verdict']}."
    return None


_QUIET_ENDS = (FailureClass.COMPLETED.value, FailureClass.CANCELLED.value)


def _saved(event: Event) -> str:
    blocking = event.facts.get("blocking_s")
    count = event.facts.get("bytes")
    parts = [size(count) if isinstance(count, int | float) else ""]
    if isinstance(blocking, int | float):
        parts.append(f"training stood still {duration(blocking)}")
    return ", ".join(part for part in parts if part)


def figures(watch: Watch, steps: int | None) -> str:
    """Loss, rate, MFU and the time left, as far as they are known."""
    loss, tokens, mfu = watch.metric(LOSS), watch.metric(TOKENS_PER_S), watch.metric(MFU)
    parts = []
    if loss is not None:
        parts.append(f"loss {number(loss)}")
    if tokens is not None:
        parts.append(f"{rate(tokens)} tokens/s")
    if mfu is not None:
        parts.append(f"MFU {ratio(mfu)}")
    pace = watch.seconds_per_step()
    to_go = 0 if steps is None or watch.last is None else steps - watch.last.step
    if pace is not None and to_go > 0:
        parts.append(f"{duration(to_go * pace)} left")
    return "  ".join(parts)


@contextmanager
def _display(steps: int | None, *, stream_is_terminal: bool, on_stderr: bool) -> Iterator[Display]:
    if not stream_is_terminal:
        yield _Lines(steps, on_stderr)
        return
    from rich.progress import BarColumn, Progress, TextColumn

    from air_hpc.cli.output import console

    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}" if steps else "{task.completed:.0f}"),
        TextColumn("{task.fields[figures]}", markup=False),
    ]
    with Progress(*columns, console=console(stderr=on_stderr), transient=True) as progress:
        yield _Bar(progress, progress.add_task("starting", total=steps, figures=""), steps)


@dataclass
class _Bar:
    progress: Progress
    task: TaskID
    steps: int | None

    def line(self, text: str) -> None:
        self.progress.console.print(text)

    def show(self, watch: Watch, status: RunStatus) -> None:
        done = watch.last.step if watch.last is not None else (status.step or 0)
        self.progress.update(
            self.task,
            completed=done,
            description=str(status.state).lower(),
            figures=figures(watch, self.steps),
        )

    def wait_for(self, what: str) -> None:
        self.progress.update(self.task, description=what, figures="")


class _Lines:
    """For files and pipes: what happens, and a line of figures every few seconds."""

    def __init__(self, steps: int | None, on_stderr: bool) -> None:
        self._steps = steps
        self._stream = sys.stderr if on_stderr else sys.stdout
        self._shown = float("-inf")
        self._step = -1

    def line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def show(self, watch: Watch, status: RunStatus) -> None:
        now = time.monotonic()
        if watch.last is None or watch.last.step == self._step:
            return
        if now - self._shown < _LINE_EVERY_S and not status.terminal:
            return
        self._shown, self._step = now, watch.last.step
        of = f"/{self._steps}" if self._steps is not None else ""
        self.line(f"step {watch.last.step}{of}  {figures(watch, self._steps)}")

    def wait_for(self, what: str) -> None:
        return
