"""Restarts inside the allocation: one generation after another under one attempt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from air_hpc.rundir.events import Kind
from air_hpc.rundir.fence import Token, newest_token
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.state import fold
from air_hpc.rundir.words import FailureClass, RunState, Verdict
from tests.agent.play import BASE as REQUEUES
from tests.agent.play import KILL_WAIT_S, NODES, PREEMPTED, FakeScheduler, Play
from tests.run_builder import build_run

BASE = (*REQUEUES, "recovery.restart=same")


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_run(tmp_path_factory.mktemp("same"), *BASE).run_yaml.read_text()


@pytest.fixture
def one(run: RunDir, same: str, play: Callable[..., Play]) -> Play:
    run.run_yaml.write_text(same)
    started = play()
    started.hello(*NODES)
    return started


def starts(one: Play) -> list[dict[str, Any]]:
    return [message["start"] for node, message in one.socket.of("start") if node == "n1"]


def test_after_a_failure_the_next_generation_starts_on_the_same_nodes(one: Play) -> None:
    one.failed_all("network")
    first, second = starts(one)
    assert (first["token"], second["token"]) == ("1.1", "1.2")
    assert second["ranks"] == first["ranks"]
    assert second["master_port"] != first["master_port"], "the old one may still be taken"
    assert newest_token(one.run) == Token(1, 2)
    ended = one.event(Kind.GENERATION_ENDED)
    assert ended.facts["verdict"] == Verdict.CONTINUE
    assert ended.token == Token(1, 1)
    status = fold(one.events)
    assert (status.state, status.attempt, status.generation) == (RunState.STARTING, 1, 2)
    assert [end.failure_class for end in status.ends] == [FailureClass.NETWORK]
    assert one.scheduler.asked == 0, "what an attempt survives is no business of Slurm's"


def test_the_third_failure_without_progress_stops_the_run_inside_the_attempt(one: Play) -> None:
    one.failed_all("network")
    one.failed_all("network")
    assert len(starts(one)) == 2
    one.wait(1.5)
    assert len(starts(one)) == 3
    one.failed_all("network")
    assert one.end[:2] == (FailureClass.NETWORK, Verdict.STOP)
    assert one.intent() == "stop"


def test_what_an_older_generation_still_says_is_not_the_present_ones(one: Play) -> None:
    one.failed_all("network")
    old = {"rank": 0, "exit_status": 1, "phase": "step", "done_step": 1, "last_words": None}
    message = {"type": "ended", "token": "1.1", "workers": [old]}
    one.coordinator.on_message("n1", message)
    one.wait(3)
    assert one.socket.of("kill") == []


def test_a_lost_node_leaves_too_few_and_the_job_is_requeued(one: Play) -> None:
    one.wait(6, beating=("n1",))
    one.failed("n1", 0, 1, failure_class="network")
    assert one.end[:2] == (FailureClass.NODE_LOST, Verdict.REQUEUE)
    assert one.event(Kind.NODE_LOST).facts["node"] == "n2"


def test_a_lost_node_that_is_heard_again_is_told_to_leave(one: Play) -> None:
    one.wait(6, beating=("n1",))
    one.beat("n2")
    assert "n2" in one.socket.to("leave")
    assert "n1" not in one.socket.to("leave")


def test_a_signal_in_the_pause_between_generations_ends_the_attempt(
    one: Play, play: Callable[..., Play]
) -> None:
    one.scheduler.said = PREEMPTED
    one.failed_all("network")
    one.failed_all("network")
    one.signal("SIGTERM")
    assert one.end[:2] == (FailureClass.PREEMPTED, Verdict.REQUEUE)
    assert "while no worker ran" in one.end[2]
    one.wait(5)
    assert len(starts(one)) == 2


def test_a_node_that_never_heard_of_its_start_does_not_hold_up_the_next(one: Play) -> None:
    one.failed("n1", 0, 1, failure_class="network")
    one.wait(1.5, beating=())
    assert set(one.socket.to("kill")) == set(NODES)
    one.tell("n2", "none_here")
    assert [s["token"] for s in starts(one)] == ["1.1", "1.2"]


def test_a_preemption_is_never_continued_inside_the_allocation(
    one: Play, play: Callable[..., Play]
) -> None:
    one.scheduler.said = PREEMPTED
    one.signal("SIGTERM")
    for node in NODES:
        one.tell(node, "begun", step=6)
    one.failed_all("network")
    assert one.end[0] is FailureClass.PREEMPTED
    assert one.end[1] is Verdict.REQUEUE


def test_nodes_that_send_no_end_after_the_kill_are_given_up(one: Play) -> None:
    one.failed("n1", 0, 1, failure_class="network")
    one.wait(2 + KILL_WAIT_S)
    assert one.event(Kind.NODE_LOST).facts["node"] == "n2"
    assert one.end[:2] == (FailureClass.NODE_LOST, Verdict.REQUEUE)


def test_a_start_after_ends_that_nobody_judged_asks_the_budget_first(
    tmp_path: Path, run: RunDir, same: str, play: Callable[..., Play]
) -> None:
    run.run_yaml.write_text(same)
    for attempt in range(2):
        before = play(restart_count=attempt)
        before.hello(*NODES)
        before.failed_all("network")  # and then its coordinator is killed
    last = play(restart_count=2, scheduler=FakeScheduler())
    assert last.end[1] is Verdict.STOP
