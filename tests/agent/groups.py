"""Worker groups of stand-in workers, and an agent process that holds one."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

import air_hpc
from air_hpc.agent.starters import Starter, make_starter
from air_hpc.agent.workers import GenerationStart, WorkerGroup
from air_hpc.config.spec import HangSpec
from air_hpc.rundir.fence import Token
from air_hpc.rundir.layout import RunDir, create_run_dir

ROOT = Path(air_hpc.__file__).parent.parent
STAND_IN = [sys.executable, "-m", "tests.agent.stand_in"]
THREADED = [sys.executable, "-m", "tests.agent.threaded_worker"]
DEADLINE_S = 60.0
"""Far more than anything here takes: a loaded machine must not fail a test."""


def environ(**behaviour: Any) -> dict[str, str]:
    """What a stand-in worker needs."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "BEHAVIOUR": json.dumps(behaviour)}


def start_of(ranks: int, **facts: Any) -> GenerationStart:
    defaults: dict[str, Any] = {
        "token": Token(1, 1),
        "ranks": tuple(range(ranks)),
        "world_size": ranks,
        "node_rank": 0,
        "master_address": "127.0.0.1",
        "master_port": 20001,
        "resume_steps": (),
        "stop_timeout_s": DEADLINE_S,
        "threads": 1,
    }
    return GenerationStart(**{**defaults, **facts})


class Group(WorkerGroup):
    """A worker group that keeps what its workers said."""

    def __init__(
        self,
        run: RunDir,
        starter: Starter,
        ranks: int,
        argv: list[str],
        *,
        hang: HangSpec | None = None,
        **behaviour: Any,
    ):
        self.said: list[tuple[int, dict[str, Any]]] = []
        lease = time.monotonic_ns() + 10**12
        super().__init__(
            run, "n1", start_of(ranks), starter, argv, environ(**behaviour), lease, hang=hang
        )

    def listen_until(self, done: Callable[[], bool]) -> None:
        """Do what an agent's loop does until `done`."""
        wait_until(lambda: self._turn() or done())

    def _turn(self) -> bool:
        self.pump(lambda rank, message: self.said.append((rank, message)))
        if self.reap():
            self.pump(lambda rank, message: self.said.append((rank, message)))
        self.watch(time.monotonic())
        return False

    def listen_to_the_end(self) -> dict[int, int | None]:
        """The exit status of each rank."""
        self.listen_until(lambda: not self.running)
        self._turn()
        return {worker.rank: worker.exit_status for worker in self.workers}

    def said_by(self, rank: int, kind: str) -> list[dict[str, Any]]:
        return [m for who, m in self.said if who == rank and m["kind"] == kind]

    def training(self) -> bool:
        """Whether every worker has done a step."""
        return self.progress()["done_step"] > 0


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def main() -> None:
    """An agent process: start a worker, say its pid, and wait to be killed."""
    folder, name = sys.argv[1:]
    starter = make_starter(name, STAND_IN, environ(steps=None))
    group = Group(create_run_dir(Path(folder), "run"), starter, 1, STAND_IN, steps=None)
    group.listen_until(group.training)
    print(group.workers[0].process.pid, flush=True)
    group.listen_until(lambda: False)


if __name__ == "__main__":
    main()
