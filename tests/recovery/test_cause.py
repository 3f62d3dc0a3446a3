"""Who ended it: every row of the table, as a real Slurm said it."""

from __future__ import annotations

import pytest

from air_hpc.recovery.cause import SlurmWord, cause_of_stop, slurm_requeues_itself
from air_hpc.rundir.words import FailureClass

OWN = 1
"""SLURM_RESTART_COUNT of this start."""


def word(state: str, restarts: int = OWN, **facts: object) -> SlurmWord:
    return SlurmWord(state, restarts, **facts)  # type: ignore[arg-type]


ROWS = {
    "preempted with grace": (word("RUNNING", preempted=True), FailureClass.PREEMPTED),
    "preempted without grace": (word("COMPLETING", OWN + 1), FailureClass.REQUEUED),
    "preempted, no-requeue": (word("COMPLETING", preempted=True), FailureClass.PREEMPTED),
    "preempted and gone": (word("PREEMPTED"), FailureClass.PREEMPTED),
    "time limit": (word("COMPLETING", reason="TimeLimit"), FailureClass.TIME_LIMIT),
    "timed out and gone": (word("TIMEOUT"), FailureClass.TIME_LIMIT),
    "past its deadline": (word("DEADLINE"), FailureClass.TIME_LIMIT),
    "scontrol requeue": (word("COMPLETING", OWN + 1), FailureClass.REQUEUED),
    "requeued and pending": (word("PENDING", OWN + 1), FailureClass.REQUEUED),
    "node lost": (word("NODE_FAIL"), FailureClass.NODE_LOST),
    "scancel": (word("COMPLETING"), FailureClass.CANCELLED),
    "scancel, gone": (word("CANCELLED"), FailureClass.CANCELLED),
    "a signal by hand": (word("RUNNING"), FailureClass.CANCELLED),
}


@pytest.mark.parametrize("row", ROWS)
def test_after_sigterm_slurms_word_tells_the_cause(row: str) -> None:
    said, expected = ROWS[row]
    cause = cause_of_stop("SIGTERM", said, OWN)
    assert cause.failure_class is expected
    assert cause.evidence.startswith("SIGTERM")
    assert said.state in cause.evidence


@pytest.mark.parametrize("name", ["SIGUSR2", "timer"])
class TestAnnounced:
    def test_a_running_job_is_near_its_limit(self, name: str) -> None:
        assert cause_of_stop(name, word("RUNNING"), OWN).failure_class is FailureClass.TIME_LIMIT

    def test_a_preemption_that_sends_the_user_signal_is_one(self, name: str) -> None:
        cause = cause_of_stop(name, word("RUNNING", preempted=True), OWN)
        assert cause.failure_class is FailureClass.PREEMPTED

    def test_a_scancel_during_the_save_stays_cancelled(self, name: str) -> None:
        assert cause_of_stop(name, word("COMPLETING"), OWN).failure_class is FailureClass.CANCELLED

    def test_the_limit_reached_during_the_save_is_the_limit(self, name: str) -> None:
        said = word("COMPLETING", reason="TimeLimit")
        assert cause_of_stop(name, said, OWN).failure_class is FailureClass.TIME_LIMIT

    def test_it_needs_no_word_of_slurm(self, name: str) -> None:
        assert cause_of_stop(name, None, OWN).failure_class is FailureClass.TIME_LIMIT


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_word_that_cannot_be_read_never_leads_to_a_requeue(name: str) -> None:
    """Nor to a final verdict: a preempted run that Slurm started again was once over by then."""
    cause = cause_of_stop(name, None, OWN)
    assert cause.failure_class is FailureClass.REQUEUED
    assert slurm_requeues_itself(cause.failure_class, None, OWN)


def test_a_first_start_that_was_requeued_is_told_by_its_count() -> None:
    assert cause_of_stop("SIGTERM", word("COMPLETING", 1), 0).failure_class is FailureClass.REQUEUED
    assert (
        cause_of_stop("SIGTERM", word("COMPLETING", 0), 0).failure_class is FailureClass.CANCELLED
    )


class TestWhoRequeues:
    @pytest.mark.parametrize(
        ("version", "itself"),
        [((22, 5), False), ((24, 5), False), ((24, 11), True), ((26, 5), True)],
    )
    def test_a_preempted_job_that_leaves_inside_its_grace(
        self, version: tuple[int, int], itself: bool
    ) -> None:
        said = word("RUNNING", preempted=True, version=version)
        assert slurm_requeues_itself(FailureClass.PREEMPTED, said, OWN) is itself

    def test_an_unknown_version_is_asked(self) -> None:
        said = word("RUNNING", preempted=True)
        assert not slurm_requeues_itself(FailureClass.PREEMPTED, said, OWN)
        assert not slurm_requeues_itself(FailureClass.PREEMPTED, None, OWN)

    def test_no_requeue_jobs_are_asked_for(self) -> None:
        said = word("COMPLETING", preempted=True, version=(26, 5))
        assert not slurm_requeues_itself(FailureClass.PREEMPTED, said, OWN)

    def test_a_requeue_by_hand_is_slurms_own(self) -> None:
        assert slurm_requeues_itself(FailureClass.REQUEUED, word("COMPLETING", OWN + 1), OWN)

    def test_a_lost_node_is_asked_for_unless_slurm_has_seen_it(self) -> None:
        assert not slurm_requeues_itself(FailureClass.NODE_LOST, word("RUNNING"), OWN)
        assert slurm_requeues_itself(FailureClass.NODE_LOST, word("COMPLETING", OWN + 1), OWN)

    def test_the_time_limit_is_asked_for(self) -> None:
        assert not slurm_requeues_itself(FailureClass.TIME_LIMIT, word("RUNNING"), OWN)
