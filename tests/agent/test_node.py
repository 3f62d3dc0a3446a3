"""A node's agent: when it says hello, how it keeps its lease, when it leaves."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from air_hpc.agent.channel import Message
from air_hpc.agent.environment import JobContext
from air_hpc.agent.keeper import EXIT_STAND_BY
from air_hpc.agent.node import NodeAgent
from air_hpc.config.spec import RecoverySpec
from air_hpc.errors import EXIT_ENVIRONMENT
from air_hpc.rundir.fence import Token
from air_hpc.rundir.layout import create_run_dir
from air_hpc.rundir.words import FailureClass
from tests.agent.groups import start_of

RECOVERY = RecoverySpec(heartbeat_interval_s=0.5, heartbeat_timeout_s=5, lease_s=15)


class SlowStarter:
    """A starter that a test makes ready, and that cannot start anything."""

    def __init__(self) -> None:
        self.ready = True
        self.error = OSError("no worker here")

    def start(self, start: object) -> Any:
        raise self.error

    def renew(self) -> None:
        pass

    def close(self) -> None:
        pass


class Node:
    """The second node of two, played by hand."""

    def __init__(self, folder: Path) -> None:
        self.now = 100.0
        self.sent: list[Message] = []
        self.said: list[str] = []
        self.lost = 0
        self.given_up = False
        self.starter = SlowStarter()
        self.disowned = False
        context = JobContext("slurm", "n2", 1, ("n1", "n2"), "7", None, None, 0, None)
        self.agent = NodeAgent(
            context,
            create_run_dir(folder, "run"),
            RECOVERY,
            self,
            {"type": "hello"},
            self.starter,
            ["python", "-m", "worker"],
            {},
            start_timeout_s=60,
            say=self.said.append,
            on_coordinator_lost=self._lost,
            disowned=lambda: self.disowned,
            clock=lambda: self.now,
        )

    def _lost(self) -> bool:
        self.lost += 1
        return not self.given_up

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def of(self, kind: str) -> list[Message]:
        return [message for message in self.sent if message["type"] == kind]

    def wait(self, seconds: float, *, acknowledged: bool = True) -> None:
        until = self.now + seconds
        while self.now < until and self.agent.exit_code is None:
            self.now += 0.25
            before = len(self.sent)
            self.agent.tick()
            for message in self.sent[before:]:
                if acknowledged and message["type"] == "heartbeat":
                    self.agent.on_message({"type": "ack", "sequence": message["sequence"]})


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_hello_is_repeated_until_it_is_answered(node: Node) -> None:
    node.wait(3)
    assert len(node.of("hello")) > 3
    node.agent.on_message({"type": "welcome"})
    before = len(node.of("hello"))
    node.wait(3)
    assert len(node.of("hello")) == before
    assert len(node.of("heartbeat")) > 3


def test_no_hello_before_workers_can_be_started_without_delay(node: Node) -> None:
    """A template that imported longer than the heartbeat time-out once made its node a lost one."""
    node.starter.ready = False
    node.wait(30)
    assert node.sent == []
    node.starter.ready = True
    node.wait(0.5)
    assert node.of("hello")


def test_a_template_that_never_gets_ready_is_named(node: Node) -> None:
    node.starter.ready = False
    node.wait(61)
    assert node.agent.exit_code == EXIT_ENVIRONMENT
    assert "forked from was not ready" in node.said[-1]


def test_a_coordinator_that_never_answers_is_given_up_after_it_could_have_ended(
    node: Node,
) -> None:
    """Lost before it welcomed anybody, it once left its job running with no one in it."""
    node.wait(61)
    assert "the coordinator on n1 did not answer" in node.said[-1]
    assert node.agent.exit_code is None
    assert node.lost == 0
    node.wait(5)
    assert node.agent.exit_code == EXIT_ENVIRONMENT
    assert node.lost == 1


def test_a_coordinator_that_answers_at_the_last_moment_is_joined(node: Node) -> None:
    node.wait(61)
    node.agent.on_message({"type": "welcome"})
    node.wait(10)
    assert node.agent.exit_code is None
    assert node.lost == 0


def test_acknowledged_heartbeats_keep_the_lease(node: Node) -> None:
    node.agent.on_message({"type": "welcome"})
    node.wait(100)
    assert node.agent.exit_code is None


def test_without_acknowledgement_for_a_lease_the_node_leaves(node: Node) -> None:
    node.agent.on_message({"type": "welcome"})
    node.wait(10)
    node.wait(14, acknowledged=False)
    assert node.agent.exit_code is None
    node.wait(2, acknowledged=False)
    assert node.agent.exit_code == EXIT_ENVIRONMENT
    assert node.lost == 1


def test_a_node_that_was_given_up_leaves_to_stand_by(node: Node) -> None:
    """By the coordinator's word, or by the ledger where no word arrives."""
    node.given_up = True
    node.agent.on_message({"type": "welcome"})
    node.wait(30, acknowledged=False)
    assert (node.agent.exit_code, node.lost) == (EXIT_STAND_BY, 1)


def test_a_stall_of_our_own_is_not_held_against_the_coordinator(node: Node) -> None:
    """A job that was suspended, or whose disk hung for a lease, once ended without a verdict."""
    node.agent.on_message({"type": "welcome"})
    node.wait(5)
    node.now += 60
    node.wait(10, acknowledged=False)
    assert node.agent.exit_code is None
    node.wait(10, acknowledged=False)
    assert node.agent.exit_code == EXIT_ENVIRONMENT


def test_a_node_that_has_left_says_nothing_more(node: Node) -> None:
    node.agent.on_message({"type": "welcome"})
    node.wait(20, acknowledged=False)
    sent = list(node.sent)
    node.now += 30
    node.agent.tick()
    assert node.sent == sent
    assert node.lost == 1


def test_a_late_acknowledgement_extends_the_lease_from_when_the_beat_was_sent(node: Node) -> None:
    node.agent.on_message({"type": "welcome"})
    node.wait(1, acknowledged=False)
    first = node.of("heartbeat")[0]["sequence"]
    node.wait(12, acknowledged=False)
    node.agent.on_message({"type": "ack", "sequence": first})
    node.wait(3, acknowledged=False)
    assert node.agent.exit_code == EXIT_ENVIRONMENT


def test_an_acknowledgement_of_no_beat_keeps_nothing(node: Node) -> None:
    node.agent.on_message({"type": "welcome"})
    node.wait(14, acknowledged=False)
    node.agent.on_message({"type": "ack", "sequence": 999_999})
    node.wait(2, acknowledged=False)
    assert node.agent.exit_code == EXIT_ENVIRONMENT


def test_workers_that_cannot_be_started_are_reported(node: Node) -> None:
    node.agent.on_message({"type": "start", "start": start_of(2).to_json()})
    (message,) = node.of("start_failed")
    assert message["reason"] == "no worker here"
    assert message["failure_class"] == FailureClass.ENVIRONMENT
    assert node.agent.group is None
    node.agent.pump()
    node.agent.on_message({"type": "welcome"})
    node.wait(1)


@pytest.mark.parametrize(
    ("number", "failure_class"),
    [
        (errno.ENOENT, FailureClass.ENVIRONMENT),
        (errno.ENOMEM, FailureClass.HOST_MEMORY),
        (errno.EPIPE, FailureClass.UNKNOWN),
        (errno.EMFILE, FailureClass.UNKNOWN),
    ],
)
def test_only_a_command_that_nobody_can_run_is_the_environments_fault(
    node: Node, number: int, failure_class: FailureClass
) -> None:
    """A template that died as it was to fork once ended the run for good."""
    node.starter.error = OSError(number, "it broke")
    node.agent.on_message({"type": "start", "start": start_of(2).to_json()})
    assert node.of("start_failed")[0]["failure_class"] == failure_class


def test_a_template_that_does_not_get_ready_again_fails_the_start(node: Node) -> None:
    """A generation whose only node waited for its template once waited for ever: it beat, and had
    no worker that could be overdue."""
    node.agent.on_message({"type": "welcome"})
    node.starter.ready = False
    node.agent.on_message({"type": "start", "start": start_of(2).to_json()})
    node.wait(59)
    assert node.of("start_failed") == []
    assert node.of("heartbeat")[-1]["token"] == "1.1"
    node.wait(2)
    assert "not ready" in node.of("start_failed")[0]["reason"]
    assert node.agent.exit_code is None


def test_a_start_that_is_said_again_starts_nothing_twice(node: Node) -> None:
    node.agent.on_message({"type": "welcome"})
    node.wait(1)
    assert node.of("heartbeat")[-1]["token"] is None
    start = start_of(2)
    node.agent.group = group = SimpleNamespace(token=start.token, close=pytest.fail)  # type: ignore[assignment]
    node.agent.on_message({"type": "start", "start": start.to_json()})
    assert node.agent.group is group
    assert node.of("start_failed") == []


def test_a_stop_before_its_start_was_heard_is_not_answered(node: Node) -> None:
    """An answer would agree on a step without workers that are yet to be started."""
    node.agent.on_message({"type": "stop", "token": "1.1"})
    assert node.of("begun") == []


def test_a_start_that_comes_after_its_kill_starts_nothing(node: Node) -> None:
    node.agent.on_message({"type": "kill", "token": "1.1"})
    assert node.of("none_here") == [{"type": "none_here", "token": "1.1"}]
    node.agent.on_message({"type": "start", "start": start_of(2).to_json()})
    assert node.of("start_failed") == []


@pytest.mark.parametrize("kind", ["stop", "target", "kill"])
def test_a_word_about_another_generation_touches_no_worker(node: Node, kind: str) -> None:
    node.agent.group = SimpleNamespace(token=Token(1, 2))  # type: ignore[assignment]
    node.agent.on_message({"type": kind, "token": "1.1", "step": 3})
    assert node.of("begun") == []


def test_a_signal_goes_to_the_coordinator(node: Node) -> None:
    node.agent.on_signal("SIGUSR2")
    assert node.of("signal") == [{"type": "signal", "name": "SIGUSR2"}]


@pytest.mark.parametrize("kind", ["target", "kill", "unheard_of"])
def test_words_without_workers_or_meaning_are_harmless(node: Node, kind: str) -> None:
    node.agent.on_message({"type": kind, "token": "1.1", "step": 3})
    assert node.agent.exit_code is None


def test_leave_ends_with_the_coordinators_exit_code(node: Node) -> None:
    node.agent.on_message({"type": "leave", "exit_code": 93, "reason": "the run is over"})
    assert node.agent.exit_code == 93
    assert node.said == ["the run is over"]
    assert node.of("bye")


def test_a_node_whose_slurmstepd_died_says_so_until_it_is_told_to_leave(node: Node) -> None:
    """Slurm could hand its devices to another job while it still trained on them."""
    node.agent.on_message({"type": "welcome"})
    node.wait(2)
    assert node.of("disowned") == []
    node.disowned = True
    node.wait(2)
    assert len(node.of("disowned")) > 1
    node.agent.on_message({"type": "leave", "exit_code": EXIT_ENVIRONMENT, "reason": "lost"})
    assert node.agent.exit_code == EXIT_ENVIRONMENT


def test_a_node_that_slurm_lost_takes_no_part(node: Node) -> None:
    node.disowned = True
    node.wait(1)
    assert node.sent == []
    assert node.agent.exit_code == EXIT_ENVIRONMENT
