"""Specs and tasks for tests of submission."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from air_hpc.config.spec import ClusterSpec, CodeSpec, LaunchSpec, RunSpec, TrainSpec
from air_hpc.hardware.accelerator import AcceleratorSpec
from air_hpc.launch.prepare import Task
from air_hpc.plan.make import make_plan

ROOT = Path(__file__).resolve().parents[2]
FAKE_AGENT = Path(__file__).parent / "fake_agent.py"


def spec(
    runs_dir: Path | str,
    *,
    cluster: dict[str, Any] | None = None,
    code: str = "none",
    seed: int = 0,
    **launch: Any,
) -> RunSpec:
    """A run of one CPU device on each node, on Slurm."""
    base = RunSpec(runs_dir=str(runs_dir), accelerator=AcceleratorSpec(name="cpu", kind="cpu"))
    chosen = {"kind": "slurm", "name": "slurm", **(cluster or {})}
    return replace(
        base,
        cluster=replace(ClusterSpec(), **chosen),
        launch=replace(LaunchSpec(lead_s=60.0, time_limit_min=10), **launch),
        train=replace(TrainSpec(), seed=seed),
        code=replace(CodeSpec(), snapshot=code),
    )


def task(made: RunSpec) -> Task:
    """A spec with its plan."""
    plan, problems = make_plan(made, local_cpu_count=8)
    assert plan is not None, problems
    return Task(made, plan, (f"train.seed={made.train.seed}",))


def tasks(runs_dir: Path | str, number: int = 1, **options: Any) -> list[Task]:
    """Runs that differ in their seed."""
    return [task(spec(runs_dir, seed=seed, **options)) for seed in range(number)]


def fake_cluster(behaviour: str, **more: Any) -> dict[str, Any]:
    """A cluster config whose Python is tests/launch/fake_agent.py, told how to behave."""
    env = {"FAKE_AGENT": behaviour, "FAKE_AGENT_PYTHON": sys.executable, **more.pop("env", {})}
    return {"python": str(FAKE_AGENT), "env": env, "export": "NIL", **more}


def fake_sbatch_env(folder: Path) -> dict[str, str]:
    """PATH with the fake Slurm commands of `folder` first."""
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
