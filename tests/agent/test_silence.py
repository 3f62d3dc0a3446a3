"""Workers that hang: found overdue, looked at, and told apart, with real processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from air_hpc.agent import silence
from air_hpc.agent.channel import Message
from air_hpc.agent.environment import JobContext
from air_hpc.agent.inspect import Inspection, Subject, find_py_spy, process_state, top_of
from air_hpc.agent.node import NodeAgent
from air_hpc.agent.silence import stacks_path
from air_hpc.agent.starters import ExecStarter, ForkStarter, Starter
from air_hpc.config.spec import HangSpec, RecoverySpec
from air_hpc.recovery.hang import RankReport, blame
from air_hpc.rundir.layout import RunDir, create_run_dir
from air_hpc.session.page import Word
from tests.agent.groups import STAND_IN, Group, environ, start_of, wait_until

QUICK = HangSpec(factor=1, step_s=0.5, first_step_s=60)
GLOO = [sys.executable, "-m", "tests.agent.gloo_stand_in"]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return create_run_dir(tmp_path, "run")


@pytest.fixture
def group_of(run: RunDir) -> Iterator[Callable[..., Group]]:
    made: list[tuple[Group, Starter]] = []

    def start(
        ranks: int, argv: list[str] = STAND_IN, *, fork: bool = False, **behaviour: Any
    ) -> Group:
        starter = ForkStarter(argv, environ()) if fork else ExecStarter()
        made.append((Group(run, starter, ranks, argv, hang=QUICK, **behaviour), starter))
        return made[-1][0]

    yield start
    for group, starter in made:
        group.kill()
        group.listen_to_the_end()
        group.close()
        starter.close()


def overdue_ranks(group: Group) -> set[int]:
    return {late["rank"] for late in group.progress().get("overdue", ())}


def inspected(group: Group, *silent: int) -> list[RankReport]:
    """The reports of an inspection that all answered but the `silent`.

    On a starved machine an answer may come too late for one inspection, or a worker may be asked
    before it falls silent: then another is begun.
    """
    found: list[RankReport] = []

    def done() -> bool:
        group.inspect(time.monotonic())
        found[:] = group.inspected() or ()
        return bool(found) and all(r.answered == (r.rank not in silent) for r in found)

    group.listen_until(done)
    return [RankReport.from_json(report.to_json()) for report in found]


def stacks(run: RunDir) -> str:
    path = stacks_path(run.generation_dir(1, 1), "n1")
    assert path.stat().st_mode & 0o777 == 0o600
    return path.read_text()


@pytest.mark.parametrize("with_py_spy", [True, False])
def test_a_worker_asleep_in_its_step_is_overdue_and_its_stack_is_written(
    run: RunDir,
    group_of: Callable[..., Group],
    monkeypatch: pytest.MonkeyPatch,
    with_py_spy: bool,
) -> None:
    if not with_py_spy:
        monkeypatch.setattr(silence, "find_py_spy", lambda: None)
    elif find_py_spy() is None:
        pytest.skip("py-spy is not installed")
    group = group_of(2, hangs=5)
    group.listen_until(lambda: overdue_ranks(group) == {1})
    (late,) = group.progress()["overdue"]
    assert (late["phase"], late["step"]) == ("step", 5)
    assert late["for_s"] > late["limit_s"] >= QUICK.step_s
    reports = inspected(group)
    found = blame(reports)
    assert (found.rank, found.node, found.patience_s) == (1, "n1", 0)
    assert "rank 1 on n1 is silent at step 5 in phase step: it lies behind" in found.evidence
    assert "it is at fall_asleep (" in found.evidence
    assert "fall_asleep" in stacks(run)


def test_a_worker_that_holds_the_interpreters_lock_gives_a_stack_and_no_answer(
    run: RunDir,
    group_of: Callable[..., Group],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(silence, "find_py_spy", lambda: None)
    group = group_of(2, hangs=5, holds_lock=True)
    group.listen_until(lambda: overdue_ranks(group) == {1})
    reports = inspected(group, 1)
    found = blame(reports)
    assert found.rank == 1
    assert "it does not answer, while others do" in found.evidence
    assert "it is at hold_the_lock (" in found.evidence
    assert "did not answer" in stacks(run)
    assert group.running, "to look at a worker must not end it"


def test_the_silent_rank_of_a_gloo_world_is_named_from_the_collectives(
    run: RunDir, group_of: Callable[..., Group], tmp_path: Path
) -> None:
    """First one asleep between two collectives, then another one stopped in a collective."""
    store = str(tmp_path / "store")
    group = group_of(4, GLOO, fork=True, store=store, sleeps=[2, 6])
    group.listen_until(lambda: overdue_ranks(group) == {0, 1, 2, 3})
    reports = inspected(group)
    asleep = blame(reports)
    assert asleep.rank == 2
    # Rank 3 waits for it in their pair, and so is behind too; 0 and 1 wait for both.
    assert reports[3].in_flight is not None
    assert "it has not gone past #5 of group" in asleep.evidence
    assert "others wait in all_reduce #" in asleep.evidence
    assert "it is at oversleep (" in asleep.evidence
    same_step = [replace(r, begun=6, done=5, phase="step") for r in reports]
    assert blame(same_step).rank == 2, "the steps alone do not tell them apart"
    # What the file says of the collectives is read by people.
    assert "waits in all_reduce #" in stacks(run)

    os.kill(group.workers[1].process.pid, signal.SIGSTOP)
    group.listen_until(lambda: process_state(group.workers[1].process.pid)[0] == "T")
    reports = inspected(group, 1)
    stopped = blame(reports)
    assert (stopped.rank, stopped.patience_s) == (1, 0)
    assert "its process is stopped (SIGSTOP); the others wait in all_reduce #" in (stopped.evidence)


def test_a_worker_before_its_session_is_looked_at_and_not_killed(
    run: RunDir, group_of: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal that asks for stacks would end a process that does not catch it yet."""
    monkeypatch.setattr(silence, "find_py_spy", lambda: None)
    group = group_of(1, [sys.executable, "-S", "-c", "import time; time.sleep(10000)"])
    inspected(group, 0)
    assert "no stack could be had" in stacks(run)
    assert group.running


def test_a_stop_that_waits_for_its_target_is_no_hang(group_of: Callable[..., Group]) -> None:
    group = group_of(1, steps=None)
    group.listen_until(group.training)
    group.set_stop_flag()
    until = time.monotonic() + 3 * QUICK.step_s
    group.listen_until(lambda: time.monotonic() > until)
    assert not overdue_ranks(group)
    group.set_target(group.workers[0].page.read(Word.BEGUN_STEP))
    assert group.listen_to_the_end() == {0: 0}


def test_an_inspection_of_workers_that_have_ended_reports_nobody(
    group_of: Callable[..., Group],
) -> None:
    group = group_of(1, steps=1)
    group.listen_to_the_end()
    group.inspect(time.monotonic())
    reports: list[list[RankReport]] = []
    group.listen_until(lambda: (told := group.inspected()) is not None and not reports.append(told))
    assert reports == [[]]


def test_an_answer_that_was_cut_to_fit_its_packet_is_taken_as_it_is(tmp_path: Path) -> None:
    me = Subject(0, os.getpid(), "step", 2, 1, 9.0, 5.0, -1)
    inspection = Inspection("n1", [me], tmp_path / "stacks", py_spy=None)
    inspection.heard(0, {"groups": "… cut", "stacks": "… cut"})
    wait_until(lambda: inspection.poll() is not None)
    (report,) = inspection.poll() or ()
    assert (report.answered, report.groups, report.top) == (True, (), None)


class Uplink:
    """Keeps what a node sends."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def of(self, kind: str) -> list[Message]:
        return [message for message in self.sent if message["type"] == kind]


def told_overdue(uplink: Uplink) -> list[int]:
    """Who the newest heartbeat says is overdue."""
    beats = uplink.of("heartbeat")
    return [late["rank"] for late in beats[-1].get("overdue", ())] if beats else []


def test_a_node_tells_who_is_overdue_and_reports_when_it_is_asked(run: RunDir) -> None:
    uplink = Uplink()
    node = NodeAgent(
        JobContext("slurm", "n1", 0, ("n1",), "7", None, None, 0, None),
        run,
        RecoverySpec(heartbeat_interval_s=0.1, lease_s=1000, hang=QUICK),
        uplink,
        {"type": "hello"},
        ExecStarter(),
        STAND_IN,
        environ(hangs=3),
        start_timeout_s=60,
        say=lambda text: None,
        on_coordinator_lost=lambda: True,
    )

    def turn(done: Callable[[], Any]) -> bool:
        node.pump()
        node.tick()
        return bool(done())

    start = start_of(2)
    token = str(start.token)
    try:
        node.on_message({"type": "welcome"})
        node.on_message({"type": "inspect", "token": token})
        assert uplink.of("inspected") == [{"type": "inspected", "token": token, "reports": []}]
        node.on_message({"type": "start", "start": start.to_json()})
        wait_until(lambda: turn(lambda: told_overdue(uplink) == [1]))
        node.on_message({"type": "inspect", "token": token})
        wait_until(lambda: turn(lambda: len(uplink.of("inspected")) == 2))
    finally:
        node.on_message({"type": "kill", "token": token})
        wait_until(lambda: turn(lambda: node.group is None or not node.group.running))
        node.close()
    answer = json.loads(json.dumps(uplink.of("inspected")[1]))
    assert answer["token"] == token
    assert len(json.dumps(answer["reports"])) < 2 * 1024
    assert [report["rank"] for report in answer["reports"]] == [0, 1]


class TestTopOf:
    def test_py_spy(self) -> None:
        text = (
            "Process 7: python -m x\nPython v3.11.7\n\n"
            'Thread 7 (idle): "MainThread"\n    wait (torch/distributed/c10d.py:12)\n'
            "    main (x.py:3)\n"
            'Thread 9 (idle): "watch"\n    poll (session/watch.py:1)\n'
        )
        assert top_of(text) == "wait (distributed/c10d.py:12) < main (x.py:3)"

    def test_the_workers_own_thread(self) -> None:
        text = 'Thread other (most recent call first):\n  File "/a/b/z.py", line 1 in run\n'
        text += 'Thread MainThread (most recent call first):\n  File "/a/b/y.py", line 9 in f\n'
        text += '  File "/a/b/x.py", line 3 in main\n\nThread other:\n'
        assert top_of(text) == "f (b/y.py:9) < main (b/x.py:3)"

    def test_faulthandler(self) -> None:
        text = 'Thread 0x01 (most recent call first):\n  File "/a/w.py", line 1 in poll\n\n'
        text += 'Current thread 0x02 (most recent call first):\n  File "/a/y.py", line 9 in f\n'
        assert top_of(text) == "f (a/y.py:9)"

    @pytest.mark.parametrize("text", ["", "nonsense", "Thread 1:\n"])
    def test_nothing_in_what_is_no_stack(self, text: str) -> None:
        assert top_of(text) is None
