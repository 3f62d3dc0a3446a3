"""What a run on a real Slurm survives inside its allocation, and what only by a requeue of its own.

Slurm does neither: under --no-kill it takes a dead node out of the job, and restarts nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

from air_hpc.rundir.layout import RunDir, list_runs
from air_hpc.rundir.words import FailureClass, RunState, Verdict
from tests.acceptance.conftest import undisturbed
from tests.acceptance.runs import (
    ROOT,
    SHORT,
    SMALL,
    air_hpc,
    assert_finished_like,
    events_of,
    job_of,
    losses,
    status_of,
    story,
    wait_for_end,
    wait_until,
)
from tests.slurm_cluster import DevCluster

sys.path.insert(0, str(ROOT / "tools"))

from _chaos.processes import run_processes

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]

ON_SLURM = (
    "cluster=slurm",
    "launch.partition=low",
    "launch.time_limit_min=30",
    "tracking.uri=null",
)
ELASTIC = (*SMALL, "train.steps=240", "model.dropout=0", "train.global_batch_size=12")
"""A batch that three workers and two can share; without dropout, whose masks are a rank's own."""
ELASTIC_TOLERANCE = 1e-3
"""Relative: with another world size the gradients are added in another order."""

DRILL = """

import os
import signal

_train_step = Trainer._train_step


def _drilled(self: Trainer, *words: object) -> None:
    drill = os.environ.get("DRILL")
    if drill and self.step == 20 and self.session.is_first:
        if drill == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif "SLURM_RESTART_COUNT" not in os.environ:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    _train_step(self, *words)


Trainer._train_step = _drilled
"""
"""What the drilled checkout does in step 21: `kill` always, `ecc` in the job's first start."""


def submit(
    cluster: DevCluster,
    runs_dir: Path,
    nodes: int,
    devices: int,
    *words: str,
    checkout: Path = ROOT,
) -> RunDir:
    """One run; `words` come first, with the model among them."""
    shape = (f"launch.nodes={nodes}", f"launch.devices_per_node={devices}")
    known = set() if not runs_dir.exists() else {run.run_id for run in list_runs(runs_dir)}
    air_hpc(
        *words, *ON_SLURM, *shape, f"runs_dir={runs_dir}", cluster=cluster, checkout=checkout
    )  # fmt: skip
    (made,) = (run for run in list_runs(runs_dir) if run.run_id not in known)
    return made


def once_trained(
    faults: Mapping[RunDir, Callable[[RunDir], object]], timeout_s: float = 300
) -> None:
    """Disturb each run as soon as it has committed its first checkpoint."""
    left = dict(faults)

    def look() -> bool:
        for run in [run for run in left if (status_of(run).committed_step or 0) >= 16]:
            left.pop(run)(run)
        return not left

    wait_until(look, "the first checkpoint of " + ", ".join(r.run_id for r in faults), timeout_s)


def generations(run: RunDir) -> list[tuple[str, list[str], int]]:
    """Token, nodes and world size of each generation."""
    return [
        (str(event.token), list(event.facts["nodes"]), event.facts["world_size"])
        for event in events_of(run, "generation_started")
    ]


def assert_ends_in_slurm(cluster: DevCluster, run: RunDir, state: str = "COMPLETED") -> None:
    """The job comes to its end, and then holds no node (one that is COMPLETING does)."""
    cluster.wait_for_job(job_of(run), state, timeout_s=120)
    held = cluster.run(["squeue", "-h", "-j", job_of(run), "-o", "%N"], check=False).stdout.strip()
    assert not held


@pytest.fixture(scope="module")
def elastic_reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of three undisturbed workers."""
    return undisturbed(tmp_path_factory, *ELASTIC, "launch.devices_per_node=3")


def test_lost_workers_and_nodes_are_survived_inside_the_allocation(
    devcluster: DevCluster,
    tmp_path: Path,
    reference: dict[int, float],
    elastic_reference: dict[int, float],
) -> None:
    """A worker killed; of three nodes one killed, with a spare, and without one but elastic."""
    runs_dir = tmp_path / "runs"
    worker = submit(devcluster, runs_dir, 2, 2, *SMALL)
    spare = submit(
        devcluster, runs_dir, 2, 2, *SMALL, "recovery.restart=spare", "recovery.spare_nodes=1"
    )
    elastic = submit(
        devcluster, runs_dir, 3, 1, *ELASTIC, "recovery.restart=elastic", "recovery.min_nodes=2"
    )

    def kill_worker(run: RunDir) -> None:
        node = generations(run)[0][1][1]
        os.kill(run_processes(run.path).workers[node][0].pid, signal.SIGKILL)

    def kill_second_node(run: RunDir) -> None:
        devcluster.kill_node(generations(run)[0][1][1])

    once_trained({worker: kill_worker, spare: kill_second_node, elastic: kill_second_node})
    wait_for_end([worker, spare, elastic])

    for run in (worker, spare):
        assert_finished_like(run, reference)
    found = losses(elastic)
    assert status_of(elastic).state is RunState.FINISHED, story(elastic)
    assert list(found) == list(elastic_reference), story(elastic)
    assert found == pytest.approx(elastic_reference, rel=ELASTIC_TOLERANCE), story(elastic)

    first, second = generations(worker)
    assert second == ("1.2", first[1], 4), story(worker)
    (_, before, _), second = generations(spare)
    (hot,) = set(events_of(spare, "attempt_started")[0].facts["nodes"]) - set(before)
    assert second == ("1.2", [before[0], hot], 4), story(spare)
    (_, before, _), second = generations(elastic)
    assert second == ("1.2", [before[0], before[2]], 2), story(elastic)
    for run in (worker, spare, elastic):
        assert len(events_of(run, "attempt_started")) == 1, story(run)
        assert_ends_in_slurm(devcluster, run)
        assert devcluster.job(job_of(run))["Restarts"] == "0"


def test_a_lost_or_stopped_coordinator_is_survived_by_a_requeue(
    devcluster: DevCluster, tmp_path: Path, short_reference: dict[int, float]
) -> None:
    """Slurm starts neither again: the job stayed RUNNING, with a dead batch host."""
    words = (*SHORT, "recovery.lease_s=20")
    killed, stopped = (submit(devcluster, tmp_path / name, 2, 1, *words) for name in ("k", "s"))

    def kill_first_node(run: RunDir) -> None:
        devcluster.kill_node(generations(run)[0][1][0])

    def stop_first_agent(run: RunDir) -> None:
        psutil.Process(events_of(run, "attempt_started")[0].facts["pid"]).suspend()

    once_trained({killed: kill_first_node, stopped: stop_first_agent})
    wait_for_end([killed, stopped])
    for run in (killed, stopped):
        assert_finished_like(run, short_reference)
        end = events_of(run, "attempt_ended")[0].facts
        assert end["failure_class"] == FailureClass.NODE_LOST, story(run)
        assert "the lowest survivor" in end["reason"], story(run)
        assert_ends_in_slurm(devcluster, run)
        assert devcluster.job(job_of(run))["Restarts"] == "1"
    assert len(events_of(killed, "attempt_started")) == 2, story(killed)
    # Workers go on while their coordinator stands still, and may get to the end before it is
    # missed: then the second start finds nothing to do.
    assert len(events_of(stopped, "attempt_started")) in (1, 2), story(stopped)


def test_a_run_goes_on_although_no_agent_is_left(
    devcluster: DevCluster, tmp_path: Path, short_reference: dict[int, float]
) -> None:
    """The first node dies, and the second one's agent is killed: right after it, or before it, when
    the coordinator had given that node up. Nobody asked for the requeue; both ran on empty."""
    together = submit(devcluster, tmp_path / "together", 2, 1, *SHORT)
    words = ("recovery.restart=elastic", "recovery.min_nodes=1", "train.steps=400")
    before = submit(devcluster, tmp_path / "before", 2, 1, *SHORT, *words)

    def kill_agent(run: RunDir) -> None:
        node = generations(run)[0][1][1]
        os.kill(run_processes(run.path).agents[node].pid, signal.SIGKILL)

    def kill_first_node_and_agent(run: RunDir) -> None:
        devcluster.kill_node(generations(run)[0][1][0])
        kill_agent(run)

    once_trained({together: kill_first_node_and_agent, before: kill_agent})
    wait_until(lambda: len(generations(before)) == 2 and len(losses(before)) > 100, "one node", 120)
    devcluster.kill_node(generations(before)[0][1][0])
    wait_for_end([together, before])

    assert_finished_like(together, short_reference)
    for run in (together, before):
        assert status_of(run).state is RunState.FINISHED, story(run)
        end = events_of(run, "attempt_ended")[0].facts
        assert end["failure_class"] == FailureClass.NODE_LOST, story(run)
        assert_ends_in_slurm(devcluster, run)
        assert devcluster.job(job_of(run))["Restarts"] == "1"


@pytest.fixture
def drilled(tmp_path: Path) -> Path:
    """A checkout whose training fails as DRILL says."""
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache"))
    with (checkout / "air_hpc" / "train" / "loop.py").open("a") as file:
        file.write(DRILL)
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=checkout, check=True)
    return checkout


def test_a_run_that_cannot_progress_stays_stopped_and_a_bad_device_is_avoided(
    devcluster: DevCluster, tmp_path: Path, drilled: Path, short_reference: dict[int, float]
) -> None:
    runs_dir = tmp_path / "runs"
    stuck, device = (
        submit(
            devcluster, runs_dir, 1, 2, *SHORT, f"+cluster.env.DRILL={drill}", checkout=drilled
        )
        for drill in ("kill", "ecc")
    )  # fmt: skip
    wait_for_end([stuck, device])

    # The third end without a newer checkpoint is the last, and a forced start changes nothing.
    assert status_of(stuck).state is RunState.FAILED, story(stuck)
    assert [token for token, _, _ in generations(stuck)] == ["1.1", "1.2", "1.3"], story(stuck)
    assert_ends_in_slurm(devcluster, stuck, "FAILED")
    assert devcluster.job(job_of(stuck))["ExitCode"] == "93:0"
    devcluster.run(["scontrol", "requeue", job_of(stuck)])
    devcluster.wait_until(
        lambda: (
            (job := devcluster.job(job_of(stuck)))["Restarts"] == "1"
            and job["JobState"] == "FAILED"
        ),
        "the forced start to end",
        120,
    )
    assert devcluster.job(job_of(stuck))["ExitCode"] == "93:0"
    assert len(events_of(stuck, "attempt_started")) == 1, story(stuck)
    assert status_of(stuck).state is RunState.FAILED

    # The device's node is left out at the next start of the run, and by the next run.
    assert_finished_like(device, short_reference)
    ended = events_of(device, "attempt_ended")[0].facts
    assert ended["failure_class"] == FailureClass.DEVICE, story(device)
    assert ended["verdict"] == Verdict.EXCLUDE_AND_REQUEUE, story(device)
    first, second = (e.facts["nodes"][0] for e in events_of(device, "attempt_started"))
    assert first != second, story(device)
    assert devcluster.job(job_of(device))["ExcNodeList"] == first
    next_run = submit(devcluster, runs_dir, 1, 2, *SHORT, "+launch.sbatch.hold=true")
    (submitted,) = events_of(next_run, "submitted")
    assert devcluster.job(str(submitted.facts["job_id"]))["ExcNodeList"] == first
