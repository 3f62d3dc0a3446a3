"""The end of an attempt: its class, its verdict, what the batch script is to do, the agents' exit.

What ended a generation is known from its workers, but who sent a signal, and whether the job is
being restarted already, only Slurm knows. It is asked once, in a thread of its own: the answer may
take many seconds, and meanwhile the other agents must go on hearing from the coordinator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from air_hpc.agent.environment import JobContext
from air_hpc.agent.scheduler import Scheduler
from air_hpc.errors import EXIT_DO_NOT_RESTART, EXIT_OK
from air_hpc.plan.frozen import FrozenRun
from air_hpc.recovery.cause import (
    Cause,
    SlurmWord,
    cause_of_stop,
    requeued_already,
    slurm_requeues_itself,
)
from air_hpc.recovery.decide import decide, failures_in_a_row
from air_hpc.recovery.evidence import Classified, GenerationEnd, classify_generation
from air_hpc.recovery.rules import RuleAction, RuleTable
from air_hpc.rundir.atomic import write_atomic
from air_hpc.rundir.events import Kind, read_ledger
from air_hpc.rundir.fence import Token, still_newest
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.state import End, fold
from air_hpc.rundir.words import FailureClass, Verdict

LONGEST_BACK_OFF_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """How the attempt ended for the agents: their exit code, and whether a local one goes on."""

    exit_code: int
    reason: str
    restart_after_s: float | None = None


class Question(Protocol):
    """Something asked of the scheduler."""

    def answer(self) -> tuple[bool, SlurmWord | None]:
        """(whether the answer is there, the answer)."""
        ...


Ask = Callable[[Callable[[], SlurmWord | None]], Question]
"""How a question is put: in a thread; in tests at once."""


class ThreadQuestion:
    """Asks in a thread, so that a scheduler that does not answer holds up nobody."""

    def __init__(self, ask: Callable[[], SlurmWord | None]) -> None:
        self._said: list[SlurmWord | None] = []
        self._thread = threading.Thread(target=lambda: self._said.append(ask()), daemon=True)
        self._thread.start()

    def answer(self) -> tuple[bool, SlurmWord | None]:
        """The answer when it has come; None too when asking failed."""
        if self._thread.is_alive():
            return False, None
        return True, self._said[0] if self._said else None


class Ending:
    """Brings one attempt to its outcome: started once, then polled until the outcome is there."""

    def __init__(
        self,
        context: JobContext,
        run: RunDir,
        frozen: FrozenRun,
        scheduler: Scheduler,
        token: Token,
        history: tuple[End, ...],
        *,
        record: Callable[..., None],
        say: Callable[[str], None],
        ask: Ask = ThreadQuestion,
    ) -> None:
        self._context = context
        self._run = run
        self._spec = frozen.spec
        self._rules = RuleTable.of(frozen.spec.recovery.rules)
        self._scheduler = scheduler
        self._token = token
        self._history = history
        self._record = record
        self._say = say
        self._ask = ask
        self._question: Question | None = None
        self._conclude: Callable[[SlurmWord | None], Outcome] | None = None

    @property
    def started(self) -> bool:
        """Whether the attempt is ending."""
        return self._conclude is not None

    def start_known(
        self,
        failure_class: FailureClass,
        evidence: str,
        committed: int | None,
        *,
        unrecoverable: bool = False,
    ) -> None:
        """End for a reason that needs no asking (only whether Slurm restarts the job does)."""
        self._start(
            lambda word: self._decide(
                word, failure_class, evidence, committed, None, unrecoverable=unrecoverable
            ),
            asks=failure_class is not FailureClass.COMPLETED,
        )

    def start(
        self,
        end: GenerationEnd,
        committed: int | None,
        blame: Callable[[Classified], Classified],
    ) -> None:
        """End as a generation ended. `blame` may turn the failure into its checkpoint's."""

        def conclude(word: SlurmWord | None) -> Outcome:
            cause = None if end.signal_name is None else self._cause(end.signal_name, word)
            found = blame(classify_generation(end, cause, self._rules, word))
            self._record(
                Kind.GENERATION_ENDED,
                step=end.step,
                exits={str(worker.rank): worker.exit_status for worker in end.workers},
                **found.facts(),
            )
            return self._decide(
                word, found.failure_class, found.evidence, committed, end.step, action=found.action
            )

        self._start(conclude, asks=not end.completed)

    def start_signalled(self, signal_name: str, committed: int | None) -> None:
        """End for a signal that came before any worker was started."""

        def conclude(word: SlurmWord | None) -> Outcome:
            cause = self._cause(signal_name, word)
            evidence = f"{cause.evidence}, before training began"
            return self._decide(word, cause.failure_class, evidence, committed, None)

        self._start(conclude, asks=True)

    def poll(self) -> Outcome | None:
        """The outcome, once what had to be asked is answered. Writes verdict and intent then."""
        if self._conclude is None:
            return None
        word = None
        if self._question is not None:
            answered, word = self._question.answer()
            if not answered:
                return None
        return self._conclude(word)

    def _start(self, conclude: Callable[[SlurmWord | None], Outcome], *, asks: bool) -> None:
        if self.started:
            return
        self._conclude = conclude
        if asks and self._context.scheduler == "slurm":
            self._question = self._ask(self._scheduler.word)

    def _cause(self, signal_name: str, word: SlurmWord | None) -> Cause:
        """Who is behind the signal. A local run is stopped by its owner or its own timer."""
        if self._cancel_requested():
            return Cause(FailureClass.CANCELLED, f"{signal_name}; cancelled by its owner")
        if self._context.scheduler == "local":
            if signal_name == "timer":
                return Cause(FailureClass.TIME_LIMIT, "launch.time_limit_min is near")
            return Cause(FailureClass.CANCELLED, f"{signal_name} to the agent of a local run")
        cause = cause_of_stop(signal_name, word, self._context.restart_count)
        unasked = word is None and cause.failure_class is FailureClass.REQUEUED
        if unasked and self._spec.launch.continuation == "chain":
            # The next job of the chain starts whoever sent it: it must not bring back a scancel.
            return Cause(FailureClass.CANCELLED, cause.evidence)
        return cause

    def _cancel_requested(self) -> bool:
        try:
            return fold(read_ledger(self._run).events).cancel_requested
        except OSError as error:
            self._say(f"the ledger could not be read ({error})")
            return False

    def _is_newest(self) -> bool:
        """Whether no newer attempt owns the run; on a disk too full to look, nobody starts one."""
        try:
            return still_newest(self._run, self._token)
        except OSError as error:
            self._say(f"could not look for a newer attempt ({error})")
            return True

    def _decide(
        self,
        word: SlurmWord | None,
        failure_class: FailureClass,
        evidence: str,
        committed: int | None,
        step: int | None,
        *,
        unrecoverable: bool = False,
        action: RuleAction | None = None,
    ) -> Outcome:
        if not self._is_newest():
            return self.fenced(evidence)
        decision = decide(
            failure_class,
            committed,
            self._history,
            self._spec.recovery,
            can_restart=self._spec.launch.continuation != "none",
            unrecoverable=unrecoverable,
            action=action,
        )
        self._record(
            Kind.ATTEMPT_ENDED,
            failure_class=failure_class,
            verdict=decision.verdict,
            reason=decision.reason,
            evidence=evidence,
            step=step,
            committed_step=committed,
        )
        self._say(f"{failure_class}: {evidence}")
        reason = "the run is complete"
        if failure_class is not FailureClass.COMPLETED:
            reason = f"{failure_class}: {decision.verdict} ({decision.reason})"
            self._say(f"verdict: {decision.verdict} ({decision.reason})")
        if decision.verdict is not Verdict.STOP:
            return self._restart(failure_class, word, committed, reason)
        if failure_class is FailureClass.COMPLETED:
            return Outcome(EXIT_OK, reason)
        self._write_intent("stop")
        return Outcome(EXIT_DO_NOT_RESTART, reason)

    def fenced(self, evidence: str) -> Outcome:
        """A newer generation owns the run: leave without a verdict, and commit nothing."""
        self._say(f"fenced off by a newer attempt; leaving ({evidence})")
        self._record(Kind.GENERATION_ENDED, failure_class=FailureClass.FENCED, evidence=evidence)
        return Outcome(EXIT_OK, "fenced off by a newer attempt")

    def _restart(
        self,
        failure_class: FailureClass,
        word: SlurmWord | None,
        committed: int | None,
        reason: str,
    ) -> Outcome:
        if self._context.scheduler == "local":
            failures = failures_in_a_row(failure_class, committed, self._history)
            pause_s = min(LONGEST_BACK_OFF_S, 2.0 ** max(0, failures - 1) - 1)
            return Outcome(EXIT_OK, reason, restart_after_s=pause_s)
        continuation, restarts = self._spec.launch.continuation, self._context.restart_count
        if continuation == "resubmit":
            left_to_slurm = failure_class is FailureClass.REQUEUED
            if not left_to_slurm and not requeued_already(word, restarts):
                self._write_intent("resubmit")
        elif continuation == "requeue" and not slurm_requeues_itself(failure_class, word, restarts):
            self._write_intent("requeue")
        return Outcome(EXIT_OK, reason)

    def _write_intent(self, intent: str) -> None:
        """The batch script reads it once srun has returned, and carries it out."""
        context = self._context
        if context.job_id is None:
            return
        self._record(Kind.REQUEUE_INTENDED, intent=intent)
        path = self._run.intent_file(context.job_id, context.restart_count)
        try:
            write_atomic(path, intent.encode() + b"\n")
        except OSError as error:
            self._say(f"the intent {intent} could not be written: {error}")
