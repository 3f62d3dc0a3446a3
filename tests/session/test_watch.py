"""What a worker's own thread answers, and that it disturbs nobody."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from air_hpc.session import watch
from air_hpc.session.messages import INSPECT, MAX_BYTES, Message, decode, encode, socket_pair
from air_hpc.session.page import NONE, Page, Word, begin_dump, read_dump
from air_hpc.session.watch import Membership, reduce_trace, start_watch

DEADLINE_S = 60.0


def operation(name: str, number: int, **facts: Any) -> dict[str, Any]:
    """An entry as torch 2.13's flight recorder has it."""
    return {
        "process_group": [name, f"mesh_{name}"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": "gloo:all_reduce",
        "state": "scheduled",
        "retired": True,
        "time_created_ns": number,
        **facts,
    }


@pytest.fixture
def ends() -> Any:
    ours, theirs = socket_pair()
    ours.settimeout(DEADLINE_S)
    theirs.settimeout(0.05)  # far shorter than the thread waits
    page = Page.create()
    thread = start_watch(theirs, 5, page.fd)
    yield ours, theirs, thread
    ours.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "it ends with its agent"
    theirs.close()
    page.close()


def ask(agent: socket.socket, question: int) -> dict[str, Any]:
    agent.send(encode(INSPECT, {"question": question}))
    answer = decode(agent.recv(MAX_BYTES))
    assert answer is not None
    return answer


def waits_for_ever(until: threading.Event) -> None:
    until.wait()


def test_it_answers_with_the_stacks_of_the_other_threads(ends: Any) -> None:
    agent, _, _ = ends
    until = threading.Event()
    other = threading.Thread(target=waits_for_ever, args=(until,), name="stuck")
    other.start()
    try:
        answer = ask(agent, 7)
    finally:
        until.set()
        other.join()
    assert (answer["kind"], answer["rank"], answer["question"]) == (Message.INSPECTED, 5, 7)
    main, _, rest = answer["stacks"].partition("\n\n")
    assert main.startswith("Thread MainThread (most recent call first):\n")
    assert " in test_it_answers_with_the_stacks_of_the_other_threads\n" in main
    assert "Thread stuck (" in rest
    assert " in waits_for_ever\n" in rest
    assert watch.THREAD_NAME not in answer["stacks"]


def test_it_answers_again_and_after_what_it_does_not_know(ends: Any) -> None:
    agent, _, _ = ends
    agent.send(b"no message")
    agent.send(encode("another kind", {}))
    time.sleep(0.1)  # longer than the time-out of the worker's end
    assert [ask(agent, number)["question"] for number in (1, 2)] == [1, 2]


def test_what_the_worker_says_meanwhile_is_not_mixed_with_the_answers(ends: Any) -> None:
    agent, worker, _ = ends
    agent.send(encode(INSPECT, {"question": 1}))
    worker.send(encode("note", {"rank": 5}))
    kinds = {decode(agent.recv(MAX_BYTES))["kind"] for _ in range(2)}  # type: ignore[index]
    assert kinds == {"note", Message.INSPECTED}


def test_without_torch_there_are_no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert watch.collectives() == []


def test_a_torch_that_is_half_imported_costs_the_groups_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())  # type: ignore[arg-type]
    assert watch.collectives() == []


class TestReduceTrace:
    def test_the_newest_collective_and_the_one_in_flight(self) -> None:
        entries = [operation("dp", n, retired=n < 5) for n in (1, 2, 3, 4, 5)]
        (group,) = reduce_trace(entries, {"dp": Membership("mesh_dp", (0, 2))})
        assert group == {
            "group": "mesh_dp(0,2)",
            "sequence": 5,
            "in_flight": "all_reduce #5",
            "newest": ["all_reduce #3", "all_reduce #4", "all_reduce #5"],
        }

    def test_an_operation_that_nccl_calls_completed_is_not_in_flight(self) -> None:
        entries = [operation("dp", 1, retired=False, state="completed")]
        assert reduce_trace(entries, {})[0]["in_flight"] is None

    def test_point_to_point_operations_are_shown_and_not_counted(self) -> None:
        entries = [
            operation("pp", 3),
            operation(
                "pp", 3, is_p2p=True, p2p_seq_id=9, retired=False, profiling_name="nccl:recv"
            ),
        ]
        (group,) = reduce_trace(entries, {})
        assert (group["sequence"], group["in_flight"]) == (3, "recv #9")

    def test_a_group_that_the_recorder_has_forgotten_counts_by_itself(self) -> None:
        memberships = {"a": Membership("a", (0, 1), 4), "b": Membership("b", (0, 1))}
        assert [(g["group"], g["sequence"]) for g in reduce_trace([], memberships)] == [
            ("a(0,1)", 4)
        ]

    def test_parallel_groups_of_an_axis_have_different_names(self) -> None:
        labels = {
            watch._label("mesh_dp", ranks)
            for ranks in [(0, 1), (2, 3), tuple(range(0, 64, 2)), tuple(range(1, 64, 2))]
        }
        assert len(labels) == 4
        assert all(len(label) < 60 for label in labels)

    def test_the_latest_used_come_first_and_no_more_than_fit(self) -> None:
        entries = [operation(f"g{n}", n + 1) for n in range(40)]
        found = reduce_trace(entries, {})
        assert len(found) == watch.MOST_GROUPS
        assert found[0]["group"] == "mesh_g39"


def test_a_dump_lies_behind_the_words_of_the_page() -> None:
    page = Page.create()
    os.write(page.fd, b"one stack")
    assert read_dump(page.fd, 100) == b"one stack"
    begin_dump(page.fd)
    assert read_dump(page.fd, 100) == b""
    os.write(page.fd, b"another")
    assert read_dump(page.fd, 4) == b"anot"
    assert page.read(Word.BEGUN_STEP) == NONE
    assert page.read(Word.STOP_FLAG) == 0
    page.close()
