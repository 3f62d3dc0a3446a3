"""The agents' channel: who is heard, where the coordinator is found."""

from __future__ import annotations

import os
import resource
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from air_hpc.agent.channel import (
    CANDIDATE_PORTS,
    PORT_RANGE,
    AgentSocket,
    CoordinatorSocket,
    Message,
    Signer,
    allow_connections,
    candidate_ports,
    to_coordinator,
    to_node,
)
from air_hpc.errors import EnvironmentFailure
from air_hpc.probes.ports import free_ports
from air_hpc.rundir.layout import create_run_dir

KEY = b"k" * 32
DEADLINE_S = 20.0


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as made:
        made.linger = 0
        yield made


@pytest.fixture
def opened() -> Iterator[Callable[[Any], Any]]:
    """Closes what a test opens."""
    things: list[Any] = []

    def keep(thing: Any) -> Any:
        things.append(thing)
        return thing

    yield keep
    for thing in things:
        thing.close()


def signer(start_id: str = "7.0", key: bytes = KEY) -> Signer:
    return Signer(key, start_id)


def first_message(receive: Callable[[], Iterator[Any]], again: Callable[[], None]) -> Any:
    """The first message that arrives; `again` is called until it does, as agents repeat theirs."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        again()
        for message in receive():
            return message
        time.sleep(0.02)
    raise AssertionError("no message arrived")


class TestSigner:
    WAY = to_coordinator(b"n1")

    def test_a_message_survives(self) -> None:
        message = {"type": "hello", "index": 1, "text": "ü\n"}
        assert signer().open(signer().seal(message, self.WAY), self.WAY) == message

    def test_a_foreign_key_is_not_heard(self) -> None:
        frames = signer(key=b"x" * 32).seal({"type": "hello"}, self.WAY)
        assert signer().open(frames, self.WAY) is None

    def test_another_start_of_the_same_run_is_not_heard(self) -> None:
        frames = signer("7.0").seal({"type": "hello"}, self.WAY)
        assert signer("7.1").open(frames, self.WAY) is None

    def test_the_start_id_cannot_be_stretched_into_the_message(self) -> None:
        frames = signer("7").seal({"type": "hello"}, self.WAY)
        assert signer("7\0").open(frames, self.WAY) is None

    def test_a_message_sent_back_to_its_sender_is_not_heard(self) -> None:
        frames = signer().seal({"type": "hello"}, to_coordinator(b"n1"))
        assert signer().open(frames, to_node(b"n1")) is None

    def test_a_message_passed_on_under_another_name_is_not_heard(self) -> None:
        frames = signer().seal({"type": "hello"}, to_coordinator(b"n1"))
        assert signer().open(frames, to_coordinator(b"n2")) is None

    @given(
        frames=st.lists(st.binary(max_size=80), max_size=4),
        position=st.integers(0, 500),
    )
    def test_garbage_and_changed_bytes_are_not_heard(
        self, frames: list[bytes], position: int
    ) -> None:
        assert signer().open(frames, self.WAY) is None
        mac, body = signer().seal({"type": "signal", "name": "SIGTERM"}, self.WAY)
        whole = bytearray(mac + body)
        whole[position % len(whole)] ^= 1
        changed = [bytes(whole[: len(mac)]), bytes(whole[len(mac) :])]
        assert signer().open(changed, self.WAY) is None

    def test_a_signed_body_without_a_type_is_dropped(self) -> None:
        assert signer().open(signer().seal({"kind": "hello"}, self.WAY), self.WAY) is None

    def test_the_runs_key_is_its_owners_alone(self, tmp_path: Path) -> None:
        run = create_run_dir(tmp_path, "run")
        assert stat.S_IMODE(run.channel_key.stat().st_mode) == 0o600
        frames = Signer.from_file(run.channel_key, "1.0").seal({"type": "hello"}, self.WAY)
        assert Signer.from_file(run.channel_key, "1.0").open(frames, self.WAY) is not None

    def test_a_key_that_cannot_be_read_says_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(EnvironmentFailure, match="channel key") as caught:
            Signer.from_file(tmp_path / "absent", "1.0")
        assert "shared" in str(caught.value)


class TestPorts:
    @given(run_id=st.text(max_size=20), restart=st.integers(0, 50))
    def test_candidates_are_the_same_everywhere_and_outside_the_ephemeral_range(
        self, run_id: str, restart: int
    ) -> None:
        ports = candidate_ports(run_id, f"7.{restart}")
        assert ports == candidate_ports(run_id, f"7.{restart}")
        assert len(set(ports)) == CANDIDATE_PORTS
        assert all(port in range(*PORT_RANGE) for port in ports)

    def test_another_start_takes_other_ports(self) -> None:
        assert candidate_ports("run", "7.0") != candidate_ports("run", "7.1")


def free_candidates(count: int) -> list[int]:
    return free_ports(count, f"channel-tests-{os.getpid()}")


class TestFinding:
    def test_a_port_taken_by_a_foreign_process_is_passed_over(
        self, context: zmq.Context[Any], opened: Callable[[Any], Any]
    ) -> None:
        taken, free = free_candidates(2)
        with socket.create_server(("127.0.0.1", taken)):
            hub = opened(CoordinatorSocket(context, signer(), [taken, free]))
            assert hub.port == free
            endpoints = [f"tcp://127.0.0.1:{port}" for port in (taken, free)]
            agent = opened(AgentSocket(context, signer(), "n2", endpoints))
            assert not agent.settled
            sender, message = first_message(hub.receive, lambda: agent.send({"type": "hello"}))
            assert (sender, message) == ("n2", {"type": "hello"})
            answer = first_message(agent.receive, lambda: hub.send("n2", {"type": "welcome"}))
            assert answer == {"type": "welcome"}
            assert agent.settled

    def test_no_free_candidate_says_which_were_tried(self, context: zmq.Context[Any]) -> None:
        (taken,) = free_candidates(1)
        with (
            socket.create_server(("127.0.0.1", taken)),
            pytest.raises(EnvironmentFailure, match=str(taken)),
        ):
            CoordinatorSocket(context, signer(), [taken])

    def test_a_foreign_coordinator_never_settles_an_agent(
        self, context: zmq.Context[Any], opened: Callable[[Any], Any]
    ) -> None:
        """One with another key answers, one echoes; the agent keeps looking for the right one."""
        ports = free_candidates(3)
        foreign = opened(CoordinatorSocket(context, signer(key=b"x" * 32), ports[:1]))
        echo = opened(context.socket(zmq.ROUTER))
        echo.bind(f"tcp://127.0.0.1:{ports[1]}")
        endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
        agent = opened(AgentSocket(context, signer(), "n2", endpoints))
        echoed = 0
        deadline = time.monotonic() + DEADLINE_S
        while echoed < 3 and time.monotonic() < deadline:
            agent.send({"type": "hello"})
            foreign.send("n2", {"type": "welcome"})
            while echo.poll(20):
                echo.send_multipart(echo.recv_multipart())
                echoed += 1
            assert list(agent.receive()) == []
        assert echoed >= 3
        assert not agent.settled
        second_context = zmq.Context()
        hub = CoordinatorSocket(second_context, signer(), ports[2:])
        try:
            first_message(hub.receive, lambda: agent.send({"type": "hello"}))
            first_message(agent.receive, lambda: hub.send("n2", {"type": "welcome"}))
            assert agent.settled
        finally:
            hub.close()
            second_context.term()

    def test_the_first_node_reaches_its_own_coordinator_inside_the_process(
        self, context: zmq.Context[Any], opened: Callable[[Any], Any]
    ) -> None:
        hub = opened(CoordinatorSocket(context, signer(), free_candidates(1)))
        agent = opened(AgentSocket(context, signer(), "n1", [CoordinatorSocket.INPROC]))
        received = first_message(hub.receive, lambda: agent.send({"type": "hello"}))
        assert received[0] == "n1"
        first_message(agent.receive, lambda: hub.send("n1", {"type": "welcome"}))

    def test_what_is_not_signed_is_dropped_and_the_rest_is_heard(
        self, context: zmq.Context[Any], opened: Callable[[Any], Any]
    ) -> None:
        hub = opened(CoordinatorSocket(context, signer(), free_candidates(1)))
        stranger = opened(context.socket(zmq.DEALER))
        stranger.setsockopt(zmq.IDENTITY, b"n9")
        stranger.connect(f"tcp://127.0.0.1:{hub.port}")
        for frames in ([b""], [b"a", b"b"], [b"a", b"b", b"c"], [b"\xff" * 32, b"{}"]):
            stranger.send_multipart(frames)
        agent = opened(AgentSocket(context, signer(), "n2", [f"tcp://127.0.0.1:{hub.port}"]))
        received = first_message(hub.receive, lambda: agent.send({"type": "hello"}))
        assert received == ("n2", {"type": "hello"})

    def test_a_message_for_a_node_that_is_not_there_is_dropped(
        self, context: zmq.Context[Any], opened: Callable[[Any], Any]
    ) -> None:
        hub = opened(CoordinatorSocket(context, signer(), free_candidates(1)))
        message: Message = {"type": "kill"}
        hub.send("nowhere", message)


def test_a_thousand_nodes_may_connect_under_the_usual_soft_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        allow_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
