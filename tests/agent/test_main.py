"""Signals of an agent's process, and the attempts of a local run one after another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from air_hpc.agent import attempt
from air_hpc.agent.coordinator import Outcome
from air_hpc.rundir.events import Kind, read_ledger
from air_hpc.rundir.words import FailureClass, Verdict
from tests.agent.groups import environ
from tests.run_builder import build_run

SIGNALLED = """
import os, signal
from air_hpc.agent.main import SignalPipe
signals = SignalPipe()
for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
    os.kill(os.getpid(), number)
signals.wait(600)
print(*signals.read())
print(*signals.read())
"""


def test_signals_only_leave_their_names_in_order() -> None:
    """None of them kills, none interrupts; those that ask for no stop are ignored."""
    argv = [sys.executable, "-c", SIGNALLED]
    done = subprocess.run(argv, env=environ(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["SIGTERM SIGUSR2 SIGINT", ""]


class FakeSignals:
    """A signal arrives in the first pause."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.fd = os.eventfd(0)

    def read(self) -> list[str]:
        return []

    def wait(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)


def test_a_signal_in_the_pause_of_a_local_run_is_left_to_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent once left without a word, and the run stayed REQUEUED for ever."""
    outcomes = [Outcome(0, "again", 60.0), Outcome(93, "cancelled")]
    made: list[Any] = []

    class FakeAttempt:
        def __init__(self, context: Any, run: Any, frozen: Any, signals: Any) -> None:
            made.append(signals)
            self.outcome = outcomes[len(made) - 1]

        def execute(self) -> int:
            return self.outcome.exit_code

    monkeypatch.setattr(attempt, "Attempt", FakeAttempt)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    signals = FakeSignals()
    run = build_run(tmp_path, "train.steps=1")
    assert attempt.run_agent([str(run.path)], signals) == 93  # type: ignore[arg-type]
    assert signals.waits == [60.0]
    assert made == [signals, signals]


def only_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Any:
    """The one attempt of a local run on this machine, and its ledger's last end."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    run = build_run(tmp_path, "train.steps=1", "tracking.uri=null", *overrides)
    context = attempt.read_job_context({})
    frozen = attempt.read_run_yaml(run.run_yaml.read_text())
    one = attempt.Attempt(context, run, frozen, FakeSignals())  # type: ignore[arg-type]
    return run, one


def test_an_agent_that_fails_leaves_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(_: object) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(attempt.NodeAgent, "tick", stale)
    run, one = only_attempt(tmp_path, monkeypatch)
    with pytest.raises(OSError, match="Stale"):
        one.execute()
    end = read_ledger(run).events[-1]
    assert end.kind == Kind.ATTEMPT_ENDED
    assert end.facts["failure_class"] == FailureClass.STORAGE
    assert end.facts["verdict"] == Verdict.REQUEUE


def test_the_first_node_does_not_leave_before_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own deadline of the start once came before the coordinator's word was there."""

    def leave(node: Any) -> None:
        node.exit_code = 1

    monkeypatch.setattr(attempt.NodeAgent, "tick", leave)
    run, one = only_attempt(tmp_path, monkeypatch, "launch.start_timeout_s=0.5")
    one.execute()
    end = read_ledger(run).events[-1]
    assert end.facts["failure_class"] == FailureClass.NOT_ARRIVED
