"""How a run goes on after a job: a new job, the next link of a chain, or not at all; and the same
plan inside an allocation. All on a real Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from air_hpc.rundir.layout import RunDir, list_runs
from air_hpc.rundir.words import FailureClass, RunState
from tests.acceptance.runs import (
    ROOT,
    SHORT,
    air_hpc,
    assert_finished_like,
    events_of,
    job_of,
    status_of,
    story,
    wait_for_end,
    wait_for_step,
)
from tests.slurm_cluster import DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

TWO_NODES = ("cluster=slurm", "launch.nodes=2", "launch.partition=low", "launch.time_limit_min=30")


def submit_one(cluster: DevCluster, runs_dir: Path, *more: str) -> RunDir:
    """One run of two nodes with a worker each, disturbed once it has saved something."""
    air_hpc(*SHORT, *TWO_NODES, f"runs_dir={runs_dir}", *more, cluster=cluster)
    (run,) = list_runs(runs_dir)
    wait_for_step([run], 16)
    return run


def bring_the_limit(cluster: DevCluster, run: RunDir) -> None:
    """The signal that Slurm sends ahead of the time limit."""
    cluster.run(["scancel", "--signal=USR2", job_of(run)])


def preempt(cluster: DevCluster, run: RunDir) -> None:
    """A job of the high partition takes the run's nodes."""
    nodes = status_of(run).nodes
    assert nodes is not None
    cluster.submit("sleep 1", "-p", "high", "-N", "2", "-w", ",".join(nodes), "--exclusive")


def jobs_of(run: RunDir) -> list[str]:
    """The job of each attempt."""
    return [str(event.facts["job_id"]) for event in events_of(run, "attempt_started")]


def first_end(run: RunDir) -> FailureClass:
    """What ended the first attempt."""
    return FailureClass(events_of(run, "attempt_ended")[0].facts["failure_class"])


def test_a_resubmitted_run_goes_on_in_a_job_of_its_own(
    devcluster: DevCluster, tmp_path: Path, short_reference: dict[int, float]
) -> None:
    run = submit_one(devcluster, tmp_path / "runs", "launch.continuation=resubmit")
    bring_the_limit(devcluster, run)
    wait_for_end([run])
    assert_finished_like(run, short_reference)
    assert first_end(run) is FailureClass.TIME_LIMIT
    first, second = jobs_of(run)
    assert first != second
    assert list_runs(run.runs_dir) == [run]


def test_the_next_link_of_a_chain_goes_on_where_a_preempted_one_stopped(
    devcluster: DevCluster, tmp_path: Path, short_reference: dict[int, float]
) -> None:
    """The second link finishes the run, and the third finds nothing to do."""
    chain = ("launch.continuation=chain", "launch.chain_length=3")
    run = submit_one(devcluster, tmp_path / "runs", *chain)
    submitted = [event.facts["job_id"] for event in events_of(run, "submitted")]
    assert len(submitted) == 3
    preempt(devcluster, run)
    wait_for_end([run])
    assert_finished_like(run, short_reference)
    assert first_end(run) is FailureClass.PREEMPTED
    devcluster.wait_for_job(submitted[2], "COMPLETED", timeout_s=90)
    assert jobs_of(run) == submitted[:2]
    assert list_runs(run.runs_dir) == [run]


def test_without_a_continuation_the_run_stops_and_says_why(
    devcluster: DevCluster, tmp_path: Path
) -> None:
    run = submit_one(devcluster, tmp_path / "runs", "launch.continuation=none")
    bring_the_limit(devcluster, run)
    wait_for_end([run], 60)
    status = status_of(run)
    assert (status.state, status.failure_class) == (RunState.FAILED, FailureClass.TIME_LIMIT)
    (end,) = events_of(run, "attempt_ended")
    assert end.facts["reason"] == "launch.continuation=none"
    # What was trained until then is saved.
    assert status.committed_step == status.step, story(run)
    assert devcluster.wait_for_job(job_of(run), "FAILED")["ExitCode"] == "93:0"


def in_allocation(cluster: DevCluster, nodes: int, *words: str) -> subprocess.CompletedProcess[str]:
    """`salloc -N NODES python -m air_hpc WORDS`."""
    return subprocess.run(
        ["salloc", f"-N{nodes}", "--exclusive", "--partition=low",
         sys.executable, "-m", "air_hpc", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **cluster.env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )  # fmt: skip


def test_inside_an_allocation_the_same_plan_runs_at_once(
    devcluster: DevCluster, tmp_path: Path, short_reference: dict[int, float]
) -> None:
    where = ("cluster=allocation", "launch.nodes=2", f"runs_dir={tmp_path / 'runs'}")
    done = in_allocation(devcluster, 2, *SHORT, *where)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    (run,) = list_runs(tmp_path / "runs")
    assert_finished_like(run, short_reference)
    (start,) = events_of(run, "attempt_started")
    assert start.facts["nodes"] == ["n1", "n2"]
    assert "FINISHED" in done.stdout


def test_an_allocation_that_is_too_small_or_not_there_is_told_before_anything_is_made(
    devcluster: DevCluster, tmp_path: Path
) -> None:
    words = ("cluster=allocation", "launch.nodes=2", f"runs_dir={tmp_path / 'runs'}")
    small = in_allocation(devcluster, 1, *words)
    assert small.returncode == 2, small.stdout
    assert "launch.nodes=2: is more than the allocation" in small.stderr
    assert not (tmp_path / "runs").exists()


def test_a_run_submitted_from_inside_an_allocation_has_nothing_of_it(
    devcluster: DevCluster, tmp_path: Path
) -> None:
    words = ("train.steps=20", *TWO_NODES, f"runs_dir={tmp_path / 'runs'}", "--json")
    done = in_allocation(devcluster, 1, *SHORT, *words)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    (run,) = list_runs(tmp_path / "runs")
    wait_for_end([run])
    assert status_of(run).state is RunState.FINISHED, story(run)
    nodes = status_of(run).nodes
    assert nodes is not None
    assert len(nodes) == 2
