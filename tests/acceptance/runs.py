"""Drives whole runs for the acceptance tests: submits with the command line, watches the ledger,
and compares what was trained with an undisturbed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from air_hpc.rundir.events import Event, read_ledger
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.spool import effective_samples
from air_hpc.rundir.state import RunStatus, fold
from air_hpc.rundir.words import RunState
from tests.slurm_cluster import DevCluster

ROOT = Path(__file__).resolve().parents[2]
STEPS = 480
T = TypeVar("T")

SMALL = (
    "model.dim=32",
    "model.layers=2",
    "model.ffn_dim=64",
    "model.heads=2",
    "model.kv_heads=1",
    "model.dropout=0.1",
    "data.sequence_length=32",
    "train.global_batch_size=16",
    "train.micro_batch_size=2",
    f"train.steps={STEPS}",
    "checkpoint.interval_steps=16",
    "schedule.warmup_steps=4",
    "launch.starter=fork",
    "launch.exclusive=true",
    "recovery.heartbeat_timeout_s=15",
    "recovery.lease_s=30",
    "train.collective_timeout_s=120",
)
"""A model of a few thousand parameters, with dropout and accumulation; patient heartbeats, since
here dozens of processes share two cores."""

SHORT = (*SMALL, "train.steps=160")
"""The same, long enough to be disturbed once."""


def air_hpc(
    *words: str, cluster: DevCluster | None = None, checkout: Path = ROOT, timeout_s: float = 300
) -> str:
    """`python -m air_hpc WORDS` of a checkout; its stdout. Fails on any exit code but 0."""
    environ = {**os.environ, "PYTHONPATH": str(checkout), **(cluster.env if cluster else {})}
    done = subprocess.run(
        [sys.executable, "-m", "air_hpc", *words],
        env=environ,
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def status_of(run: RunDir) -> RunStatus:
    """What the run's ledger says now."""
    return fold(read_ledger(run).events)


def events_of(run: RunDir, kind: str) -> list[Event]:
    """The run's events of one kind, in order."""
    return [event for event in read_ledger(run).events if event.kind == kind]


def wait_until(look: Callable[[], T], what: str, timeout_s: float) -> T:
    """The first true value of `look`; AssertionError at the end of the time."""
    deadline = time.monotonic() + timeout_s
    while not (value := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what}")
        time.sleep(0.3)
    return value


def wait_for_step(runs: Sequence[RunDir], committed: int, timeout_s: float = 240) -> None:
    """Wait until every run has committed a checkpoint of at least this step."""
    wait_until(
        lambda: all((status_of(run).committed_step or 0) >= committed for run in runs),
        f"a commit of step {committed} in {[run.run_id for run in runs]}",
        timeout_s,
    )


def wait_for_end(runs: Sequence[RunDir], timeout_s: float = 420) -> None:
    """Wait until every run is in a terminal state."""
    wait_until(
        lambda: all(status_of(run).terminal for run in runs),
        "the end of " + ", ".join(f"{r.run_id} ({status_of(r).state})" for r in runs),
        timeout_s,
    )


def job_of(run: RunDir) -> str:
    """The run's job as Slurm names it in commands: ARRAYJOB_TASK for an element of an array."""
    facts = events_of(run, "attempt_started")[-1].facts
    if facts["array_job_id"] is None:
        return str(facts["job_id"])
    return f"{facts['array_job_id']}_{facts['array_task_id']}"


def losses(run: RunDir) -> dict[int, float]:
    """The loss of each step that counts."""
    return {step: s.metrics["train/loss"] for step, s in effective_samples(run).items()}


def story(run: RunDir) -> str:
    """The ledger as text, for a failed assertion."""
    lines = [
        f"{e.time:.1f} {e.token} {e.kind} {json.dumps(dict(e.facts), default=str)[:300]}"
        for e in read_ledger(run).events
    ]
    return "\n".join([run.run_id, *lines])


def assert_finished_like(run: RunDir, reference: dict[int, float]) -> None:
    """FINISHED, every step trained once in what counts, and each loss equal to the reference's."""
    status = status_of(run)
    assert status.state is RunState.FINISHED, story(run)
    found = losses(run)
    assert list(found) == list(range(1, len(reference) + 1)), story(run)
    assert found == reference, story(run)
