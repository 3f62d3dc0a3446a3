"""The shipper's process against a real MLflow server, which comes late, and under kill -9."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tracking.conftest import REPOSITORY, Reader, Server, wait_until
from tests.tracking.simulated import SimulatedRun

Start = Callable[[SimulatedRun], "subprocess.Popen[str]"]


def environment() -> dict[str, str]:
    """A busy machine must not look like a server that is down."""
    return {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "100",
    }


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a run's shipper as the agent does: signals ignored, a pipe as its life line."""
    started: list[subprocess.Popen[str]] = []

    def start(run: SimulatedRun) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "air_hpc.tracking", str(run.dir.path)],
            cwd=REPOSITORY,
            env=environment(),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def leave(process: subprocess.Popen[str]) -> str:
    """Close the life line; what the process said."""
    _, said = process.communicate(timeout=150)
    assert process.returncode == 0, said
    return said


def test_a_late_server_a_kill_and_a_roll_back_lose_and_double_nothing(
    tmp_path: Path, server: Server, start: Start
) -> None:
    run = SimulatedRun(tmp_path / "runs", uri=server.uri.replace("//", "//me:s3cret@"))
    run.submitted()
    run.attempt(1, None)
    run.train(1, 10)
    run.commit(10)
    first = start(run)
    # The server is down: said once, and the process stays.
    assert first.stderr is not None
    line = first.stderr.readline()
    assert "metrics wait in the run directory" in line
    first.send_signal(signal.SIGTERM)
    first.send_signal(signal.SIGUSR2)
    time.sleep(0.5)
    assert first.poll() is None
    server.start()
    reader = Reader(server.uri)
    wait_until(lambda: reader.runs("tiny-1") and reader.steps("tiny-1") == [*range(1, 11)], 150)
    assert first.stderr.readline() == (
        "air_hpc tracking: the store answers again; what waited is shipped\n"
    )
    # Killed in the midst of shipping: it is sending while it dies.
    for step in range(11, 21):
        run.more(step, step)
    first.kill()
    first.wait()
    run.end("node_lost", "requeue", 20)
    run.attempt(2, 10)
    run.train(11, 25)
    second = start(run)
    wait_until(lambda: reader.steps("tiny-1") == [*range(1, 26)], 150)
    # Two at once, as with a sync from the login node.
    third = start(run)
    run.more(26, 30)
    run.commit(30)
    run.end("completed", "stop", 30)
    said = leave(second) + leave(third)
    assert said == ""
    assert reader.steps("tiny-1") == [*range(1, 31)]
    found = reader.one("tiny-1")
    assert found.info.status == "FINISHED"
    assert found.data.tags["air_hpc.rolled_back"] == "11-20"
    artifacts = {entry.path for entry in reader.client.list_artifacts(found.info.run_id)}
    assert artifacts == {"run.yaml", "submit", "code"}
    everything = str(found.to_dictionary()) + line
    for path in [*run.dir.ledger_dir.iterdir(), *run.dir.metrics_dir.iterdir()]:
        everything += path.read_text()
    assert "s3cret" not in everything


def test_it_leaves_with_its_parent_after_one_last_pass(tmp_path: Path, database: str) -> None:
    run = SimulatedRun(tmp_path / "runs", uri=database)
    run.attempt(1, None)
    run.train(1, 3)
    # The parent starts it with a standard input that outlives the parent, then is killed.
    reading, writing = os.pipe()
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time\n"
            "p = subprocess.Popen([sys.executable, '-m', 'air_hpc.tracking', sys.argv[1]])\n"
            "print(p.pid, flush=True)\n"
            "time.sleep(60)",
            str(run.dir.path),
        ],
        cwd=REPOSITORY,
        env=environment(),
        stdin=reading,
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(reading)
    assert parent.stdout is not None
    shipper = int(parent.stdout.readline())
    reader = Reader(database)
    wait_until(lambda: reader.runs("tiny-1") and reader.steps("tiny-1") == [1, 2, 3], 150)
    os.kill(shipper, signal.SIGSTOP)  # so that what follows waits for its last pass
    parent.kill()
    parent.wait()
    run.more(4, 9)
    os.kill(shipper, signal.SIGCONT)
    wait_until(lambda: not Path(f"/proc/{shipper}").exists(), 60)
    os.close(writing)
    parent.stdout.close()
    assert reader.steps("tiny-1") == [*range(1, 10)]


def test_the_default_store_is_private_and_nothing_appears_elsewhere(
    tmp_path: Path, start: Start
) -> None:
    runs_dir = tmp_path / "runs"
    uri = f"sqlite:///{runs_dir / 'mlflow.db'}"
    runs = [SimulatedRun(runs_dir, f"tiny-{index}", uri=uri) for index in range(2)]
    for run in runs:
        run.whole_life()
    before = {path.name for path in REPOSITORY.iterdir()}
    # Both find no database and make one at the same moment.
    assert [leave(process) for process in [start(run) for run in runs]] == ["", ""]
    assert {path.name for path in REPOSITORY.iterdir()} == before
    assert stat.S_IMODE((runs_dir / "mlflow.db").stat().st_mode) == 0o600
    assert stat.S_IMODE((runs_dir / "mlartifacts").stat().st_mode) == 0o700
    assert sorted(path.name for path in runs_dir.iterdir()) == [
        ".air_hpc",
        "mlartifacts",
        "mlflow.db",
        "tiny-0",
        "tiny-1",
    ]
    reader = Reader(uri)
    for run in runs:
        assert reader.one(run.dir.run_id).info.status == "FINISHED"
        assert reader.steps(run.dir.run_id) == [*range(1, 31)]


def test_a_run_without_a_store_needs_no_shipper(tmp_path: Path, start: Start) -> None:
    run = SimulatedRun(tmp_path / "runs", uri=None)
    assert leave(start(run)) == ""
