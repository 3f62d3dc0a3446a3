"""The end of a generation and of its attempt: class, verdict, and what comes of it.

A verdict to continue is handed back to the coordinator, which starts the next generation; any other
one ends the attempt, with a word for the batch script and an exit code for the agents.

What ended a generation is known from its workers, but who sent a signal, and whether the job is
being restarted already, only Slurm knows. It is asked once, in a thread of its own: the answer may
take many seconds, and meanwhile the other agents must go on hearing from the coordinator. A failure
that the attempt survives is no business of Slurm's: nobody is asked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from air_hpc.agent.avoiding import Avoiding
from air_hpc.agent.environment import JobContext
from air_hpc.agent.scheduler import Scheduler
from air_hpc.errors import EXIT_DO_NOT_RESTART, EXIT_ENVIRONMENT, EXIT_OK
from air_hpc.plan.frozen import FrozenRun
from air_hpc.recovery.cause import (
    Cause,
    SlurmWord,
    cause_of_stop,
    requeued_already,
    slurm_requeues_itself,
)
from air_hpc.recovery.decide import Decision, decide
from air_hpc.recovery.evidence import Classified, GenerationEnd, classify_generation
from air_hpc.recovery.rules import RuleAction, RuleTable
from air_hpc.rundir.atomic import write_atomic
from air_hpc.rundir.events import Kind, read_ledger
from air_hpc.rundir.fence import Token, still_newest
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.state import End, fold
from air_hpc.rundir.words import FailureClass, Verdict


@dataclass(frozen=True)
class Outcome:
    """How the attempt ended for the agents: their exit code, and whether a local one goes on."""

    exit_code: int
    reason: str
    restart_after_s: float | None = None


class Question(Protocol):
    """Something asked of the scheduler."""

    def answer(self) -> tuple[bool, Any]:
        """(whether the answer is there, the answer)."""
        ...


Ask = Callable[[Callable[[], Any]], Question]
"""How a question is put: in a thread; in tests at once."""


class ThreadQuestion:
    """Asks in a thread, so that a scheduler that does not answer holds up nobody."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._said: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._said.append(ask()), daemon=True)
        self._thread.start()

    def answer(self) -> tuple[bool, Any]:
        """The answer when it has come; None too when asking failed."""
        if self._thread.is_alive():
            return False, None
        return True, self._said[0] if self._said else None


class Ending:
    """The ends of one attempt's generations, one after another, and of the attempt.

    Started at each end, then polled until its outcome (or the decision to continue) is there.
    `token` is the live generation's.
    """

    def __init__(
        self,
        context: JobContext,
        run: RunDir,
        frozen: FrozenRun,
        scheduler: Scheduler,
        token: Token,
        history: tuple[End, ...],
        avoiding: Avoiding,
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
        self.token = token
        self._history = history
        self._avoiding = avoiding
        self._avoid: str | None = None
        """What the next start is to avoid, as a line of the intent."""
        self.avoids_nodes = False
        """Whether nodes are newly held to be at fault: the verdict says so."""
        self._record = record
        self._say = say
        self._ask = ask
        self._question: Question | None = None
        self._conclude: Callable[[SlurmWord | None], Outcome | Decision] | None = None
        self.final = False
        """Whether the attempt is ending, whatever is decided."""

    def forget_last(self) -> None:
        """The last end of the history is being told again: it must not count twice."""
        self._history = self._history[:-1]

    def start_known(
        self,
        failure_class: FailureClass,
        evidence: str,
        committed: int | None,
        *,
        unrecoverable: bool = False,
    ) -> None:
        """End for a reason that needs no asking (only whether Slurm restarts the job does)."""
        self.final = True

        def conclude(word: SlurmWord | None) -> Outcome:
            if not self._is_newest():
                return self.fenced(evidence)
            decision = self._decide(failure_class, committed, unrecoverable=unrecoverable)
            return self._finish(decision, word, failure_class, evidence, committed, None)

        self._start(conclude, asks=failure_class is not FailureClass.COMPLETED)

    def start(
        self,
        end: GenerationEnd,
        committed: int | None,
        blame: Callable[[Classified], Classified],
        *,
        can_continue: Callable[[], bool],
        unrecoverable: bool = False,
    ) -> None:
        """End as a generation ended. `blame` may turn the failure into its checkpoint's.

        `can_continue` says, when it is decided, whether the allocation carries another generation.
        """

        def conclude(word: SlurmWord | None) -> Outcome | Decision:
            cause = None if end.signal_name is None else self._cause(end.signal_name, word)
            found = blame(classify_generation(end, cause, self._rules, word))
            failure_class, evidence = found.failure_class, found.evidence
            if not self._is_newest():
                return self.fenced(evidence)
            decision = self._decide(
                failure_class,
                committed,
                can_continue=can_continue(),
                unrecoverable=unrecoverable and found.by_failure,
                action=found.action,
            )
            self._record(
                Kind.GENERATION_ENDED,
                verdict=decision.verdict,
                reason=decision.reason,
                step=end.step,
                committed_step=committed,
                exits={str(worker.rank): worker.exit_status for worker in end.workers},
                **found.facts(),
            )
            if decision.verdict is not Verdict.CONTINUE:
                return self._finish(
                    decision, word, failure_class, evidence, committed, end.step, found.action
                )
            self._history = (
                *self._history,
                End(self.token, failure_class, committed, evidence, found.action),
            )
            self._say(f"{failure_class}: {evidence}")
            pause = f" after {decision.delay_s:g} s" if decision.delay_s else ""
            self._say(f"verdict: go on in this allocation{pause} ({decision.reason})")
            return decision

        continues = can_continue() and end.signal_name is None
        self._start(conclude, asks=not end.completed and not continues)

    def start_signalled(self, signal_name: str, committed: int | None) -> None:
        """End for a signal that came before any worker was started."""

        self.final = True

        def conclude(word: SlurmWord | None) -> Outcome:
            cause = self._cause(signal_name, word)
            evidence = f"{cause.evidence}, while no worker ran"
            if not self._is_newest():
                return self.fenced(evidence)
            decision = self._decide(cause.failure_class, committed)
            return self._finish(decision, word, cause.failure_class, evidence, committed, None)

        self._start(conclude, asks=True)

    def poll(self) -> Outcome | Decision | None:
        """The outcome, or the decision to continue, once what had to be asked is answered.

        Writes verdict and intent then.
        """
        if self._conclude is None:
            return None
        word = None
        if self._question is not None:
            answered, word = self._question.answer()
            if not answered:
                return None
        conclude, self._conclude, self._question = self._conclude, None, None
        return conclude(word)

    def _start(
        self, conclude: Callable[[SlurmWord | None], Outcome | Decision], *, asks: bool
    ) -> None:
        if self._conclude is not None:
            return
        self._conclude = conclude
        if asks and self._context.scheduler == "slurm":
            self._question = self._ask(self._inquire)

    def _inquire(self) -> SlurmWord | None:
        """All that has to be asked of Slurm at an end; runs in the question's thread."""
        word = self._scheduler.word()
        self._avoid = self._avoiding.line()
        return word

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
            return still_newest(self._run, self.token)
        except OSError as error:
            self._say(f"could not look for a newer attempt ({error})")
            return True

    def _decide(
        self,
        failure_class: FailureClass,
        committed: int | None,
        *,
        can_continue: bool = False,
        unrecoverable: bool = False,
        action: RuleAction | None = None,
    ) -> Decision:
        return decide(
            failure_class,
            committed,
            self._history,
            self._spec.recovery,
            can_continue=can_continue,
            can_restart=self._spec.launch.continuation != "none",
            unrecoverable=unrecoverable,
            avoids_nodes=self.avoids_nodes,
            action=action,
        )

    def _finish(
        self,
        decision: Decision,
        word: SlurmWord | None,
        failure_class: FailureClass,
        evidence: str,
        committed: int | None,
        step: int | None,
        action: RuleAction | None = None,
    ) -> Outcome:
        self.final = True
        self._record(
            Kind.ATTEMPT_ENDED,
            failure_class=failure_class,
            verdict=decision.verdict,
            reason=decision.reason,
            evidence=evidence,
            step=step,
            committed_step=committed,
            action=action,
        )
        self._say(f"{failure_class}: {evidence}")
        reason = "the run is complete"
        if failure_class is not FailureClass.COMPLETED:
            reason = f"{failure_class}: {decision.verdict} ({decision.reason})"
            self._say(f"verdict: {decision.verdict} ({decision.reason})")
        if decision.verdict is not Verdict.STOP:
            return self._restart(failure_class, word, decision, reason)
        if failure_class is FailureClass.COMPLETED:
            # srun may never return where a node was lost on the way; the script must not wait.
            self._write_intent("done")
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
        decision: Decision,
        reason: str,
    ) -> Outcome:
        if self._context.scheduler == "local":
            return Outcome(EXIT_OK, reason, restart_after_s=decision.delay_s)
        continuation, restarts = self._spec.launch.continuation, self._context.restart_count
        if continuation == "resubmit":
            left_to_slurm = failure_class is FailureClass.REQUEUED
            wanted = not left_to_slurm and not requeued_already(word, restarts)
        else:
            wanted = continuation == "requeue"
            wanted = wanted and not slurm_requeues_itself(failure_class, word, restarts)
        if wanted and not self._write_intent(continuation):
            # Agents that fail without a word are started again by the script itself.
            return Outcome(EXIT_ENVIRONMENT, reason)
        return Outcome(EXIT_OK, reason)

    def _write_intent(self, intent: str) -> bool:
        """The batch script reads it once srun has returned, and carries it out.

        False where the file system does not take it.
        """
        context = self._context
        if context.job_id is None:
            return True
        self._record(Kind.REQUEUE_INTENDED, intent=intent)
        path = self._run.intent_file(context.job_id, context.restart_count)
        try:
            lines = [intent] if self._avoid is None else [intent, self._avoid]
            write_atomic(path, "".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            self._say(f"the intent {intent} could not be written: {error}")
            return False
        return True
