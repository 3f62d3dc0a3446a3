"""What must not happen on a real Slurm: a lost writer commits, a cancelled run comes back, a queued
run changes under its owner's hands."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from air_hpc.rundir.commit import find_candidates
from air_hpc.rundir.layout import RunDir, list_runs
from air_hpc.rundir.words import RunState
from tests.acceptance.runs import (
    ROOT,
    SMALL,
    air_hpc,
    assert_finished_like,
    events_of,
    job_of,
    losses,
    status_of,
    story,
    wait_for_end,
    wait_for_step,
    wait_until,
)
from tests.slurm_cluster import DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

TWO_NODES = (
    "cluster=slurm",
    "launch.nodes=2",
    "launch.devices_per_node=2",
    "launch.partition=low",
    "launch.time_limit_min=30",
)


def submit_one(cluster: DevCluster, runs_dir: Path, *more: str) -> RunDir:
    """One run of two nodes and two workers a node."""
    air_hpc(*SMALL, *TWO_NODES, f"runs_dir={runs_dir}", *more, cluster=cluster)
    return list_runs(runs_dir)[-1]


@pytest.mark.parametrize(
    "which",
    [pytest.param(0, id="first-node"), pytest.param(1, id="second-node", marks=pytest.mark.full)],
)
def test_the_writers_of_an_isolated_node_commit_nothing_after_the_next_attempt(
    devcluster: DevCluster, tmp_path: Path, reference: dict[int, float], which: int
) -> None:
    run = submit_one(devcluster, tmp_path / "runs")
    wait_for_step([run], 16)
    nodes = status_of(run).nodes
    assert nodes is not None
    devcluster.isolate_node(nodes[which])
    wait_until(lambda: len(events_of(run, "attempt_started")) > 1, "the next attempt", 180)
    wait_for_end([run])
    assert_finished_like(run, reference)
    second = events_of(run, "generation_started")[1]
    late = [
        event
        for event in events_of(run, "checkpoint_committed")
        if event.token is not None and event.token.attempt == 1 and event.time > second.time
    ]
    assert late == [], story(run)
    resumed_from = second.facts["resume_step"]
    assert all(
        checkpoint.token.attempt > 1
        for checkpoint in find_candidates(run).usable
        if checkpoint.step > resumed_from
    ), story(run)


def test_a_cancelled_run_stays_cancelled(devcluster: DevCluster, tmp_path: Path) -> None:
    by_verb = submit_one(devcluster, tmp_path / "verb")
    by_hand = submit_one(devcluster, tmp_path / "hand")
    wait_for_step([by_verb, by_hand], 16)
    air_hpc("cancel", str(by_verb.path), cluster=devcluster)
    devcluster.run(["scancel", job_of(by_hand)])
    wait_for_end([by_verb, by_hand], 120)
    jobs = [job_of(by_verb), job_of(by_hand)]
    wait_until(
        lambda: all(
            devcluster.job(job)["JobState"] not in ("RUNNING", "COMPLETING") for job in jobs
        ),
        "the jobs to be gone",
        60,
    )
    time.sleep(10)  # longer than a requeue takes on this cluster
    for run, job in zip((by_verb, by_hand), jobs, strict=True):
        status = status_of(run)
        assert status.state is RunState.CANCELLED, story(run)
        assert len(events_of(run, "attempt_started")) == 1, story(run)
        assert devcluster.job(job)["JobState"] != "PENDING"
        # What was trained until then is saved.
        assert status.committed_step == status.step, story(run)


def test_a_queued_run_is_immune_to_edits_and_its_script_runs_under_plain_sbatch(
    devcluster: DevCluster, tmp_path: Path, reference: dict[int, float]
) -> None:
    """Submitted from a checkout that is broken afterwards; then its saved script is given to sbatch
    once more, which finds the verdict and trains nothing twice."""
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache"))
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=checkout, check=True)
    devcluster.run(["scontrol", "update", "partition=low", "state=down"])
    runs_dir = tmp_path / "runs"
    air_hpc(*SMALL, *TWO_NODES, f"runs_dir={runs_dir}", cluster=devcluster, checkout=checkout)
    (run,) = list_runs(runs_dir)
    (checkout / "air_hpc" / "agent" / "main.py").write_text("raise SystemExit('edited')\n")
    (checkout / "air_hpc" / "train" / "loop.py").write_text("raise SystemExit('edited')\n")
    devcluster.run(["scontrol", "update", "partition=low", "state=up"])
    wait_for_end([run])
    assert_finished_like(run, reference)

    before = losses(run)
    job = devcluster.run(["sbatch", "--parsable", str(run.submit_dir / "script.sh")]).stdout.strip()
    state = devcluster.wait_for_job(job, "COMPLETED", "FAILED", timeout_s=90)["JobState"]
    assert state == "COMPLETED"
    assert losses(run) == before


def test_the_saved_script_trains_the_run_when_given_to_a_plain_sbatch(
    devcluster: DevCluster, tmp_path: Path, reference: dict[int, float]
) -> None:
    devcluster.run(["scontrol", "update", "partition=low", "state=down"])
    run = submit_one(devcluster, tmp_path / "runs")
    (submitted,) = events_of(run, "submitted")
    devcluster.run(["scancel", str(submitted.facts["job_id"])])
    devcluster.run(["scontrol", "update", "partition=low", "state=up"])
    devcluster.run(["sbatch", str(run.submit_dir / "script.sh")])
    wait_for_end([run])
    assert_finished_like(run, reference)


def test_status_logs_and_sync_tell_of_a_finished_run(
    devcluster: DevCluster, tmp_path: Path
) -> None:
    run = submit_one(devcluster, tmp_path / "runs", "train.steps=20")
    wait_for_end([run])
    told = json.loads(air_hpc("status", str(run.path), "--json", cluster=devcluster))
    assert {key: told[key] for key in ("run_id", "state", "step", "attempt", "generation")} == {
        "run_id": run.run_id,
        "state": "FINISHED",
        "step": 20,
        "attempt": 1,
        "generation": 1,
    }
    assert told["nodes"] == events_of(run, "attempt_started")[0].facts["nodes"]
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    json.loads(air_hpc("sync", str(run.path), "--uri", uri, "--json", cluster=devcluster))
    synced = json.loads(air_hpc("status", str(run.path), "--json", cluster=devcluster))
    assert synced["mlflow_run_id"]
    assert air_hpc("logs", str(run.path), "--rank", "0", cluster=devcluster).strip()
