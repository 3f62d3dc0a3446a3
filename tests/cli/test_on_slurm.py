"""run, status, logs and cancel against a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import air_hpc, json_of
from tests.cli.test_run import SMALL
from tests.slurm_cluster import DevCluster

pytestmark = pytest.mark.slurm
HELD = ["cluster=slurm", "launch.sbatch={hold: true}", *SMALL]


def test_a_held_run_says_how_to_release_it_and_is_cancelled_at_once(
    devcluster: DevCluster, tmp_path: Path
) -> None:
    done = air_hpc(*HELD, "--json", cwd=tmp_path, env=devcluster.env)
    assert done.returncode == 0, done.stderr
    run = json_of(done)
    held = json_of(air_hpc("status", run["job_id"], "--json", cwd=tmp_path, env=devcluster.env))
    assert (held["state"], held["source"], held["job_id"]) == ("HELD", "squeue", run["job_id"])
    assert f"scontrol release {run['job_id']}" in held["reason"]
    for _ in range(2):
        cancelled = air_hpc("cancel", run["run_id"], cwd=tmp_path, env=devcluster.env)
        assert cancelled.returncode == 0, cancelled.stderr
    devcluster.wait_for_job(run["job_id"], "CANCELLED")
    after = json_of(air_hpc("status", "latest", "--json", cwd=tmp_path, env=devcluster.env))
    assert (after["state"], after["attempt"]) == ("CANCELLED", None)


def test_a_sweep_is_a_table_of_array_elements_and_cancelled_as_one(
    devcluster: DevCluster, tmp_path: Path
) -> None:
    done = air_hpc(*HELD, "-m", "train.seed=1,2", cwd=tmp_path, env=devcluster.env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["RUN", "JOB", "OVERRIDES"]
    jobs = [line.split()[1] for line in lines[1:3]]
    assert [job.partition("_")[2] for job in jobs] == ["0", "1"]
    assert [line.split()[2] for line in lines[1:3]] == ["train.seed=1", "train.seed=2"]
    sweep = next(line.split()[-1] for line in lines if line.startswith("Submitted 2 runs as"))
    assert f"cancel --all-of {sweep}" in done.stdout
    states = json_of(air_hpc("status", "--json", cwd=tmp_path, env=devcluster.env))["runs"]
    assert [run["state"] for run in states] == ["HELD", "HELD"]
    ended = air_hpc("cancel", "--all-of", sweep, "--json", cwd=tmp_path, env=devcluster.env)
    assert [run["state"] for run in json_of(ended)["runs"]] == ["CANCELLED"] * 2


def test_a_run_that_was_cancelled_by_scancel_alone_is_seen_as_cancelled(
    devcluster: DevCluster, tmp_path: Path
) -> None:
    run = json_of(air_hpc(*HELD, "--json", cwd=tmp_path, env=devcluster.env))
    devcluster.run(["scancel", run["job_id"]])
    devcluster.wait_for_job(run["job_id"], "CANCELLED")
    seen = json_of(air_hpc("status", "latest", "--json", cwd=tmp_path, env=devcluster.env))
    assert (seen["state"], seen["source"]) == ("CANCELLED", "squeue")


def test_every_site_limit_is_told_before_anything_is_submitted(
    devcluster: DevCluster, tmp_path: Path
) -> None:
    words = ["cluster=slurm", "launch.partition=lowe", "launch.nodes=900", *SMALL]
    done = air_hpc(*words, "--json", cwd=tmp_path, env=devcluster.env)
    assert done.returncode == 2, done.stdout
    assert "launch.partition" in {problem["key"] for problem in json_of(done)["problems"]}
    assert not (tmp_path / "runs").exists()


@pytest.mark.torch
def test_a_submitted_run_is_followed_by_its_logs_to_the_end(
    devcluster: DevCluster, tmp_path: Path
) -> None:
    words = ["cluster=slurm", *SMALL, "train.steps=3", "checkpoint.interval_steps=3"]
    done = air_hpc(*words, cwd=tmp_path, env=devcluster.env)
    assert done.returncode == 0, done.stderr
    assert "logs" in done.stdout
    followed = air_hpc("logs", "--follow", cwd=tmp_path, env=devcluster.env, timeout_s=200)
    assert followed.returncode == 0, followed.stderr
    assert "batch log" in followed.stdout
    run = json_of(air_hpc("status", "latest", "--json", cwd=tmp_path, env=devcluster.env))
    assert (run["state"], run["step"]) == ("FINISHED", 3), followed.stdout
    assert run["nodes"]
