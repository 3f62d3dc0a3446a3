"""Worker groups with real processes, by both starters."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from air_hpc.agent import workers
from air_hpc.agent.logs import LineBuffer, NodeLog, node_log_path
from air_hpc.agent.starters import ExecStarter, ForkStarter, Starter, make_starter
from air_hpc.agent.workers import GenerationStart, Worker, WorkerGroup, worker_environment
from air_hpc.config.spec import FailureRule
from air_hpc.recovery.rules import RuleTable
from air_hpc.rundir.layout import RunDir, create_run_dir
from air_hpc.session.page import Word
from tests.agent.groups import (
    DEADLINE_S,
    ROOT,
    STAND_IN,
    THREADED,
    Group,
    environ,
    gone,
    start_of,
    wait_until,
)

JOB_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return create_run_dir(tmp_path, "run")


@pytest.fixture(scope="module", params=["exec", "fork"])
def starter(request: pytest.FixtureRequest) -> Iterator[Starter]:
    made = make_starter(request.param, STAND_IN, environ())
    yield made
    made.close()


@pytest.fixture
def group_of(run: RunDir, starter: Starter) -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def start(ranks: int, **behaviour: Any) -> Group:
        groups.append(Group(run, starter, ranks, STAND_IN, **behaviour))
        return groups[-1]

    yield start
    for group in groups:
        group.close()


def test_workers_finish_with_their_words_and_their_output(
    run: RunDir, group_of: Callable[..., Group]
) -> None:
    group = group_of(2, steps=3, prints=["hello", "world"])
    assert group.listen_to_the_end() == {0: 0, 1: 0}
    for worker in group.workers:
        end = worker.end()
        assert end.pop("oom_killed") in (False, None), "None where no memory group can be read"
        assert end == {
            "rank": worker.rank,
            "exit_status": 0,
            "phase": "step",
            "done_step": 3,
            "last_words": {"kind": "finished", "rank": worker.rank, "step": 3},
            "log_match": [],
            "xids": [],
        }
    group.close()  # waits for the log, which a thread of its own writes
    log = node_log_path(run.generation_dir(1, 1), "n1").read_text().splitlines()
    assert [line for line in log if line.startswith("r1 ")] == ["r1 | hello", "r1 | world"]
    assert len(group.said_by(0, "training_started")) == 1


def test_each_worker_knows_its_place(group_of: Callable[..., Group]) -> None:
    group = group_of(2, steps=1)
    group.listen_to_the_end()
    for rank in (0, 1):
        (facts,) = group.said_by(rank, "measured")
        assert facts["RANK"] == facts["LOCAL_RANK"] == str(rank)
        assert facts["WORLD_SIZE"] == "2"
        assert facts["MASTER_PORT"] == "20001"
        assert facts["pid"] == group.workers[rank].process.pid
    cpus = [set(group.said_by(rank, "measured")[0]["cpus"]) for rank in (0, 1)]
    if len(os.sched_getaffinity(0)) >= 2:
        assert not cpus[0] & cpus[1]


@pytest.mark.parametrize("ahead", [0, 2])
def test_under_the_flag_all_run_to_the_target_and_leave(
    group_of: Callable[..., Group], ahead: int
) -> None:
    group = group_of(2, steps=None)
    group.listen_until(group.training)
    begun = group.set_stop_flag()
    assert begun >= max(worker.page.read(Word.DONE_STEP) for worker in group.workers)
    target = begun + ahead  # another node's workers may be ahead
    group.set_target(target)
    assert group.listen_to_the_end() == {0: 0, 1: 0}
    for worker in group.workers:
        assert worker.last_words == {
            "kind": "stopped", "rank": worker.rank, "step": target, "saved": True,
        }  # fmt: skip
        assert worker.page.read(Word.DONE_STEP) == target


@pytest.mark.parametrize(
    ("at_end", "status"),
    [("raise", 1), ("exit_3", 3), ("exit_text", 1), ("segfault", -signal.SIGSEGV)],
)
def test_exit_statuses_travel(
    run: RunDir, group_of: Callable[..., Group], at_end: str, status: int
) -> None:
    group = group_of(1, steps=1, at_end=at_end)
    assert group.listen_to_the_end() == {0: status}
    words = group.workers[0].end()["last_words"]
    group.close()
    if at_end == "exit_text":
        log = node_log_path(run.generation_dir(1, 1), "n1").read_text()
        assert log == "r0 | no such file\n"
    if at_end == "raise":
        assert (words["type"], words["failure_class"]) == ("KeyError", "user_error")
        assert "traceback" not in words, "a thousand nodes repeat it with every beat"
    else:
        assert words is None


def test_only_the_line_that_a_rule_finds_travels(
    run: RunDir, group_of: Callable[..., Group]
) -> None:
    rules = RuleTable.of({"fabric": FailureRule("network", pattern="port [0-9]+ flapped")})
    lines = [f"line {n}" for n in range(100)]
    printed = ["port 1 flapped", *lines, "port 2 flapped"]
    group = group_of(1, steps=1, at_end="segfault", prints=printed)
    group.listen_to_the_end()
    worker = group.workers[0]
    assert len(worker.tail) == workers.TAIL_LINES
    assert worker.end(rules)["log_match"] == [["fabric", "port 2 flapped"]]
    assert worker.end()["log_match"] == []


def test_the_log_of_a_worker_that_did_well_is_not_searched(group_of: Callable[..., Group]) -> None:
    rules = RuleTable.of({"any": FailureRule("network", pattern="trouble")})
    group = group_of(1, steps=1, prints=["trouble"])
    group.listen_to_the_end()
    assert group.workers[0].end(rules)["log_match"] == []


def test_an_oom_kill_is_of_those_that_ended_since_the_last_count(
    group_of: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([3, 4, 4])
    monkeypatch.setattr(workers, "oom_kills", lambda: next(counts))
    group = group_of(2, steps=None)
    group.listen_until(group.training)
    for worker, expected in zip(group.workers, (True, False), strict=True):
        os.kill(worker.process.pid, signal.SIGKILL)
        group.listen_until(lambda worker=worker: worker.exit_status is not None)  # type: ignore[misc]
        assert worker.end()["oom_killed"] is expected


def test_the_jobs_signals_do_nothing_to_a_worker(group_of: Callable[..., Group]) -> None:
    """Slurm sends them to every process of the step; the agent alone answers."""
    group = group_of(1, steps=None)
    pid = group.workers[0].process.pid
    for number in JOB_SIGNALS:  # at once: also while the interpreter starts
        os.kill(pid, number)
    group.listen_until(group.training)
    for number in JOB_SIGNALS:
        os.kill(pid, number)
    later = group.workers[0].page.read(Word.DONE_STEP) + 20
    group.listen_until(lambda: group.workers[0].page.read(Word.DONE_STEP) > later)
    group.set_target(group.set_stop_flag())
    assert group.listen_to_the_end() == {0: 0}


def test_kill_ends_a_worker_that_does_not_answer(group_of: Callable[..., Group]) -> None:
    group = group_of(1, steps=None)
    group.listen_until(group.training)
    os.kill(group.workers[0].process.pid, signal.SIGSTOP)
    group.kill()
    assert group.listen_to_the_end() == {0: -signal.SIGKILL}


def test_what_a_worker_started_ends_with_it(group_of: Callable[..., Group]) -> None:
    group = group_of(1, steps=1, at_end="leave_a_child")
    group.listen_to_the_end()
    child = next(message["child"] for _, message in group.said if "child" in message)
    wait_until(lambda: gone(child))


@pytest.mark.parametrize("name", ["exec", "fork"])
def test_workers_die_with_a_killed_agent(tmp_path: Path, name: str) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-m", "tests.agent.groups", str(tmp_path), name],
        env=environ(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    with agent:
        worker = int(agent.stdout.readline())
        assert not gone(worker)
        agent.kill()
        wait_until(lambda: gone(worker))


@pytest.mark.parametrize("name", ["exec", "fork"])
def test_the_end_of_a_worker_wakes_the_loop(run: RunDir, name: str) -> None:
    """Its socket closes a moment before it can be reaped: the loop once slept a tick after that."""
    starter = make_starter(name, STAND_IN, environ())
    group = Group(run, starter, 1, STAND_IN, steps=None)
    try:
        group.listen_until(group.training)
        os.kill(group.workers[0].process.pid, signal.SIGKILL)
        while group.running:
            waiting = select.poll()
            for fd in [*group.fds(), *starter.fds()]:
                waiting.register(fd, select.POLLIN)
            assert waiting.poll(1000 * DEADLINE_S)
            group.listen_until(lambda: True)
        assert group.workers[0].exit_status == -signal.SIGKILL
        if name == "fork":
            starter._template.kill()
            wait_until(lambda: starter.ready and starter.fds() == [])  # or the loop would spin
    finally:
        group.close()
        starter.close()


class TestStarters:
    def test_a_command_that_cannot_run_is_an_os_error(self, run: RunDir) -> None:
        with pytest.raises(OSError, match="no-such-python"):
            Group(run, ExecStarter(), 2, ["/no-such-python", "-m", "x"])

    def test_a_template_with_two_threads_refuses_to_fork(self, run: RunDir) -> None:
        starter = ForkStarter(THREADED, environ())
        try:
            with pytest.raises(OSError, match=r"2 threads .* use launch\.starter=exec"):
                Group(run, starter, 1, THREADED)
        finally:
            starter.close()

    def test_a_template_is_ready_once_it_has_imported(self) -> None:
        starter = ForkStarter(STAND_IN, environ())
        try:
            wait_until(lambda: starter.ready)
            assert starter._template.poll() is None
        finally:
            starter.close()

    def test_a_template_that_cannot_import_says_so_at_the_start(self, run: RunDir) -> None:
        missing = [sys.executable, "-m", "tests.agent.no_such_worker"]
        starter = ForkStarter(missing, environ())
        try:
            wait_until(lambda: starter.ready)
            with pytest.raises(OSError, match="template") as raised:
                Group(run, starter, 1, missing)
            assert raised.value.errno == errno.ENOEXEC
        finally:
            starter.close()

    def test_a_killed_template_took_its_workers_with_it(self, run: RunDir) -> None:
        starter = ForkStarter(STAND_IN, environ())
        group = Group(run, starter, 2, STAND_IN, steps=None)
        try:
            group.listen_until(group.training)
            os.kill(starter._template.pid, signal.SIGKILL)
            assert group.listen_to_the_end() == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
            wait_until(lambda: all(gone(worker.process.pid) for worker in group.workers))
        finally:
            group.close()
            starter.close()

    def test_a_killed_template_is_replaced_for_the_next_generation(self, run: RunDir) -> None:
        starter = ForkStarter(STAND_IN, environ())
        try:
            wait_until(lambda: starter.ready)
            os.kill(starter._template.pid, signal.SIGKILL)
            wait_until(lambda: starter._template.poll() is not None)
            starter.renew()
            wait_until(lambda: starter.ready)
            group = Group(run, starter, 1, STAND_IN, steps=3)
            assert group.listen_to_the_end() == {0: 0}
            group.close()
        finally:
            starter.close()

    @pytest.mark.parametrize("ready", [True, False])
    def test_a_template_killed_right_before_a_start_is_worth_another_try(
        self, run: RunDir, ready: bool
    ) -> None:
        starter = ForkStarter(STAND_IN, environ())
        try:
            if ready:
                wait_until(lambda: starter.ready)
            os.kill(starter._template.pid, signal.SIGKILL)
            with pytest.raises(OSError, match="the template process ended") as raised:
                Group(run, starter, 1, STAND_IN)
            assert raised.value.errno == errno.EAGAIN
        finally:
            starter.close()

    def test_what_kills_every_template_is_not_fed_more_of_them(self) -> None:
        starter = ForkStarter(STAND_IN, environ())
        try:
            pids = []
            for _ in range(10):
                pids.append(starter._template.pid)
                starter._template.kill()  # does nothing to one that has ended
                wait_until(lambda: starter._template.poll() is not None)
                starter.renew()
            assert len(set(pids)) == ForkStarter.TEMPLATES
        finally:
            starter.close()

    def test_closing_the_starter_ends_the_template(self) -> None:
        starter = ForkStarter(STAND_IN, environ())
        pid = starter._template.pid
        starter.close()
        assert gone(pid)


def test_compute_times_are_told_when_they_changed(group_of: Callable[..., Group]) -> None:
    group = group_of(2, steps=None)
    assert "compute" not in group.progress()
    first, second = (worker.page for worker in group.workers)
    first.write(Word.COMPUTE_NS, 500)
    first.write(Word.COMPUTE_STEPS, 10)
    assert group.progress()["compute"] == {"0": [500, 10]}
    assert "compute" not in group.progress()
    second.write(Word.COMPUTE_STEPS, 10)
    assert group.progress()["compute"] == {"1": [0, 10]}


def test_a_worker_that_prints_without_end_does_not_hold_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = WorkerGroup.__new__(WorkerGroup)
    group._log = NodeLog(tmp_path / "log")
    endless = Worker(0, None, None, None, 99, LineBuffer())  # type: ignore[arg-type]
    monkeypatch.setattr(os, "read", lambda fd, count: b"again\n")
    group._pump_output(endless)
    monkeypatch.undo()
    group._log.close()
    assert endless.output_fd == 99
    assert (tmp_path / "log").read_bytes().startswith(b"r0 | again\n")


def test_a_start_survives_the_channel() -> None:
    start = start_of(2, resume_steps=(20, 10))
    assert GenerationStart.from_json(start.to_json()) == start


class TestEnvironment:
    def test_caches_lie_on_the_nodes_own_disk(self, run: RunDir) -> None:
        made = worker_environment({"PATH": "/bin"}, run, "/local")
        assert made["TRITON_CACHE_DIR"].startswith(f"/local/air_hpc-{os.getuid()}/")
        assert made["TORCHINDUCTOR_CACHE_DIR"].startswith("/local/")
        assert made["PATH"] == "/bin"

    def test_code_comes_from_the_snapshot_and_only_once(self, run: RunDir) -> None:
        assert "PYTHONPATH" not in worker_environment({}, run, "/local")
        run.code_dir.mkdir()
        made = worker_environment({"PYTHONPATH": "/site"}, run, "/local")
        assert made["PYTHONPATH"] == f"{run.code_dir}:/site"
        assert worker_environment(made, run, "/local")["PYTHONPATH"] == made["PYTHONPATH"]

    def test_every_engine_has_a_command(self) -> None:
        assert workers.worker_command("native", "python") == ["python", "-m", "air_hpc.train"]
