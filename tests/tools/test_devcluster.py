import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm_cluster import TOOL, USER, DevCluster, why_no_cluster
from tools._devcluster.processes import process_table

needs_slurm = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster() or "never"),
]


def pids_with(word: str) -> set[int]:
    """The processes that have `word` among their arguments."""
    return {p.pid for p in process_table().values() if word in p.command() and p.alive()}


def running(name: str, folder: str) -> list[int]:
    """The processes called `name` that have `folder` in their arguments or environment."""
    found = []
    for process in process_table().values():
        words = [*process.command(), *process.environment().values()]
        if process.name == name and process.alive() and any(folder in word for word in words):
            found.append(process.pid)
    return found


def tool(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *words], capture_output=True, text=True, timeout=60
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster() as cluster:
        yield cluster.up(nodes=4)


@pytest.fixture
def clean(cluster: DevCluster) -> Iterator[DevCluster]:
    """The cluster; afterwards without jobs and with all nodes idle again."""
    yield cluster
    cluster.clean()


class TestOnARealSlurm:
    pytestmark = needs_slurm

    def test_a_job_of_the_ordinary_user_sees_its_gpus_and_its_switch(
        self, clean: DevCluster, tmp_path: Path
    ) -> None:
        output = Path(f"/home/{USER}/devcluster-test.out")
        output.unlink(missing_ok=True)
        job = clean.submit(
            'echo "$(id -un) $CUDA_VISIBLE_DEVICES $SLURM_TOPOLOGY_ADDR"',
            "--gpus-per-node=2", "--nodelist=n3", f"--output={output}",
        )  # fmt: skip
        clean.wait_for_job(job, "COMPLETED")
        assert output.read_text().split() == [USER, "0,1", "spine.leaf1.n3"]

    def test_the_high_partition_requeues_a_low_job(self, clean: DevCluster) -> None:
        low = clean.submit("sleep 500", "-N4", "--gpus-per-node=2", "--requeue")
        clean.wait_for_job(low, "RUNNING")
        high = clean.submit("sleep 1", "-N1", "--gpus-per-node=2", "--partition=high")
        clean.wait_for_job(high, "RUNNING", "COMPLETED")
        again = clean.wait_for_job(low, "RUNNING", timeout_s=90)
        assert again["Restarts"] == "1"

    def test_a_killed_node_takes_tasks_in_sessions_of_their_own_with_it(
        self, clean: DevCluster
    ) -> None:
        job = clean.submit(
            "srun bash -c 'setsid sleep 4711.1 & env -i setsid sleep 4711.1 & "
            "sleep 4711.1 & wait' & setsid sleep 4711.1 & wait",
            "-N2", "--nodelist=n[1-2]", "--no-kill",
        )  # fmt: skip
        clean.wait_for_job(job, "RUNNING")
        clean.wait_until(lambda: len(pids_with("4711.1")) == 7, "all tasks to run")
        clean.kill_node("n2")
        assert len(pids_with("4711.1")) == 4, "three were on n2, three and one are on n1"
        clean.kill_node("n1")
        assert not pids_with("4711.1")
        assert clean.status()["slurmd_missing"] == ["n1", "n2"]

    def test_a_killed_node_comes_back_only_after_slurm_has_taken_its_job_off_it(
        self, clean: DevCluster
    ) -> None:
        job = clean.submit("sleep 500", "-N1", "--nodelist=n4", "--requeue")
        clean.wait_for_job(job, "RUNNING")
        clean.kill_node("n4")
        clean.revive_node("n4")  # waits until Slurm has seen the loss
        assert clean.job(job)["Restarts"] == "1"
        nodes = clean.status()["nodes"]
        assert isinstance(nodes, dict)
        assert set(nodes) <= {"idle", "mixed", "allocated"}

    def test_a_fork_storm_does_not_escape_the_death_of_its_node(self, clean: DevCluster) -> None:
        # Each process ends as soon as it has started the next, so any list of pids is old.
        storm = "f() { (sleep 0.01; f) & }; for i in 1 2 3 4 5; do f; done"
        clean.submit(f"setsid bash -c '{storm}' 4712.5; sleep 500", "-N1", "--nodelist=n2")
        clean.wait_until(lambda: len(pids_with("4712.5")) >= 5, "the storm")
        clean.kill_node("n2")
        assert not pids_with("4712.5")

    def test_the_tasks_of_an_isolated_node_live_on(self, clean: DevCluster) -> None:
        job = clean.submit("sleep 4713.5", "-N1", "--nodelist=n3", "--no-requeue")
        clean.wait_for_job(job, "RUNNING")
        clean.wait_until(lambda: pids_with("4713.5"), "the task")
        clean.isolate_node("n3")
        clean.wait_for_job(job, "NODE_FAIL", timeout_s=90)
        assert pids_with("4713.5")
        clean.kill_node("n3")
        assert not pids_with("4713.5")

    def test_a_drained_node_is_taken_back_by_revive(self, clean: DevCluster) -> None:
        clean.drain_node("n1")
        assert "drained" in str(clean.status()["nodes"])
        clean.revive_node("n1")
        assert clean.status()["nodes"] == {"idle": ["n1", "n2", "n3", "n4"]}

    def test_up_again_is_idempotent_and_another_shape_is_refused(self, clean: DevCluster) -> None:
        again = clean.tool("up", "--nodes", "4", "--json")
        assert json.loads(again.stdout)["already_up"] is True
        other = tool("up", "--state", str(clean.state), "--nodes", "5")
        assert other.returncode == 1
        assert "nodes is 4, asked for 5" in other.stderr

    def test_an_unknown_node_is_refused(self, clean: DevCluster) -> None:
        done = tool("kill-node", "n2", "n[4-5]", "x", "--state", str(clean.state))
        assert done.returncode == 2
        assert "n5" in done.stderr
        assert "'x'" in done.stderr
        assert clean.status()["slurmd_missing"] == []

    def test_env_prints_only_what_a_shell_evaluates(self, clean: DevCluster) -> None:
        assert clean.tool("env").stdout == f"export SLURM_CONF={clean.conf}\n"

    def test_down_leaves_no_process_and_touches_no_other_cluster(self, clean: DevCluster) -> None:
        with DevCluster() as other:
            other.up(nodes=2, devices_per_node=0, topology="flat")
            other.submit("setsid sleep 4714.5 & srun sleep 4714.5", "-N2")
            other.wait_until(lambda: len(pids_with("4714.5")) >= 4, "the tasks and srun")
            conf = str(other.conf)
            assert len(pids_with(conf)) >= 3, "slurmctld and two slurmd"
            other.down()
            assert not pids_with(conf)
            assert not pids_with("4714.5")
            assert not other.state.exists()
        assert clean.status()["state"] == "up"

    def test_accounting_refuses_a_foreign_account_and_more_jobs_than_the_qos_allows(self) -> None:
        with DevCluster() as accounted:
            accounted.up(nodes=2, accounting=True)
            job = accounted.submit("true", "--account=research")
            accounted.wait_for_job(job, "COMPLETED")
            for options in (["--account=other"], ["--qos=limited", "--array=0-20"]):
                done = accounted.run(["sbatch", *options, "--wrap", "true"], user=USER, check=False)
                assert done.returncode != 0, options
            accounted.wait_until(
                lambda: "COMPLETED" in accounted.run(["sacct", "-a", "-n", "-j", job]).stdout,
                "the job in sacct",
            )
            folder = str(accounted.state)
        leftover = [p for name in ("mariadbd", "slurmdbd") for p in running(name, folder)]
        assert not leftover

    def test_an_interrupted_up_is_cleaned_up_by_the_next_one(self) -> None:
        with DevCluster() as cluster:
            words = [sys.executable, str(TOOL), "up", "--state", str(cluster.state)]
            first = subprocess.Popen([*words, "--nodes", "40"], stderr=subprocess.DEVNULL)
            cluster.wait_until(lambda: len(pids_with(str(cluster.conf))) > 3, "some slurmd")
            first.kill()
            first.wait()
            cluster.up(nodes=2)
            cluster.wait_until(
                lambda: len(pids_with(str(cluster.conf))) == 3, "slurmctld and two slurmd alone"
            )

    def test_a_munged_that_a_cluster_started_goes_with_the_last_one(self) -> None:
        # A mount namespace with an empty /run has no munged, whatever runs on this machine.
        script = f"""
            set -e
            mount -t tmpfs -o mode=755 tmpfs /run
            alive() {{ test "$(ps -o stat= -p "$pid" | cut -c1)" != Z && kill -0 "$pid"; }}
            tool={TOOL}
            a=$(mktemp -d /tmp/devcluster-XXXXXX) b=$(mktemp -d /tmp/devcluster-XXXXXX)
            trap '$tool down --state $a; $tool down --state $b' EXIT
            $tool up --state $a --nodes 1
            pid=$(cat /run/munge/munged.pid)
            $tool up --state $b --nodes 1
            $tool down --state $a
            alive && munge -n | unmunge >/dev/null
            $tool down --state $b
            if alive 2>/dev/null; then echo munged is left; exit 9; fi
        """
        if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
            pytest.skip("no mount namespace can be made here")
        done = subprocess.run(
            ["unshare", "-m", "bash", "-c", script], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr

    def test_the_shared_cluster_is_clean_when_a_test_gets_it(self, devcluster: DevCluster) -> None:
        found = devcluster.status()
        assert (found["state"], found["jobs"]) == ("up", [])
        assert found["nodes"] == {"idle": [f"n{number}" for number in range(1, 9)]}

    def test_down_kills_no_process_that_got_a_recorded_pid(self, tmp_path: Path) -> None:
        bystander = subprocess.Popen(["sleep", "300"])
        try:
            cluster = DevCluster().up(nodes=1)
            recycled = {"name": "n1", "pid": bystander.pid, "start": 1}
            with (cluster.state / "daemons.jsonl").open("a") as file:
                file.write(json.dumps(recycled) + "\n")
            cluster.down()
            assert bystander.poll() is None
        finally:
            bystander.kill()
            bystander.wait()


class TestBadInput:
    def test_every_problem_is_listed_at_once(self, tmp_path: Path) -> None:
        done = tool(
            "up", "--state", "/tmp/" + "x" * 80, "--nodes", "0", "--devices-per-node", "-1",
            "--user", "root", "--topology", str(tmp_path / "none"), "--set", "nothing",
        )  # fmt: skip
        assert done.returncode == 2
        for word in (
            "--state",
            "--nodes 0",
            "--devices-per-node -1",
            "'root'",
            "--topology",
            "'nothing'",
        ):
            assert word in done.stderr

    def test_a_state_folder_that_slurm_cannot_use_is_refused(self) -> None:
        assert tool("status", "--state", "/tmp/with space").returncode == 2
        assert tool("status", "--state", "/tmp/" + "x" * 80).returncode == 2

    def test_a_folder_with_other_content_is_never_taken(self, tmp_path: Path) -> None:
        (tmp_path / "precious").write_text("x")
        assert tool("up", "--state", str(tmp_path)[:60]).returncode in (1, 2)
        assert tool("down", "--state", str(tmp_path)[:60]).returncode in (0, 1, 2)
        assert (tmp_path / "precious").read_text() == "x"

    def test_a_topology_file_must_name_every_node_and_no_other(self, tmp_path: Path) -> None:
        file = tmp_path / "topology.conf"
        file.write_text("SwitchName=a Nodes=n[1-2],n9\n")
        done = tool(
            "up", "--state", "/tmp/devcluster-none", "--nodes", "3", "--topology", str(file)
        )
        assert done.returncode == 2
        assert "n9" in done.stderr
        assert "n3" in done.stderr

    def test_a_verb_without_a_cluster_says_how_to_start_one(self) -> None:
        done = tool("kill-node", "n1", "--state", "/tmp/devcluster-none")
        assert done.returncode == 1
        assert "devcluster up" in done.stderr

    def test_env_without_a_cluster_prints_nothing_to_evaluate(self) -> None:
        done = tool("env", "--state", "/tmp/devcluster-none")
        assert (done.returncode, done.stdout) == (1, "")
