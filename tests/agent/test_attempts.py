"""Whole agents of two nodes with real training workers, over one run directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from air_hpc.errors import EXIT_BAD_INPUT, EXIT_ENVIRONMENT, EXIT_OK
from air_hpc.rundir.commit import committed_steps
from air_hpc.rundir.events import Kind
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.state import fold
from air_hpc.rundir.words import FailureClass, RunState, Verdict
from tests.agent.allocation import JOB, Allocation
from tests.agent.groups import ROOT, gone, wait_until
from tests.run_builder import build_run

pytestmark = pytest.mark.torch

WITHOUT_END = "train.steps=1000000"


@pytest.fixture
def run_with(tmp_path: Path) -> Callable[..., RunDir]:
    def build(*overrides: str) -> RunDir:
        return build_run(
            tmp_path / "runs",
            "cluster=slurm",
            "launch.nodes=2",
            "launch.starter=fork",
            "checkpoint.interval_steps=100",
            "recovery.heartbeat_timeout_s=10",
            "recovery.lease_s=12",
            *overrides,
        )

    return build


@pytest.fixture
def allocate(tmp_path: Path) -> Iterator[Callable[..., Allocation]]:
    made: list[Allocation] = []

    def start(run: RunDir, restart_count: int = 0, **facts: Any) -> Allocation:
        folder = tmp_path / f"start-{restart_count}"
        made.append(Allocation(folder, run, restart_count, **facts))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_two_nodes_train_to_the_end(
    run_with: Callable[..., RunDir], allocate: Callable[..., Allocation]
) -> None:
    run = run_with("train.steps=4")
    one = allocate(run)
    assert one.wait() == [EXIT_OK, EXIT_OK], one.logs()
    status = fold(one.events())
    assert (status.state, status.step) == (RunState.FINISHED, 4)
    assert status.nodes == ("n1", "n2")
    assert committed_steps(run) == [4]
    assert one.intent == "done"
    again = allocate(run, 1, nodes=("n1",))
    wait_until(lambda: "nothing to do" in again.logs())
    again.start("n2")
    assert again.wait() == [EXIT_OK, EXIT_OK], "a late agent hears of the end, too"
    assert again.events() == []


def test_a_preempted_run_stops_at_one_step_and_resumes_from_it(
    run_with: Callable[..., RunDir], allocate: Callable[..., Allocation]
) -> None:
    run = run_with(WITHOUT_END)
    one = allocate(run)
    one.wait_for(Kind.TRAINING_STARTED)
    one.say("RUNNING", PreemptTime="2026-11-30T10:29:16")
    one.signal("n2", signal.SIGTERM)
    assert one.wait() == [EXIT_OK, EXIT_OK], one.logs()
    (end,) = one.of(Kind.ATTEMPT_ENDED)
    assert end.facts["failure_class"] == FailureClass.PREEMPTED, one.logs()
    assert end.facts["verdict"] == Verdict.REQUEUE
    target = one.of(Kind.STOP_AGREED)[0].facts["target_step"]
    assert committed_steps(run)[0] == target
    assert one.of(Kind.GENERATION_ENDED)[0].facts["exits"] == {"0": 0, "1": 0}
    assert one.intent == "requeue"

    two = allocate(run, 1)
    assert two.wait_for(Kind.RESUMED).facts["step"] == target
    assert two.wait_for(Kind.TRAINING_STARTED).facts["step"] == target + 1
    two.say("COMPLETING", Restarts="1")
    two.signal("n1", signal.SIGTERM)
    two.wait()
    assert fold(two.events()).state is RunState.CANCELLED, two.logs()
    assert two.intent == "stop"


def test_a_killed_worker_is_replaced_within_the_allocation(
    run_with: Callable[..., RunDir], allocate: Callable[..., Allocation]
) -> None:
    run = run_with(WITHOUT_END, "checkpoint.interval_steps=5")
    one = allocate(run)
    committed = one.wait_for(Kind.CHECKPOINT_COMMITTED).facts["step"]
    agents = [agent.pid for agent in one.agents.values()]
    _, worker = one.workers_of("n2")
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: len(one.of(Kind.TRAINING_STARTED)) == 2)
    ended, started = one.of(Kind.GENERATION_ENDED)[0], one.of(Kind.GENERATION_STARTED)[1]
    assert ended.facts["verdict"] == Verdict.CONTINUE, one.logs()
    assert "SIGKILL" in ended.facts["evidence"]
    assert "rank 1 on n2" in ended.facts["evidence"]
    assert started.facts["resume_step"] >= committed
    assert one.of(Kind.TRAINING_STARTED)[1].facts["step"] == started.facts["resume_step"] + 1
    assert [agent.pid for agent in one.agents.values() if agent.poll() is None] == agents
    assert len(one.of(Kind.ATTEMPT_STARTED)) == 1


def test_a_stopped_worker_is_named_and_replaced_within_the_allocation(
    run_with: Callable[..., RunDir], allocate: Callable[..., Allocation]
) -> None:
    run = run_with(WITHOUT_END, "checkpoint.interval_steps=5", "recovery.hang.step_s=15")
    one = allocate(run)
    one.wait_for(Kind.CHECKPOINT_COMMITTED)
    _, worker = one.workers_of("n2")
    os.kill(worker, signal.SIGSTOP)
    wait_until(lambda: len(one.of(Kind.TRAINING_STARTED)) == 2)
    (found,) = one.of(Kind.HANG_FOUND)
    assert (found.facts["rank"], found.facts["node"]) == (1, "n2"), one.logs()
    assert "its process is stopped" in found.facts["evidence"]
    assert one.of(Kind.GENERATION_ENDED)[0].facts["failure_class"] == FailureClass.HANG
    stacks = sorted(run.generation_dir(1, 1).glob("stacks-*.txt"))
    assert [path.name for path in stacks] == ["stacks-n1.txt", "stacks-n2.txt"]
    assert "rank 0" in stacks[0].read_text()


def test_a_killed_node_is_lost_and_the_job_requeued(
    run_with: Callable[..., RunDir], allocate: Callable[..., Allocation]
) -> None:
    one = allocate(run_with(WITHOUT_END))
    one.wait_for(Kind.TRAINING_STARTED)
    workers = one.workers_of("n2")
    one.signal("n2", signal.SIGKILL)
    wait_until(lambda: all(gone(pid) for pid in workers))
    assert one.wait("n1") == [EXIT_OK], one.logs()
    (end,) = one.of(Kind.ATTEMPT_ENDED)
    assert end.facts["failure_class"] == FailureClass.NODE_LOST, one.logs()
    assert "n2" in end.facts["evidence"]
    assert one.intent == "requeue"
    assert one.requeues == []


def test_a_stopped_node_is_lost_and_leaves_when_it_wakes(
    run_with: Callable[..., RunDir], allocate: Callable[..., Allocation]
) -> None:
    one = allocate(run_with(WITHOUT_END))
    one.wait_for(Kind.TRAINING_STARTED)
    workers = one.workers_of("n2")
    one.signal("n2", signal.SIGSTOP)
    assert one.wait("n1") == [EXIT_OK], one.logs()
    (end,) = one.of(Kind.ATTEMPT_ENDED)
    assert end.facts["failure_class"] == FailureClass.NODE_LOST, one.logs()
    one.say("COMPLETING", Restarts="1")
    one.signal("n2", signal.SIGCONT)
    # It hears of the end, or finds its lease run out, whichever it looks at first.
    assert one.wait("n2")[0] in (EXIT_OK, EXIT_ENVIRONMENT), one.logs()
    assert all(gone(pid) for pid in workers)
    assert one.requeues == [], "Slurm has requeued it already"


def test_when_the_first_node_dies_a_survivor_asks_for_the_requeue(
    run_with: Callable[..., RunDir], allocate: Callable[..., Allocation]
) -> None:
    one = allocate(run_with(WITHOUT_END))
    one.wait_for(Kind.TRAINING_STARTED)
    workers = one.workers_of("n2")
    one.signal("n1", signal.SIGKILL)
    assert one.wait("n2") == [EXIT_ENVIRONMENT], one.logs()
    assert all(gone(pid) for pid in workers)
    assert one.requeues == [JOB]
    (end,) = one.of(Kind.ATTEMPT_ENDED)
    assert end.facts["failure_class"] == FailureClass.NODE_LOST
    assert "no word from the coordinator on n1" in end.facts["evidence"]
    assert fold(one.events()).state is RunState.REQUEUED


@pytest.mark.parametrize("words", [[], ["/nonexistent"], ["one", "two"]])
def test_what_is_no_run_directory_is_refused_in_one_line(words: list[str]) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "air_hpc.agent", *words]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_BAD_INPUT
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
