"""The verdict after an end, from its class and the run's history.

Rules, in order:

1. completed and cancelled ends are final; user errors, device memory and a wrong environment are
   not retried, since the next try would end the same;
2. ends that are free (preemption, a requeue, a time limit that left a newer committed step) cost
   nothing, however many they are;
3. `max_no_progress` ends in a row that were not free, without a newer committed step, stop the
   run: it fails at the same place;
4. more than `max_unknown` ends that nobody could name, or `max_failures` others that were not
   free, stop it too;
5. what is retried goes on inside the allocation where it can, after a back-off that grows with the
   ends in a row; else the job is requeued, without the nodes that are to be avoided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from air_hpc.config.spec import RecoverySpec
from air_hpc.recovery.rules import RuleAction
from air_hpc.rundir.state import End
from air_hpc.rundir.words import FREE, FailureClass, Verdict

NOT_RETRIED = frozenset(
    {
        FailureClass.COMPLETED,
        FailureClass.CANCELLED,
        FailureClass.USER_ERROR,
        FailureClass.DEVICE_MEMORY,
        FailureClass.ENVIRONMENT,
    }
)
LONGEST_BACK_OFF_S = 60.0


@dataclass(frozen=True)
class Decision:
    """A verdict and why; `delay_s` is the back-off before the next generation or local attempt."""

    verdict: Verdict
    reason: str
    delay_s: float = 0.0


def decide(
    failure_class: FailureClass,
    committed_step: int | None,
    history: Sequence[End],
    budget: RecoverySpec,
    *,
    can_continue: bool = False,
    can_restart: bool = True,
    unrecoverable: bool = False,
    avoids_nodes: bool = False,
    action: RuleAction | None = None,
) -> Decision:
    """The verdict for an end; `history` has the earlier ends of the run, oldest first.

    `can_continue`: whether the allocation can carry another generation. `can_restart` is False
    where the config asks for no continuation; `unrecoverable` marks an end that no restart mends
    (a recorded checkpoint is gone). `avoids_nodes`: nodes are to be excluded. `action` is what the
    rule that gave the class asks for: `stop`, or `restart` and `exclude`, which also retry a class
    that is not retried by itself.
    """
    final = failure_class in (FailureClass.COMPLETED, FailureClass.CANCELLED)
    if final or (failure_class in NOT_RETRIED and action is None):
        return Decision(Verdict.STOP, f"{failure_class} is not retried")
    if action == "stop":
        return Decision(Verdict.STOP, f"{failure_class} is not retried: its rule says stop")
    if unrecoverable:
        return Decision(Verdict.STOP, "no restart can mend this")
    in_a_row = failures_in_a_row(failure_class, committed_step, history)
    over = _over_budget(failure_class, in_a_row, history, budget) if in_a_row else None
    if over is not None:
        return Decision(Verdict.STOP, over)
    cost = _cost(failure_class, history, budget) if in_a_row else f"{failure_class} costs no budget"
    delay_s = back_off_s(in_a_row)
    if can_continue and failure_class not in FREE:
        return Decision(Verdict.CONTINUE, cost, delay_s)
    if not can_restart:
        return Decision(Verdict.STOP, "launch.continuation=none")
    verdict = Verdict.EXCLUDE_AND_REQUEUE if avoids_nodes else Verdict.REQUEUE
    return Decision(verdict, cost, delay_s)


def back_off_s(in_a_row: int) -> float:
    """The pause before the next try: none after the first failure, then 1, 3, 7 ... seconds."""
    return min(LONGEST_BACK_OFF_S, 2.0 ** max(0, in_a_row - 1) - 1)


def _over_budget(
    failure_class: FailureClass, in_a_row: int, history: Sequence[End], budget: RecoverySpec
) -> str | None:
    if in_a_row >= budget.max_no_progress:
        return (
            f"{in_a_row} ends in a row without a newer committed step "
            f"(recovery.max_no_progress={budget.max_no_progress})"
        )
    spent, allowed, key = _spent(failure_class, history, budget)
    return f"{spent} failures (recovery.{key}={allowed})" if spent > allowed else None


def _cost(failure_class: FailureClass, history: Sequence[End], budget: RecoverySpec) -> str:
    spent, allowed, key = _spent(failure_class, history, budget)
    return f"failure {spent} of {allowed} (recovery.{key})"


def _spent(
    failure_class: FailureClass, history: Sequence[End], budget: RecoverySpec
) -> tuple[int, int, str]:
    """How many ends of this one's kind were not free, with it; how many may be, by which key."""
    unknown = failure_class is FailureClass.UNKNOWN
    spent = 1 + sum(
        not free and (end.failure_class is FailureClass.UNKNOWN) == unknown
        for end, free in zip(history, _free_ends(history), strict=True)
    )
    if unknown:
        return spent, budget.max_unknown, "max_unknown"
    return spent, budget.max_failures, "max_failures"


def failures_in_a_row(
    failure_class: FailureClass, committed: int | None, history: Sequence[End]
) -> int:
    """How many ends in a row, this one included, were not free and brought no newer commit."""
    before = history[-1].committed_step if history else None
    if _is_free(failure_class, committed, before):
        return 0
    return 1 + _without_progress(committed, history)


def _is_free(failure_class: FailureClass, committed: int | None, before: int | None) -> bool:
    """Whether an end costs no budget. A time limit does where it left no time for a newer commit:
    the next start under the same limit would end the same."""
    if failure_class is FailureClass.TIME_LIMIT:
        return (committed or 0) > (before or 0)
    return failure_class in FREE


def _free_ends(history: Sequence[End]) -> list[bool]:
    """For each end of the history whether it was free."""
    befores = [None, *(end.committed_step for end in history)]
    return [
        _is_free(end.failure_class, end.committed_step, before)
        for end, before in zip(history, befores, strict=False)
    ]


def _without_progress(committed_step: int | None, history: Sequence[End]) -> int:
    """How many of the last ends were not free and saw a commit at least as new as now's.

    "At least": where the newest checkpoint went bad since, an older one is the newest now, and
    committing again what was committed before is no progress.
    """
    count = 0
    for end, free in zip(reversed(history), reversed(_free_ends(history)), strict=True):
        if (committed_step or 0) > (end.committed_step or 0):
            break
        if not free:
            count += 1
    return count
