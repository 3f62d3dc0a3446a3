#!/usr/bin/env python3
"""CPU time of agent and session for each second of training.

    python tools/bench/agent_cpu.py [--seconds S] [--workers N]

The agent's is read from the kernel while a real run of N workers trains; the session's is what
`begin_step` and `end_step` cost a step (timed alone, with its spool), times the run's steps a
second. The target for both together is 1 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from air_hpc.rundir.events import read_ledger  # noqa: E402
from air_hpc.rundir.layout import create_run_dir, list_runs  # noqa: E402
from air_hpc.rundir.spool import iterate_samples  # noqa: E402
from air_hpc.session.session import Session  # noqa: E402


def session_s_a_step(folder: Path, steps: int = 20000) -> float:
    """CPU seconds of one step's `begin_step` and `end_step` on rank 0, with its metrics."""
    session = Session.standalone(create_run_dir(folder, "session"))
    metrics = {f"perf/metric_{index}": 0.1234567 * index for index in range(10)}
    started = time.process_time()
    for step in range(1, steps + 1):
        session.begin_step(step)
        session.end_step(step, metrics)
    taken = (time.process_time() - started) / steps
    session.finished(steps)
    return taken


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(
            [
                sys.executable, "-m", "air_hpc", "--detach", f"runs_dir={folder}",
                f"launch.devices_per_node={options.workers}", "train.steps=100000",
                "checkpoint.interval_steps=200", "tracking.uri=null",
            ],
            check=True, cwd=ROOT, stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        (run,) = list_runs(folder)
        while not any(e.kind == "training_started" for e in read_ledger(run).events):
            time.sleep(0.2)
        (pid,) = (e.facts["pid"] for e in read_ledger(run).events if e.kind == "attempt_started")
        agent = psutil.Process(pid)
        before, started, steps = cpu_s(agent), time.monotonic(), len(list(iterate_samples(run)))
        time.sleep(options.seconds)
        used, wall_s = cpu_s(agent) - before, time.monotonic() - started
        rate = (len(list(iterate_samples(run))) - steps) / wall_s
        subprocess.run(
            [sys.executable, "-m", "air_hpc", "cancel", str(run.path), "--json"],
            check=True, cwd=ROOT, stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        agent.wait(60)
        a_step = session_s_a_step(folder)
    print(
        json.dumps(
            {
                "workers": options.workers,
                "steps_per_s": round(rate, 2),
                "agent_cpu_percent": round(100 * used / wall_s, 3),
                "session_us_a_step": round(1e6 * a_step, 2),
                "session_cpu_percent": round(100 * a_step * rate, 4),
                "together_percent": round(100 * (used / wall_s + a_step * rate), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
