"""An agent's port, and the connects that ask whether its machine lives. Real sockets, on loopback.

Run as a program it is an agent that only listens: it says its port and waits.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import air_hpc
from air_hpc.agent.liveness import Listener, Prober, _answer
from air_hpc.probes.ports import ephemeral_range
from air_hpc.recovery.detector import PROBES_IN_PATIENCE, Answer

DEADLINE_S = 30.0
LOOPBACK = "127.0.0.1"


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener("a run")
    yield made
    made.close()


@pytest.fixture
def prober() -> Iterator[Prober]:
    made = Prober(timeout_s=DEADLINE_S)
    yield made
    made.close()


@pytest.fixture
def agent() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that listens, and its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.agent.test_liveness"],
        cwd=Path(air_hpc.__file__).parent.parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


def ask(prober: Prober, *ports: int) -> dict[str, Answer]:
    for port in ports:
        prober.begin(str(port), LOOPBACK, port)
    return collect(prober, len(ports))


def collect(prober: Prober, count: int) -> dict[str, Answer]:
    found: dict[str, Answer] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < count:
        assert time.monotonic() < deadline, "no answer"
        found.update(prober.poll())
        time.sleep(0.001)
    return found


def test_a_port_answers_without_anybody_serving_it(listener: Listener, prober: Prober) -> None:
    for _ in range(PROBES_IN_PATIENCE):
        assert ask(prober, listener.port) == {str(listener.port): Answer.CONNECTED}
    assert listener.drain() == PROBES_IN_PATIENCE
    assert listener.drain() == 0


def test_a_closed_port_refuses(listener: Listener, prober: Prober) -> None:
    listener.close()
    assert ask(prober, listener.port) == {str(listener.port): Answer.REFUSED}


def test_a_stopped_process_still_answers_and_a_killed_one_refuses(
    agent: tuple[subprocess.Popen[str], int], prober: Prober
) -> None:
    process, port = agent
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert ask(prober, port) == {str(port): Answer.CONNECTED}
    process.kill()
    process.wait()
    assert ask(prober, port) == {str(port): Answer.REFUSED}


def test_no_answer_until_the_timeout_is_silence() -> None:
    """A full queue drops connects, as a dead machine does."""
    now = 100.0
    prober = Prober(timeout_s=0.5, clock=lambda: now)
    with socket.socket() as deaf:
        deaf.bind((LOOPBACK, 0))
        deaf.listen(0)
        port = deaf.getsockname()[1]
        with socket.create_connection((LOOPBACK, port)):
            prober.begin("a", LOOPBACK, port)
            assert prober.poll() == []
            now += 0.6
            assert prober.poll() == [("a", Answer.SILENT)]
    prober.close()


def test_an_answer_that_waited_for_a_stalled_observer_is_no_silence(listener: Listener) -> None:
    now = 100.0
    prober = Prober(timeout_s=0.5, clock=lambda: now)
    prober.begin("a", LOOPBACK, listener.port)
    with socket.create_connection((LOOPBACK, listener.port)):
        pass  # loopback is in order: the connect before this one has ended too
    now += 100
    assert prober.poll() == [("a", Answer.CONNECTED)]
    prober.close()


def test_many_are_asked_at_once(prober: Prober) -> None:
    alive = [Listener(f"node {index}") for index in range(50)]
    dead = [Listener(f"dead {index}") for index in range(50)]
    for listener in dead:
        listener.close()
    found = ask(prober, *(each.port for each in alive + dead))
    assert all(found[str(each.port)] is Answer.CONNECTED for each in alive)
    assert all(found[str(each.port)] is Answer.REFUSED for each in dead)
    for listener in alive:
        listener.close()


def test_a_connect_that_meets_itself_is_a_refusal() -> None:
    """On one machine the kernel may give a connect the very port that it asks for."""
    with socket.socket() as alone:
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        alone.bind((LOOPBACK, 0))
        alone.connect(alone.getsockname())
        assert _answer(alone, 0) is Answer.REFUSED


def test_a_port_lies_where_no_connection_gets_one(listener: Listener) -> None:
    low, high = ephemeral_range()
    assert not low <= listener.port <= high


def test_two_agents_of_one_machine_listen_on_different_ports(listener: Listener) -> None:
    other = Listener("a run")
    assert other.port != listener.port
    other.close()


def test_what_cannot_be_asked_is_unknown(prober: Prober) -> None:
    prober.begin("a", "no address", 1)
    assert collect(prober, 1) == {"a": Answer.UNKNOWN}


if __name__ == "__main__":
    listening = Listener(f"{os.getpid()}")
    print(listening.port, flush=True)
    time.sleep(1000)
