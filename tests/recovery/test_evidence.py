"""The first failure among the ends of a generation's workers."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from air_hpc.recovery.cause import Cause
from air_hpc.recovery.evidence import (
    GenerationEnd,
    WorkerEnd,
    classify,
    classify_generation,
    first_failure,
)
from air_hpc.rundir.words import FailureClass


def error(failure_class: str, **facts: Any) -> dict[str, Any]:
    said = {"type": "RuntimeError", "message": "it broke", "failure_class": failure_class}
    return {"kind": "error", **said, **facts}


def end(rank: int = 0, status: int | None = 1, arrived: float = 0.0, **facts: Any) -> WorkerEnd:
    defaults: dict[str, Any] = {
        "node": f"n{rank // 2 + 1}",
        "phase": "step",
        "done_step": 7,
        "last_words": None,
    }
    return WorkerEnd(rank=rank, exit_status=status, arrived=arrived, **{**defaults, **facts})


def test_finished_and_stopped_are_no_failures() -> None:
    finished = end(0, 0, last_words={"kind": "finished", "step": 7})
    stopped = end(1, 0, last_words={"kind": "stopped", "step": 7, "saved": True})
    assert finished.finished
    assert stopped.stopped
    assert first_failure([finished, stopped]) is None


def test_last_words_without_a_clean_exit_are_a_failure() -> None:
    assert end(0, -6, last_words={"kind": "finished", "step": 7}).failed


def test_a_clean_exit_without_a_word_is_a_failure() -> None:
    failure = first_failure([end(3, 0)])
    assert failure is not None
    assert failure.failure_class is FailureClass.UNKNOWN
    assert "rank 3 on n2" in failure.evidence
    assert "without a word" in failure.evidence


def test_a_stop_whose_state_could_not_be_saved_says_so() -> None:
    words = {"kind": "stopped", "step": 7, "saved": False}
    failure = classify(end(0, 1, last_words=words))
    assert failure.failure_class is FailureClass.STORAGE
    assert "left at step 7, whose state could not be saved" in failure.evidence


def test_a_stop_before_the_first_step_names_no_step() -> None:
    """A run that had resumed from step 500 was once said to be stopped at step 0."""
    left = end(0, 0, last_words={"kind": "stopped", "step": 500, "saved": True})
    stopped = GenerationEnd((left,), {}, signal_name="SIGTERM", target=0, committed=500)
    cause = Cause(FailureClass.PREEMPTED, "SIGTERM")
    assert classify_generation(stopped, cause).evidence == "SIGTERM; stopped before a step began"


def test_an_error_carries_its_class_and_text() -> None:
    failure = classify(end(1, 1, last_words=error("user_error", type="KeyError", message="lr")))
    assert failure.failure_class is FailureClass.USER_ERROR
    assert failure.evidence == "rank 1 on n1: KeyError: lr"


def test_a_class_from_a_newer_worker_is_unknown_here() -> None:
    failure = classify(end(1, 1, last_words=error("cosmic_ray")))
    assert failure.failure_class is FailureClass.UNKNOWN


def test_a_signal_is_named() -> None:
    assert "killed by SIGSEGV in phase load" in classify(end(0, -11, phase="load")).evidence
    assert "out of memory" in classify(end(0, -9)).evidence
    assert "signal 35" in classify(end(0, -35)).evidence


def test_the_first_failure_is_found_by_time_and_not_by_rank() -> None:
    late, early = end(0, 1, arrived=2.0), end(5, 1, arrived=1.0)
    failure = first_failure([late, early])
    assert failure is not None
    assert failure.rank == 5


def test_a_broken_connection_is_a_consequence() -> None:
    broken = end(0, 1, arrived=1.0, last_words=error("network"))
    killed = end(3, -9, arrived=1.5)
    failure = first_failure([broken, killed])
    assert failure is not None
    assert failure.rank == 3


def test_broken_connections_alone_are_the_failure() -> None:
    ends = [end(rank, 1, arrived=3.0 - rank, last_words=error("network")) for rank in range(3)]
    failure = first_failure(ends)
    assert failure is not None
    assert (failure.failure_class, failure.rank) == (FailureClass.NETWORK, 2)


def test_a_worker_killed_by_its_agent_does_not_hide_the_cause() -> None:
    """It hung on for the other one; once it was called the cause, and a checkpoint was blamed."""
    broken = end(1, 1, arrived=1.0, phase="init", last_words=error("network"))
    hung = end(0, -9, arrived=3.0, phase="load", killed_by_agent=True)
    failure = first_failure([broken, hung])
    assert failure is not None
    assert (failure.failure_class, failure.rank) == (FailureClass.NETWORK, 1)


def test_a_worker_killed_by_its_agent_says_so() -> None:
    evidence = classify(end(0, -9, killed_by_agent=True)).evidence
    assert "by its agent" in evidence
    assert "out of memory" not in evidence


def test_an_error_that_arrives_after_the_kill_still_counts() -> None:
    hung = end(0, -9, arrived=3.0, killed_by_agent=True)
    told = end(1, 1, arrived=3.1, killed_by_agent=True, last_words=error("data"))
    failure = first_failure([hung, told])
    assert failure is not None
    assert failure.failure_class is FailureClass.DATA


ends_of_a_world = st.lists(
    st.tuples(
        st.sampled_from([0, 1, -9, -11]), st.floats(0, 5), st.sampled_from(["network", "data", ""])
    ),
    min_size=1,
    max_size=8,
)


@given(facts=ends_of_a_world, order=st.randoms(use_true_random=False))
def test_the_order_in_which_ends_are_listed_says_nothing(facts: list[Any], order: Any) -> None:
    ends = [
        end(rank, status, arrived=arrived, last_words=error(said) if said else None)
        for rank, (status, arrived, said) in enumerate(facts)
    ]
    shuffled = list(ends)
    order.shuffle(shuffled)
    assert first_failure(ends) == first_failure(shuffled)
