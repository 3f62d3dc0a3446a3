from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from air_hpc.tracking.store import Store

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite store without runs: making its tables takes seconds, copying it does not."""
    path = tmp_path_factory.mktemp("empty") / "mlflow.db"
    Store(f"sqlite:///{path}", "unused").connect()
    return path


@pytest.fixture
def database(empty_database: Path, tmp_path: Path) -> str:
    """The address of a fresh SQLite store."""
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


class Server:
    """An MLflow server on loopback that a test starts and stops; its port stays the same."""

    def __init__(self, folder: Path, database: Path) -> None:
        self.folder = folder
        shutil.copy(database, folder / "server.db")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "server.log").open("ab") as log:
            self._start(log)
        wait_until(self.answers, 150)

    def _start(self, log: IO[bytes]) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"),
                *("--port", str(self.port), "--workers", "1"),
                *("--backend-store-uri", f"sqlite:///{self.folder / 'server.db'}"),
                *("--artifacts-destination", str(self.folder / "artifacts")),
            ],
            cwd=self.folder,
            env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "server.log").read_text()
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
            self.process = None


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[Server]:
    """A server that is not started yet."""
    server = Server(tmp_path_factory.mktemp("server"), empty_database)
    yield server
    server.stop()


def wait_until(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {condition}"
        time.sleep(0.05)


class Reader:
    """Reads a store back with MLflow's own client."""

    def __init__(self, uri: str) -> None:
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(tracking_uri=uri)

    def runs(self, run_id: str, experiment: str = "air_hpc") -> list[Any]:
        found = self.client.get_experiment_by_name(experiment)
        if found is None:
            return []
        return list(
            self.client.search_runs(
                [found.experiment_id], f"tags.`air_hpc.run_id` = '{run_id}'", max_results=100
            )
        )

    def one(self, run_id: str) -> Any:
        runs = self.runs(run_id)
        assert len(runs) == 1
        return runs[0]

    def history(self, run_id: str, key: str) -> list[Any]:
        return list(self.client.get_metric_history(self.one(run_id).info.run_id, key))

    def steps(self, run_id: str, key: str = "train/loss") -> list[int]:
        return sorted(row.step for row in self.history(run_id, key))


@pytest.fixture
def reader() -> type[Reader]:
    return Reader
