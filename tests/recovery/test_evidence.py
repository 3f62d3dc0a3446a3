"""The first failure among the ends of a generation's workers."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from air_hpc.config.compose import Composer
from air_hpc.recovery.cause import Cause
from air_hpc.recovery.evidence import (
    GenerationEnd,
    SeenXid,
    WorkerEnd,
    classify,
    classify_generation,
    first_failure,
)
from air_hpc.recovery.rules import LogMatch, RuleTable
from air_hpc.rundir.words import FailureClass

TABLE = RuleTable.of(Composer().compose([]).recovery.rules)


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


def test_a_broken_connection_that_the_table_names_is_a_consequence_too() -> None:
    """Also where the worker gave no class of its own."""
    told = {"kind": "error", "type": "RuntimeError", "message": "Connection closed by peer"}
    broken = end(0, 1, arrived=1.0, last_words=told)
    aborted = end(3, -6, arrived=1.5)
    failure = first_failure([broken, aborted], TABLE)
    assert failure is not None
    assert failure.rank == 3
    assert first_failure([broken], TABLE) == classify(broken, TABLE)
    assert classify(broken, TABLE).rule == "gloo_lost_peer"


def test_an_oom_kill_is_told_from_one_by_hand() -> None:
    killed = classify(end(0, -9, oom_killed=True), TABLE)
    assert (killed.failure_class, killed.rule) == (FailureClass.HOST_MEMORY, "oom_kill")
    assert "by the kernel's oom-killer" in killed.evidence
    by_hand = classify(end(0, -9, oom_killed=False), TABLE)
    assert by_hand.failure_class is FailureClass.UNKNOWN
    assert "no oom-kill was counted" in by_hand.evidence


def test_a_worker_that_its_agent_killed_is_no_oom_kill() -> None:
    told = classify(end(0, -9, oom_killed=True, killed_by_agent=True), TABLE)
    assert told.failure_class is FailureClass.UNKNOWN


def test_a_line_of_the_log_stands_in_the_evidence() -> None:
    line = "[rank4]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580)"
    failure = classify(end(4, -6, log_matches=(LogMatch("nccl_timeout", line),)), TABLE)
    assert failure.failure_class is FailureClass.NETWORK
    assert f"killed by SIGABRT in phase step; its log says: {line}" in failure.evidence


def test_an_xid_is_named_with_its_device() -> None:
    told = {"kind": "error", "type": "RuntimeError", "message": "CUDA error: unknown error"}
    failure = classify(end(1, 1, last_words=told, xids=(SeenXid(79, "GPU-1"),)), TABLE)
    assert failure.failure_class is FailureClass.DEVICE
    assert (failure.action, failure.device) == ("exclude", "GPU-1")
    assert "the driver logged Xid 79 of GPU-1" in failure.evidence


def test_an_error_in_user_code_names_its_line() -> None:
    frame = {"file": "/run/code/model.py", "line": 12, "function": "forward", "origin": "user"}
    told = {"kind": "error", "type": "RuntimeError", "message": "odd\nshape", "frame": frame}
    failure = classify(end(1, 1, last_words=told), TABLE)
    assert failure.rule == "traceback_in_user_code"
    assert failure.evidence == "rank 1 on n1: RuntimeError: odd shape (/run/code/model.py:12)"


def test_a_report_of_a_node_is_read_back() -> None:
    report = {
        "rank": 2,
        "exit_status": -6,
        "phase": "step",
        "done_step": 4,
        "last_words": None,
        "log_match": [["nccl", "NCCL error"]],
        "oom_killed": False,
        "xids": [48, {"xid": 79, "device": "GPU-1"}],
    }
    read = WorkerEnd.from_report(report, "n2", 1.0, killed_by_agent=False)
    assert read.log_matches == (LogMatch("nccl", "NCCL error"),)
    assert read.xids == (SeenXid(48), SeenXid(79, "GPU-1"))
    older = {key: report[key] for key in list(report)[:5]}
    assert WorkerEnd.from_report(older, "n2", 1.0, killed_by_agent=False).xids == ()


def test_what_the_ledger_is_told_names_rule_and_place() -> None:
    told = {"kind": "error", "type": "RuntimeError", "message": "CUDA out of memory"}
    ended = GenerationEnd((end(5, 1, last_words=told),), {})
    facts = classify_generation(ended, None, TABLE).facts()
    assert facts["failure_class"] is FailureClass.DEVICE_MEMORY
    assert (facts["rule"], facts["rank"], facts["node"]) == ("device_memory_text", 5, "n3")
    assert facts["hint"]
    preempted = classify_generation(ended, Cause(FailureClass.PREEMPTED, "SIGTERM"), TABLE)
    assert preempted.action is None
    assert (preempted.facts()["rule"], preempted.facts()["rank"]) == (None, None)


def test_a_rule_that_retries_does_not_hide_a_lost_node() -> None:
    told = {"kind": "error", "type": "RuntimeError", "message": "misaligned address"}
    ended = GenerationEnd((end(0, 1, last_words=told),), {"n9": 3})
    assert classify_generation(ended, None, TABLE).failure_class is FailureClass.NODE_LOST
    told["message"] = "CUDA out of memory"
    assert classify_generation(ended, None, TABLE).failure_class is FailureClass.DEVICE_MEMORY


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


def test_workers_that_never_started_completed_nothing() -> None:
    """A generation that was killed before it began once counted as finished, and the run too."""
    ended = GenerationEnd((), {}, never_started=4)
    assert not ended.completed
    found = classify_generation(ended, None)
    assert found.failure_class is FailureClass.UNKNOWN
    assert "4 workers were ended before they were started" in found.evidence
    preempted = Cause(FailureClass.PREEMPTED, "SIGTERM")
    assert classify_generation(ended, preempted).failure_class is FailureClass.PREEMPTED
