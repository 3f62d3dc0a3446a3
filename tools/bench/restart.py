#!/usr/bin/env python3
"""From the first line of a requeued batch script to the first new step, on a real Slurm.

    eval "$(tools/devcluster up)"
    python tools/bench/restart.py [--nodes N] [--workers W] [--rounds R]

A run trains, is requeued by hand, and resumes from the step that it saved on the way. The script's
first line carries its time in whole seconds. The target is 15 s. Beside it stands what two bare
processes on the same machine need to import torch at once: the part that nobody can save.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from air_hpc.rundir.events import read_ledger  # noqa: E402
from air_hpc.rundir.layout import RunDir, list_runs  # noqa: E402
from air_hpc.rundir.spool import iterate_samples  # noqa: E402


def air_hpc(*words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "air_hpc", *words],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def wait_for(look: Callable[[], bool], timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not look():
        if time.monotonic() > deadline:
            sys.exit("the run did not get where it should: is the cluster up (SLURM_CONF)?")
        time.sleep(0.2)


def first_samples(run: RunDir) -> dict[int, float]:
    """For each attempt the time of its first step's end."""
    found: dict[int, float] = {}
    for sample in iterate_samples(run):
        found.setdefault(sample.token.attempt, sample.time)
    return found


def script_starts(run: RunDir) -> list[float]:
    """The times of the batch script's first line, one for each start."""
    logs = (run.shared_dir / "submissions" / run.run_id).glob("*.log")
    text = "".join(path.read_text() for path in logs)
    return [
        datetime.fromisoformat(stamp).timestamp()
        for stamp in re.findall(r"^air_hpc: run .*, (\S+)$", text, re.MULTILINE)
    ]


def one_round(nodes: int, workers: int, starter: str) -> float:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        air_hpc(
            "cluster=slurm", f"runs_dir={folder}", f"launch.nodes={nodes}",
            f"launch.devices_per_node={workers}", f"launch.starter={starter}",
            "launch.time_limit_min=20", "train.steps=100000", "launch.exclusive=true",
        )  # fmt: skip
        (run,) = list_runs(Path(folder))
        wait_for(lambda: 1 in first_samples(run))
        job = str(next(e for e in read_ledger(run).events if e.kind == "submitted").facts["job_id"])
        subprocess.run(["scontrol", "requeue", job], check=True)
        wait_for(lambda: 2 in first_samples(run))
        taken = first_samples(run)[2] - script_starts(run)[1]
        air_hpc("cancel", str(run.path), "--json")
        wait_for(
            lambda: not subprocess.run(["squeue", "-h", "-j", job], capture_output=True).stdout
        )
        return taken


def import_torch_s(processes: int) -> float:
    started = time.perf_counter()
    running = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(processes)]
    for process in running:
        process.wait()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found = {
        starter: [
            round(one_round(options.nodes, options.workers, starter), 1)
            for _ in range(options.rounds)
        ]
        for starter in ("exec", "fork")
    }
    world = options.nodes * options.workers
    print(
        json.dumps(
            {
                "nodes": options.nodes,
                "workers_a_node": options.workers,
                "restart_s": found,
                "median_s": {key: statistics.median(value) for key, value in found.items()},
                "import_torch_in_as_many_processes_s": round(import_torch_s(world), 1),
            }
        )
    )


if __name__ == "__main__":
    main()
