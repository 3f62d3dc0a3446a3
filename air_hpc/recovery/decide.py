"""The verdict after an end, from its class and the run's history.

Rules, in order:

1. completed and cancelled ends are final; user errors, device memory and a wrong environment are
   not retried, since the next try would end the same;
2. ends that are free (preemption, a requeue, a time limit that left a newer committed step) cost
   nothing, however many they are;
3. `max_no_progress` ends in a row that were not free, without a newer committed step, stop the
   run: it fails at the same place;
4. more than `max_failures` ends that were not free stop it too.
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


@dataclass(frozen=True)
class Decision:
    """A verdict and why."""

    verdict: Verdict
    reason: str


def decide(
    failure_class: FailureClass,
    committed_step: int | None,
    history: Sequence[End],
    budget: RecoverySpec,
    *,
    can_restart: bool = True,
    unrecoverable: bool = False,
    action: RuleAction | None = None,
) -> Decision:
    """The verdict for an attempt that ends now; `history` has the earlier ends, oldest first.

    `can_restart` is False where the config asks for no continuation; `unrecoverable` marks an end
    that no restart mends (a recorded checkpoint is gone). `action` is what the rule that gave the
    class asks for: `stop`, or `restart` and `exclude`, which also retry a class that is not.
    """
    final = failure_class in (FailureClass.COMPLETED, FailureClass.CANCELLED)
    if final or (failure_class in NOT_RETRIED and action is None):
        return Decision(Verdict.STOP, f"{failure_class} is not retried")
    if action == "stop":
        return Decision(Verdict.STOP, f"{failure_class} is not retried: its rule says stop")
    if unrecoverable:
        return Decision(Verdict.STOP, "no restart can mend this")
    if not can_restart:
        return Decision(Verdict.STOP, "launch.continuation=none")
    in_a_row = failures_in_a_row(failure_class, committed_step, history)
    if in_a_row == 0:
        return Decision(Verdict.REQUEUE, f"{failure_class} costs no budget")
    if in_a_row >= budget.max_no_progress:
        return Decision(
            Verdict.STOP,
            f"{in_a_row} ends in a row without a newer committed step "
            f"(recovery.max_no_progress={budget.max_no_progress})",
        )
    failures = 1 + sum(not free for free in _free_ends(history))
    if failures > budget.max_failures:
        return Decision(
            Verdict.STOP, f"{failures} failures (recovery.max_failures={budget.max_failures})"
        )
    return Decision(Verdict.REQUEUE, f"failure {failures} of {budget.max_failures}")


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
