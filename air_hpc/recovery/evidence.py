"""From how the workers of a generation ended to one failure class and one line of evidence.

The first failing rank is found by time, not by who printed last. Two kinds of end are consequences
and count only where there is no other: when one worker dies, the others see their connections break
a moment later (class `network`); and those that hang on for the dead one are killed by their agent.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from air_hpc.recovery.cause import Cause
from air_hpc.recovery.decide import NOT_RETRIED
from air_hpc.rundir.words import FailureClass


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


@dataclass(frozen=True)
class Failure:
    """The end that started it all."""

    failure_class: FailureClass
    evidence: str
    phase: str
    rank: int


def classify(end: WorkerEnd) -> Failure:
    """The class and the line of evidence of one failed worker."""
    where = f"rank {end.rank} on {end.node}"
    words = end.last_words
    if words is not None and words.get("kind") == "error":
        try:
            failure_class = FailureClass(str(words.get("failure_class")))
        except ValueError:
            failure_class = FailureClass.UNKNOWN
        text = f"{words.get('type')}: {words.get('message')}"
        return Failure(failure_class, f"{where}: {text}", end.phase, end.rank)
    status = end.exit_status
    if words is not None and words.get("kind") == "stopped" and words.get("saved") is False:
        text = f"left at step {words.get('step')}, whose state could not be saved"
        return Failure(FailureClass.STORAGE, f"{where}: {text}", end.phase, end.rank)
    if status is not None and status < 0:
        name = signal.Signals(-status).name if -status in _SIGNALS else f"signal {-status}"
        text = f"killed by {name} in phase {end.phase}"
        if end.killed_by_agent:
            text += ", by its agent"
        elif status == -signal.SIGKILL:
            text += " (by hand, or out of memory: see the kernel's log)"
        return Failure(FailureClass.UNKNOWN, f"{where}: {text}", end.phase, end.rank)
    silence = " without a word" if words is None else ""
    text = f"ended with exit status {status} in phase {end.phase}{silence}"
    return Failure(FailureClass.UNKNOWN, f"{where}: {text}", end.phase, end.rank)


_SIGNALS = {int(number) for number in signal.Signals}


def first_failure(ends: Sequence[WorkerEnd]) -> Failure | None:
    """The failure that the others followed from, or None when no worker failed."""
    failed = [end for end in ends if end.failed]
    return classify(min(failed, key=_order)) if failed else None


def _order(end: WorkerEnd) -> tuple[int, float, int]:
    """Causes before consequences, then by time."""
    if end.killed_by_agent and end.exit_status == -signal.SIGKILL:
        weight = 2
    else:
        weight = int(classify(end).failure_class is FailureClass.NETWORK)
    return weight, end.arrived, end.rank


@dataclass(frozen=True)
class GenerationEnd:
    """How a generation ended, as its coordinator saw it.

    `silent` has the nodes that were lost, with the last step each was heard at. `signal_name` asked
    for a stop, whose agreed step is `target`; `committed` is the newest committed step.
    """

    workers: tuple[WorkerEnd, ...]
    silent: Mapping[str, int]
    signal_name: str | None = None
    target: int | None = None
    committed: int | None = None

    @property
    def completed(self) -> bool:
        """Whether every worker did all its steps."""
        return not self.silent and all(worker.finished for worker in self.workers)

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


def classify_generation(end: GenerationEnd, cause: Cause | None) -> tuple[FailureClass, str]:
    """The class of a generation's end and its line of evidence; `cause` is behind its signal.

    A failure that would come again wins over the loss of a node: a program that raises an error
    on one node and hangs another must not be tried again for ever.
    """
    if end.completed:
        alone = len(end.workers) == 1
        words = "the worker finished" if alone else f"all {len(end.workers)} workers finished"
        return FailureClass.COMPLETED, words
    failure = first_failure(end.workers)
    silent = ", ".join(f"{node} (at step {step})" for node, step in sorted(end.silent.items()))
    what = failure.evidence if failure else f"no word from {silent}"
    if cause is not None:
        done = f"stopped at step {end.target}" if end.saved_its_target else f"not saved: {what}"
        if end.target == 0:
            done = "stopped before a step began"
        return cause.failure_class, f"{cause.evidence}; {done}"
    if failure is not None and (failure.failure_class in NOT_RETRIED or not silent):
        return failure.failure_class, failure.evidence
    if silent:
        return FailureClass.NODE_LOST, f"no word from {silent}"
    return FailureClass.UNKNOWN, "workers left without being asked to stop"
