#!/usr/bin/env python3
"""What submitting a sweep costs the client, against submitit's own `map_array`, on a real Slurm.

    SLURM_CONF=... python tools/bench/submit.py [--tasks N] [--rounds R]

Both submit an array of N tasks to the same cluster, round by round; the jobs are held and cancelled
at once, so that nothing runs. Printed are medians: compose and prepare (run directories, frozen
configs, code snapshot) a task, and the ask itself (sbatch and the ledgers) a chunk.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def ours(folder: Path, tasks: int) -> dict[str, float]:
    """Seconds of each part of one submission."""
    from air_hpc.config.compose import Composer
    from air_hpc.launch import prepare, submission, submit
    from air_hpc.launch.prepare import Task
    from air_hpc.plan.make import make_plan

    seeds = ",".join(str(seed) for seed in range(tasks))
    marks = [time.perf_counter()]
    sweep = Composer().compose_sweep(
        [
            "cluster=slurm",
            f"runs_dir={folder}",
            f"train.seed={seeds}",
            "launch.sbatch.hold=true",
            "launch.time_limit_min=10",
        ]
    )
    marks.append(time.perf_counter())
    made = []
    for task in sweep:
        plan, problems = make_plan(task.spec)
        assert plan is not None, problems
        made.append(Task(task.spec, plan, task.overrides))
    checked = prepare.check(made, cwd=ROOT, snapshot=submit._site(made, ROOT))
    planned = prepare.plan_submission(checked, cwd=ROOT, submission_id=None)
    submission.save(planned)
    ready = prepare.prepare(checked, planned, cwd=ROOT)
    marks.append(time.perf_counter())
    result = submit._finish(ready, checked.warnings, time.sleep)
    marks.append(time.perf_counter())
    cancel({run.job_id for run in result.runs if run.job_id})
    compose_s, prepare_s, ask_s = (b - a for a, b in itertools.pairwise(marks))
    return {
        "compose_ms_a_task": 1000 * compose_s / tasks,
        "prepare_ms_a_task": 1000 * prepare_s / tasks,
        "ask_s_a_chunk": ask_s / len(ready.chunks),
        "chunks": len(ready.chunks),
        "total_s": compose_s + prepare_s + ask_s,
    }


def theirs(folder: Path, tasks: int) -> float:
    """Seconds that submitit takes for an array of as many tasks."""
    import submitit

    started = time.perf_counter()
    executor = submitit.SlurmExecutor(folder=folder)
    executor.update_parameters(
        time=10, wckey=None, additional_parameters={"hold": True}, array_parallelism=tasks
    )
    jobs: list[Any] = executor.map_array(print, list(range(tasks)))
    taken = time.perf_counter() - started
    cancel({jobs[0].job_id.split("_")[0]})
    return taken


def cancel(job_ids: set[str]) -> None:
    subprocess.run(["scancel", *sorted(job_ids)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds, others = [], []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(ours(Path(folder) / "runs", options.tasks))
            others.append(theirs(Path(folder) / "submitit", options.tasks))
    print(f"{options.tasks} tasks, medians of {options.rounds} rounds")
    for key in rounds[0]:
        print(f"  {key:20} {statistics.median(found[key] for found in rounds):8.2f}")
    total = statistics.median(found["total_s"] for found in rounds)
    submitit_s = statistics.median(others)
    print(f"  submitit map_array  {submitit_s:8.2f} s; ours / submitit {total / submitit_s:.2f}")


if __name__ == "__main__":
    main()
