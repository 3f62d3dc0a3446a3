"""An array of runs on a real Slurm outlives preemption, the time limit, a lost node and a requeue.

Four runs of two nodes and two workers a node fill a cluster of eight nodes. Each meets another
fate; all must finish with exactly the losses of an undisturbed run.
"""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import pytest
from mlflow import MlflowClient

from air_hpc.rundir.layout import RunDir, list_runs
from air_hpc.rundir.words import FailureClass
from tests.acceptance.runs import (
    SMALL,
    air_hpc,
    assert_finished_like,
    events_of,
    job_of,
    status_of,
    story,
    wait_for_end,
    wait_for_step,
    wait_until,
)
from tests.slurm_cluster import DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """A runs folder of the test's own."""
    return tmp_path / "runs"


def submit_array(cluster: DevCluster, runs_dir: Path, *fates: str) -> dict[str, RunDir]:
    """One array, a task a fate; the runs by their fates."""
    air_hpc(
        *SMALL, "cluster=slurm", "launch.nodes=2", "launch.devices_per_node=2",
        "launch.partition=low", "launch.time_limit_min=30", "launch.lead_s=150",
        f"runs_dir={runs_dir}", "-m", f"name={','.join(fates)}", cluster=cluster,
    )  # fmt: skip
    found = list_runs(runs_dir)
    assert len(found) == len(fates)
    return dict(zip(fates, found, strict=True))


def has_the_arrays_own_id(run: RunDir) -> bool:
    """Whether this task's SLURM_JOB_ID equals the array's."""
    facts = events_of(run, "attempt_started")[-1].facts
    return bool(facts["job_id"] == facts["array_job_id"])


def bring_limit_near(cluster: DevCluster, job: str) -> None:
    """Set the job's time limit so that the warning, 150 s ahead of it, is due at once."""
    elapsed_s = time.time() - cluster_start(cluster, job)
    minutes = int((elapsed_s + 75) // 60) + 1
    cluster.run(["scontrol", "update", f"jobid={job}", f"timelimit={minutes}"])


def cluster_start(cluster: DevCluster, job: str) -> float:
    """When the job started, in seconds since the epoch."""
    started = cluster.job(job)["StartTime"]
    return datetime.fromisoformat(started).timestamp()


def test_each_of_four_disturbed_runs_finishes_as_if_undisturbed(
    devcluster: DevCluster, tmp_path: Path, runs_dir: Path, reference: dict[int, float]
) -> None:
    labels = ("a", "b", "c", "d")
    array = submit_array(devcluster, runs_dir, *labels)
    runs = list(array.values())
    wait_until(lambda: all(events_of(run, "attempt_started") for run in runs), "all to start", 120)
    # The task that has the array's own job id is the one requeued by hand: the classic mistake is
    # to requeue the whole array by that id.
    requeued = next(run for run in runs if has_the_arrays_own_id(run))
    preempted, limited, lost = (run for run in runs if run is not requeued)
    wait_for_step(runs, 16)

    nodes = status_of(preempted).nodes
    assert nodes is not None
    devcluster.submit("sleep 5", "-p", "high", "-N", "2", "-w", ",".join(nodes), "--exclusive")
    devcluster.run(["scontrol", "requeue", job_of(requeued)])
    bring_limit_near(devcluster, job_of(limited))
    lost_nodes = status_of(lost).nodes
    assert lost_nodes is not None
    devcluster.kill_node(lost_nodes[1])
    wait_until(
        lambda: (
            any(e.facts.get("failure_class") for e in events_of(lost, "attempt_ended"))
            or len(events_of(lost, "attempt_started")) > 1
        ),
        "the loss of the node to be noticed",
        120,
    )
    devcluster.revive_node(lost_nodes[1])
    # A requeued job keeps the limit that was shortened above, which leaves no time to train in.
    wait_until(lambda: events_of(limited, "attempt_ended"), "the time limit", 120)
    devcluster.run(["scontrol", "update", f"jobid={job_of(limited)}", "timelimit=30"])

    wait_for_end(runs)
    for run in runs:
        assert_finished_like(run, reference)
        assert len(events_of(run, "attempt_started")) > 1, story(run)
    first_ends = {
        label: events_of(run, "attempt_ended")[0].facts["failure_class"]
        for label, run in (("preempted", preempted), ("limited", limited), ("requeued", requeued))
    }
    assert first_ends == {
        "preempted": FailureClass.PREEMPTED,
        "limited": FailureClass.TIME_LIMIT,
        "requeued": FailureClass.REQUEUED,
    }
    assert_mlflow_has_each_step_once(devcluster, runs, tmp_path, reference)


def assert_mlflow_has_each_step_once(
    cluster: DevCluster, runs: list[RunDir], folder: Path, reference: dict[int, float]
) -> None:
    """One MLflow run for each run, FINISHED, with the losses that count, each step once."""
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    air_hpc("sync", *[str(run.path) for run in runs], "--uri", uri, "--json", cluster=cluster)
    client = MlflowClient(uri)
    (experiment,) = client.search_experiments(filter_string="name = 'air_hpc'")
    found = {
        each.data.tags["air_hpc.run_id"]: each
        for each in client.search_runs([experiment.experiment_id])
    }
    assert sorted(found) == sorted(run.run_id for run in runs)
    for each in found.values():
        assert each.info.status == "FINISHED"
        history = client.get_metric_history(each.info.run_id, "train/loss")
        steps = [point.step for point in history]
        assert sorted(steps) == sorted(reference), "a step is missing or doubled"
        assert {point.step: point.value for point in history} == reference
