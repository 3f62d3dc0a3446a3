"""Bad input, a full disk and a submitter that dies, against a real site: everything is told in one
pass, nothing is submitted by mistake or twice, and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from air_hpc.launch.submission import load
from air_hpc.rundir.commit import find_candidates
from air_hpc.rundir.layout import RunDir, list_runs
from tests.acceptance.runs import (
    ROOT,
    SHORT,
    air_hpc,
    assert_finished_like,
    events_of,
    story,
    wait_for_end,
)
from tests.slurm_cluster import DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def start(
    *words: str, cluster: DevCluster | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """`python -m air_hpc WORDS`, whatever it comes to."""
    return subprocess.run(
        [sys.executable, "-m", "air_hpc", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(cluster.env if cluster else {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def queued(cluster: DevCluster) -> list[str]:
    """All jobs, an element of an array each, by array job and index."""
    return sorted(cluster.run(["squeue", "-h", "-r", "-o", "%i"]).stdout.split())


@pytest.fixture
def limited(devcluster: DevCluster) -> Iterator[DevCluster]:
    """The partition low takes at most 90 minutes."""
    devcluster.run(["scontrol", "update", "partition=low", "MaxTime=90"])
    yield devcluster
    devcluster.run(["scontrol", "update", "partition=low", "MaxTime=UNLIMITED"])


CPU_ONLY = {
    "launch.nodes=9": "launch.nodes",
    "launch.time_limit_min=91": "launch.time_limit_min",
    "launch.comment='one\ntwo'": "launch.comment",
    "launch.cpus_per_device=9": "launch.cpus_per_device",
    "model.heads=3": "model.heads",
    "parallelism.tp=3": "parallelism.tp",
    "train.steps=many": "train.steps",
    "optimiser.lr=1": "optimiser",
    "launch.sbatch={no-such: 1}": "launch.sbatch.no-such",
}


def test_all_problems_of_a_command_are_told_in_one_pass(
    limited: DevCluster, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    wrong = {**CPU_ONLY, f"runs_dir={in_the_way}/runs": "runs_dir"}
    done = start("cluster=slurm", *wrong, "--json", cluster=limited)
    assert done.returncode == 2, done.stderr
    told = {problem["key"] for problem in json.loads(done.stdout)["problems"]}
    assert {key for key in wrong.values() if not any(t.startswith(key) for t in told)} == set()
    assert queued(limited) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["launch.partition=lou"], ["launch.partition"]),
        (["launch.nodes=9", "train.global_batch_size=18"], ["launch.nodes"]),
        (["launch.time_limit_min=91"], ["launch.time_limit_min"]),
        (
            ["accelerator=h100_sxm", "launch.devices_per_node=4", "launch.nodes=16",
             "train.global_batch_size=64"],
            ["launch.nodes", "launch.devices_per_node"],
        ),
        (["launch.nodes=2", "parallelism.dp_replicate=3"], ["parallelism"]),
    ],
    ids=["partition", "nodes", "walltime", "devices and nodes", "mesh"],
)  # fmt: skip
def test_what_the_site_cannot_give_leaves_no_trace(
    limited: DevCluster, tmp_path: Path, words: list[str], expected: list[str]
) -> None:
    runs_dir = tmp_path / "runs"
    done = start("cluster=slurm", f"runs_dir={runs_dir}", *words, "--json", cluster=limited)
    assert done.returncode == 2, done.stderr
    assert [problem["key"] for problem in json.loads(done.stdout)["problems"]] == expected
    assert queued(limited) == []
    assert not runs_dir.exists()


def test_a_run_of_a_newer_version_is_left_alone_and_says_so(
    devcluster: DevCluster, tmp_path: Path
) -> None:
    runs_dir = tmp_path / "runs"
    held = ("cluster=slurm", "launch.nodes=2", "launch.sbatch={hold: true}")
    air_hpc(*SHORT, *held, f"runs_dir={runs_dir}", cluster=devcluster)
    (run,) = list_runs(runs_dir)
    text = run.run_yaml.read_text()
    run.run_yaml.write_text(text.replace("schema_version: 1", "schema_version: 99"))
    (submitted,) = events_of(run, "submitted")
    job = str(submitted.facts["job_id"])
    devcluster.run(["scontrol", "release", job])
    assert devcluster.wait_for_job(job, "FAILED")["ExitCode"] == "2:0"
    log = air_hpc("logs", str(run.path), cluster=devcluster)
    assert log.count("written by a newer air_hpc") == 2
    assert "Traceback" not in log
    assert os.listdir(run.tokens_dir) == []


@pytest.fixture
def small_disk() -> Iterator[Any]:
    """Mounts a tiny file system on a folder; the function enlarges it when called again."""
    mounted: list[Path] = []

    def mount(path: Path, kib: int) -> None:
        options = f"size={kib}k"
        if path in mounted:
            options = f"remount,{options}"
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode and not mounted:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        mounted.append(path)

    yield mount
    for path in dict.fromkeys(mounted):
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_disk_costs_an_older_checkpoint_and_never_the_run(
    tmp_path: Path, small_disk: Any, short_reference: dict[int, float]
) -> None:
    """Room for two checkpoints where a third is written before the first is removed: the oldest
    that can be spared goes, said loudly, and the run trains on as if nothing had been."""
    runs_dir = tmp_path / "runs"
    words = (*SHORT, "launch.devices_per_node=2", "tracking.uri=null", f"runs_dir={runs_dir}")
    air_hpc(*words, "--detach")
    (run,) = list_runs(runs_dir)
    try:
        small_disk(run.checkpoints_dir, 1400)
        wait_for_end([run], 200)
    except BaseException:
        air_hpc("cancel", str(run.path))
        raise
    failed = events_of(run, "checkpoint_failed")
    assert len(failed) > 3, story(run)
    assert all("No space left" in event.facts["reason"] for event in failed)
    committed = [event.facts["step"] for event in events_of(run, "checkpoint_committed")]
    for event in failed:
        assert event.facts["tried_again"]
        assert event.facts["removed_step"] < event.facts["step"]
    assert committed == sorted(committed)
    assert len(events_of(run, "attempt_started")) == 1
    assert find_candidates(run).usable[0].step == committed[-1]
    assert_finished_like(run, short_reference)


@pytest.mark.parametrize("moment", ["preparing", "ready", "asked", "answered"])
def test_a_submitter_killed_half_way_and_repeated_submits_once(
    devcluster: DevCluster, tmp_path: Path, moment: str
) -> None:
    """Two shapes of two runs each: two arrays. Whatever had been done when it died, the repetition
    leaves exactly one job for each run."""
    runs_dir = tmp_path / "runs"
    words = [
        "cluster=slurm", "launch.sbatch={hold: true}", f"runs_dir={runs_dir}",
        "-m", "launch.nodes=1,2", "train.seed=1,2",
    ]  # fmt: skip
    killed_at(moment, words, runs_dir, devcluster)
    submissions = list((runs_dir / ".air_hpc" / "submissions").glob("*"))
    assert len(submissions) == 1
    again = start("--resume", submissions[0].name, "--runs-dir", str(runs_dir), cluster=devcluster)
    if again.returncode == 2:  # it died before anything could have been submitted
        assert "nothing was submitted" in again.stderr
        assert queued(devcluster) == []
        assert list_runs(runs_dir) == []
        again = start(*words, cluster=devcluster)
    assert again.returncode == 0, again.stderr
    runs = list_runs(runs_dir)
    assert len(runs) == 4
    told = sorted(job for run in runs for job in jobs_of(run))
    assert len(told) == 4
    assert queued(devcluster) == told


def killed_at(moment: str, words: list[str], runs_dir: Path, cluster: DevCluster) -> None:
    """Start the command and SIGKILL it once its record has come this far (or a little further)."""
    process = subprocess.Popen(
        [sys.executable, "-m", "air_hpc", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **cluster.env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    folder = runs_dir / ".air_hpc" / "submissions"
    deadline = time.monotonic() + 60
    while not any(moment in reached(path.parent) for path in folder.glob("*/submission.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None, f"it ended before it was {moment}"
        time.sleep(0.0005)
    process.kill()
    process.wait()


def reached(folder: Path) -> set[str]:
    """The states in a submission's record."""
    record = load(folder)
    return set() if record is None else {record.state, *(str(ask.state) for ask in record.asks)}


def jobs_of(run: RunDir) -> list[str]:
    """The jobs that the run's ledger says were submitted for it."""
    facts = [event.facts for event in events_of(run, "submitted")]
    return [f"{each['job_id']}_{each['array_task_id']}" for each in facts]
