"""The whole way as an ordinary user of a real Slurm: without slurmdbd, and with its accounts, QOS
and limits.

The user has a checkout of his own in his home, since he may not be able to read the tests' own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from air_hpc.rundir.layout import RunDir, list_runs
from air_hpc.rundir.words import FailureClass
from tests.acceptance.runs import (
    ROOT,
    SHORT,
    assert_finished_like,
    events_of,
    job_of,
    losses,
    status_of,
    story,
    wait_for_end,
    wait_for_step,
)
from tests.slurm_cluster import USER, DevCluster, why_no_cluster
from tests.user_python import LIGHT, UserPython, python_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

TWO_NODES = ("cluster=slurm", "launch.nodes=2", "launch.partition=low", "launch.time_limit_min=30")
HELD = ("cluster=slurm", "launch.sbatch={hold: true}")


class Home:
    """A folder of the user's, with a checkout, and the command line as he has it."""

    def __init__(self, path: Path, python: UserPython, checkout: Path) -> None:
        self.path, self.python, self.checkout = path, python, checkout
        self.cluster: DevCluster | None = None

    @property
    def runs_dir(self) -> Path:
        return self.path / "runs"

    def call(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """`python -m air_hpc WORDS` in this folder, whatever it comes to."""
        command = [self.python.executable, "-m", "air_hpc", *words]
        environ = {**self.python.env, **env}
        cluster = self.cluster
        assert cluster is not None
        return cluster.run(command, USER, env=environ, cwd=self.path, check=False, timeout_s=200)

    def ask(self, *words: str, **env: str) -> dict[str, Any]:
        """The JSON object that a command prints, which must succeed."""
        done = self.call(*words, "--json", **env)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def refused(self, *words: str, **env: str) -> list[str]:
        """The keys that a command finds fault with, which must be all that comes of it."""
        done = self.call(*words, "--json", **env)
        assert done.returncode == 2, f"{words}\n{done.stdout}\n{done.stderr}"
        assert self.queued() == []
        assert not self.runs_dir.exists()
        return [problem["key"] for problem in json.loads(done.stdout)["problems"]]

    def submit(self, *words: str, **env: str) -> RunDir:
        """Submit one run; its directory."""
        return RunDir(Path(self.ask(*words, **env)["run_dir"]))

    def queued(self) -> list[str]:
        """The user's jobs, an element of an array each."""
        assert self.cluster is not None
        return self.cluster.run(["squeue", "-h", "-r", "-u", USER, "-o", "%i"]).stdout.split()


@pytest.fixture(scope="module")
def user_home(devcluster_session: DevCluster) -> Iterator[Home]:
    """The user's folder; the cluster's start has made the user."""
    path = Path(f"/home/{USER}") / f"acceptance-{uuid.uuid4().hex[:6]}"
    checkout = path / "checkout"
    for name in ("air_hpc", "conf", "sbatch_templates"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, checkout / name, ignore=ignored)
    subprocess.run(["chown", "-R", f"{USER}:", str(path)], check=True)
    python = python_for(USER, checkout=checkout, modules=f"{LIGHT}, torch, zmq, psutil, mlflow")
    if python is None:
        shutil.rmtree(path)
        pytest.skip(f"{USER} can run no Python {sys.version_info[:2]} with our dependencies")
    yield Home(path, python, checkout)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def accounting_cluster() -> Iterator[DevCluster]:
    """Two nodes with slurmdbd: accounts, QOS and limits are enforced."""
    if reason := why_no_cluster():
        pytest.skip(reason)
    with DevCluster() as cluster:
        yield cluster.up(nodes=2, devices_per_node=2, accounting=True)


def at(home: Home, cluster: DevCluster) -> Iterator[Home]:
    """The user's folder for one test on a cluster."""
    home.cluster = cluster
    yield home
    cluster.clean()
    shutil.rmtree(home.runs_dir, ignore_errors=True)


@pytest.fixture(scope="module")
def undisturbed(user_home: Home, devcluster_session: DevCluster) -> dict[int, float]:
    """The losses of an undisturbed run of the user's: the text that is trained on is that of his
    Python's own library."""
    user_home.cluster = devcluster_session
    words = (*SHORT, "launch.devices_per_node=2", "tracking.uri=null", "runs_dir=undisturbed")
    return losses(RunDir(Path(user_home.ask(*words)["run_dir"])))


@pytest.fixture
def accounted(user_home: Home, accounting_cluster: DevCluster) -> Iterator[Home]:
    yield from at(user_home, accounting_cluster)


@pytest.fixture(params=["devcluster_session", "accounting_cluster"], ids=["plain", "slurmdbd"])
def home(user_home: Home, request: pytest.FixtureRequest) -> Iterator[Home]:
    yield from at(user_home, request.getfixturevalue(request.param))


def test_a_users_run_is_followed_through_a_requeue_to_its_end(
    home: Home, undisturbed: dict[int, float]
) -> None:
    # The job starts with the user's login environment, which has none of this test's packages.
    environ = f'cluster.env={{PYTHONPATH: "{home.python.path}"}}'
    run = home.submit(*SHORT, *TWO_NODES, environ)
    wait_for_step([run], 16)
    assert home.cluster is not None
    home.cluster.run(["scontrol", "requeue", job_of(run)], USER)
    wait_for_end([run])
    assert_finished_like(run, undisturbed)
    first, _ = events_of(run, "attempt_ended")
    assert first.facts["failure_class"] == FailureClass.REQUEUED, story(run)

    told = home.ask("status", run.run_id)
    assert (told["state"], told["step"], told["attempt"]) == ("FINISHED", 160, 2)
    assert (told["job_id"], told["nodes"]) == (job_of(run), ["n1", "n2"])
    for attempt in ("1", "2"):
        done = home.call("logs", run.run_id, "--attempt", attempt, "--rank", "0")
        assert done.returncode == 0, done.stderr
        assert f"attempt {attempt}, generation 1, node n1" in done.stdout
    uri = f"sqlite:///{home.path}/mlflow-{run.run_id}.db"
    (synced,) = home.ask("sync", run.run_id, "--uri", uri)["runs"]
    assert (synced["state"], synced["error"]) == ("FINISHED", None)
    assert home.ask("status", run.run_id)["mlflow_run_id"] == synced["mlflow_run_id"]
    for place in (run.path, run.checkpoints_dir, home.runs_dir / ".air_hpc"):
        found = os.stat(place)
        assert (found.st_mode & 0o77, Path(place).owner()) == (0, USER), place


def test_a_user_cancels_a_run_that_waits_and_one_that_trains(accounted: Home) -> None:
    home = accounted
    environ = f'cluster.env={{PYTHONPATH: "{home.python.path}"}}'
    waiting = home.submit(*HELD)
    training = home.submit(*SHORT, *TWO_NODES, environ, "train.steps=100000")
    wait_for_step([training], 16)
    ended = home.ask("cancel", waiting.run_id, training.run_id)
    assert {row["run_id"] for row in ended["runs"]} == {waiting.run_id, training.run_id}
    wait_for_end([training], 60)
    assert home.cluster is not None
    home.cluster.wait_until(lambda: not home.queued(), "the jobs to be gone")
    states = {row["run_id"]: row["state"] for row in home.ask("status")["runs"]}
    assert states == {waiting.run_id: "CANCELLED", training.run_id: "CANCELLED"}
    status = status_of(training)
    assert status.committed_step == status.step, story(training)


def test_accounts_and_qos_that_a_user_does_not_have_never_reach_sbatch(accounted: Home) -> None:
    keys = accounted.refused(
        "cluster=slurm", "launch.account=other", "launch.qos=nosuch", "launch.nodes=3",
        "launch.comment='a\nb'", "train.steps=few", "runs_dir=/root/mine",
    )  # fmt: skip
    expected = {"account", "qos", "nodes", "comment"}
    assert {f"launch.{key}" for key in expected} | {"train.steps", "runs_dir"} <= set(keys)
    assert accounted.refused("cluster=slurm", SBATCH_ACCOUNT="other") == ["launch.account"]
    assert accounted.refused("cluster=slurm", "launch.qos=high") == ["launch.qos"]


def test_the_account_of_the_users_environment_is_taken_and_recorded(accounted: Home) -> None:
    run = accounted.submit(*HELD, SBATCH_ACCOUNT="research", SBATCH_QOS="limited")
    assert accounted.cluster is not None
    job = accounted.cluster.job(accounted.queued()[0])
    assert (job["Account"], job["QOS"]) == ("research", "limited")
    written = run.run_yaml.read_text()
    assert "account: research" in written
    assert "qos: limited" in written


def test_a_full_queue_takes_the_run_later_and_once(accounted: Home) -> None:
    cluster = accounted.cluster
    assert cluster is not None
    other = cluster.submit("true", "--hold", "--qos=limited", "--array=0-19")
    words = (*HELD, "launch.qos=limited")
    refused = accounted.call(*words)
    assert refused.returncode == 1
    assert "the queue takes no more of your jobs now" in refused.stderr
    assert len(accounted.queued()) == 20
    (run,) = list_runs(accounted.runs_dir)
    assert f"run --resume {run.run_id}" in refused.stderr
    assert events_of(run, "submit_failed") == []
    cluster.run(["scancel", other])
    cluster.wait_until(lambda: not accounted.queued(), "room in the queue")
    for _ in range(2):
        (again,) = accounted.ask("--resume", run.run_id)["runs"]
        assert accounted.queued() == [again["job_id"]]


def test_a_sweep_above_the_qos_limit_is_submitted_as_far_as_there_is_room(accounted: Home) -> None:
    seeds = ",".join(str(seed) for seed in range(25))
    made = accounted.ask(*HELD, "launch.qos=limited", "-m", f"train.seed={seeds}")
    assert not made["complete"]
    assert len(accounted.queued()) == 20
    assert [row["job_id"] is None for row in made["runs"]] == [False] * 20 + [True] * 5
