"""Submission and the batch script on a real Slurm; a fake agent stands in for the real one."""

import json
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from air_hpc.launch import quote
from air_hpc.launch.executor import header_lines
from air_hpc.launch.submission import AskState, load, save, submission_dir
from air_hpc.rundir.events import read_ledger
from air_hpc.rundir.layout import RunDir
from air_hpc.runs.jobs import jobs_of
from air_hpc.slurm.hostlist import expand
from tests.launch.making import ROOT, fake_cluster
from tests.slurm_cluster import USER, DevCluster
from tests.user_python import python_for

pytestmark = pytest.mark.slurm


class Site:
    """The shared cluster, with a runs folder of one user."""

    def __init__(self, cluster: DevCluster, runs_dir: Path, user: str | None) -> None:
        self.cluster, self.runs_dir, self.user = cluster, runs_dir, user
        python = python_for(user or "root")
        if python is None:
            pytest.skip(f"{user} can run no Python {sys.version_info[:2]} with our dependencies")
        self.python = python

    def call(
        self, number: int, options: dict[str, Any], submission_id: str | None = None, *,
        env: dict[str, str] | None = None, check: bool = True, cwd: Path | None = None,
    ) -> Any:  # fmt: skip
        words = [self.python.executable, "-m", "tests.launch.submitter", str(self.runs_dir)]
        words += [str(number), json.dumps(options), *([submission_id] if submission_id else [])]
        environ = {**self.python.env, **(env or {})}
        return self.cluster.run(
            words, self.user, env=environ, check=check, cwd=cwd or ROOT, timeout_s=300
        )

    def submit(self, behaviour: str, number: int = 1, **options: Any) -> dict[str, Any]:
        extra = {key: options.pop(key) for key in ("env", "cwd") if key in options}
        cluster = fake_cluster(behaviour, **options.pop("cluster", {}))
        options = {"nodes": 2, **options, "cluster": cluster}
        found: dict[str, Any] = json.loads(self.call(number, options, **extra).stdout)
        return found

    def seen(self, run: dict[str, Any]) -> list[dict[str, Any]]:
        """What the fake agent of a run wrote down, in order."""
        path = Path(run["run_dir"]) / "attempts" / "seen"
        if not path.exists():
            return []
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return sorted(lines, key=lambda line: line["time"])

    def starts(self, run: dict[str, Any], rank: int = 0) -> list[dict[str, Any]]:
        return [x for x in self.seen(run) if x["event"] == "start" and x["rank"] == rank]

    def wait_for_events(self, run: dict[str, Any], number: int, event: str = "start") -> None:
        self.cluster.wait_until(
            lambda: len([x for x in self.seen(run) if x["event"] == event]) >= number,
            f"{number} {event} of {run['run_id']}\n{self.logs(run)}",
            90,
        )

    def wait_for_end(self, run: dict[str, Any], *states: str) -> dict[str, str]:
        job = run["job_id"] if run["array_task"] is None else f"{run['job_id']}_{run['array_task']}"
        return self.cluster.wait_for_job(job, *(states or ("COMPLETED",)), timeout_s=90)

    def logs(self, run: dict[str, Any]) -> str:
        pointer = json.loads((Path(run["run_dir"]) / "submit" / "submission.json").read_text())
        folder = submission_dir(self.runs_dir, pointer["submission"])
        return "".join(path.read_text() for path in sorted(folder.glob("*.log")))


@pytest.fixture(params=["ordinary user", pytest.param("root", marks=pytest.mark.full)])
def site(request: pytest.FixtureRequest, devcluster: DevCluster) -> Iterator[Site]:
    yield from made_site(devcluster, USER if request.param == "ordinary user" else None)


@pytest.fixture
def users(devcluster: DevCluster) -> Iterator[Site]:
    """The site of the ordinary user."""
    yield from made_site(devcluster, USER)


def made_site(cluster: DevCluster, user: str | None) -> Iterator[Site]:
    home = Path(f"/home/{USER}" if user else "/root")
    # A path that a careless script would take apart.
    runs_dir = home / f"air hpc 'test' 100% ü {uuid.uuid4().hex[:6]}"
    yield Site(cluster, runs_dir, user)
    cluster.run(["scancel", "--user", user or "root"], check=False)
    cluster.wait_until(lambda: not cluster.run(["squeue", "-h"]).stdout, "the jobs to be gone", 60)
    shutil.rmtree(runs_dir, ignore_errors=True)


def test_one_run_is_a_plain_job_with_an_agent_on_each_node(site: Site) -> None:
    result = site.submit("finish", cpus_per_device=2, cluster={"env": {"SITE": "a 'b' $c"}})
    (run,) = result["runs"]
    assert run["array_task"] is None
    site.wait_for_end(run)
    starts = [x for x in site.seen(run) if x["event"] == "start"]
    assert sorted(x["rank"] for x in starts) == [0, 1]
    environ = starts[0]["environ"]
    assert starts[0]["argv"] == ["-m", "air_hpc.agent", run["run_dir"]]
    assert environ["PYTHONPATH"].split(":")[0] == f"{run['run_dir']}/code"
    assert environ["PYTHONSAFEPATH"] == "1"
    assert environ["SITE"] == "a 'b' $c"
    assert environ["SLURM_CPUS_PER_TASK"] == "2"
    assert environ["AIR_HPC_SCRIPT"] == f"{run['run_dir']}/submit/script.sh"
    assert starts[0]["cwd"] == str(ROOT)
    assert run["run_id"] in site.logs(run)


def test_the_saved_script_starts_the_same_run_under_a_plain_sbatch(users: Site) -> None:
    (run,) = users.submit("finish")["runs"]
    users.wait_for_end(run)
    script = f"{run['run_dir']}/submit/script.sh"
    again = users.cluster.run(["sbatch", "--parsable", script], USER, cwd=Path("/")).stdout.strip()
    users.cluster.wait_for_job(again, "COMPLETED")
    assert [x["job"] for x in users.starts(run)] == [run["job_id"], again]


def test_a_sweep_is_one_array_and_each_element_takes_its_own_run(site: Site) -> None:
    result = site.submit("finish", 3, nodes=1)
    runs = result["runs"]
    assert len({run["job_id"] for run in runs}) == 1
    assert [run["array_task"] for run in runs] == [0, 1, 2]
    for run in runs:
        site.wait_for_end(run)
        (start,) = site.starts(run)
        assert start["environ"]["SLURM_ARRAY_TASK_ID"] == str(run["array_task"])


def test_a_requeue_is_asked_for_the_element_that_wants_it(users: Site) -> None:
    """Once: requeueing by SLURM_JOB_ID hit the whole array from the element that shares its id."""
    runs = users.submit("requeue", 3, nodes=1)["runs"]
    for run in runs:
        users.wait_for_events(run, 1, "finish")
        users.wait_for_end(run)
    for run in runs:
        assert [x["restarts"] for x in users.starts(run)] == ["0", "1"]
    jobs = {x["job"] for run in runs for x in users.starts(run)}
    assert runs[0]["job_id"] in jobs, "no element had the array's own job id"


def test_a_verdict_to_stop_ends_the_job_with_93(users: Site) -> None:
    (run,) = users.submit("stop")["runs"]
    assert users.wait_for_end(run, "FAILED")["ExitCode"] == "93:0"
    assert len(users.starts(run)) == 1


def test_without_an_intent_the_jobs_status_is_the_agents(users: Site) -> None:
    (run,) = users.submit("fail")["runs"]
    assert users.wait_for_end(run, "FAILED")["ExitCode"] == "5:0"


def nodes_verb(site: Site, *words: str) -> str:
    command = [site.python.executable, "-m", "air_hpc", "nodes", *words, "--runs-dir"]
    command.append(str(site.runs_dir))
    return site.cluster.run(command, site.user, env=site.python.env, cwd=ROOT).stdout


def nodes_of(run: dict[str, Any], site: Site) -> list[list[str]]:
    """The nodes of each start."""
    return [list(expand(x["environ"]["SLURM_JOB_NODELIST"])) for x in site.starts(run)]


def test_an_excluded_node_is_avoided_by_submission_and_requeue_until_it_expires(
    users: Site,
) -> None:
    everyone = [f"n{number}" for number in range(1, 9)]
    nodes_verb(users, "exclude", "n[1-4]", "--reason", "slow links")
    (run,) = users.submit("requeue|exclude=n[5-7],n8", nodes=4)["runs"]
    assert users.cluster.job(run["job_id"])["ExcNodeList"] == "n[1-4]"
    users.wait_for_events(run, 4, "finish")
    users.wait_for_end(run)
    assert nodes_of(run, users) == [everyone[4:], everyone[:4]]
    # Forgotten at its end: by the list, and by the next submission.
    nodes_verb(users, "release", "--all")
    assert "n8" in nodes_verb(users, "exclude", "n8", "--reason", "a test", "--hours", "0.0005")
    users.cluster.wait_until(lambda: "n8" not in nodes_verb(users), "the end of the exclusion")
    (run,) = users.submit("finish", nodes=8)["runs"]
    assert users.wait_for_end(run)["ExcNodeList"] == "(null)"
    assert nodes_of(run, users) == [everyone]


def test_a_run_whose_agents_are_killed_starts_again(users: Site) -> None:
    """It once ended FAILED, and nobody started it again."""
    (run,) = users.submit("killed")["runs"]
    users.wait_for_events(run, 2, "finish")
    assert users.wait_for_end(run)["Restarts"] == "1"
    assert "the agents left no word (status 137)" in users.logs(run)


@pytest.mark.parametrize("number", [1, 2])
def test_resubmission_starts_the_next_job_once_and_after_this_one(users: Site, number: int) -> None:
    runs = users.submit("resubmit", number, nodes=1, continuation="resubmit")["runs"]
    for run in runs:
        users.wait_for_events(run, 1, "finish")
        first, second = users.starts(run)
        assert first["job"] != second["job"]
        assert second["restarts"] == "0"
        job = users.cluster.wait_for_job(second["job"], "COMPLETED")
        assert "again" in job["JobName"]
        # The ledger names the next job as commands do, before that has said a word itself.
        known = jobs_of(read_ledger(RunDir(Path(run["run_dir"]))).events).ids
        element = "" if number == 1 else f"_{run['array_task']}"
        following = job.get("ArrayJobId", job["JobId"])
        assert known == (f"{run['job_id']}{element}", f"{following}{element}")
    assert not users.cluster.run(["squeue", "-h"]).stdout


def test_a_preempted_run_is_requeued_by_the_script_inside_the_grace(users: Site) -> None:
    (run,) = users.submit("hold-requeue", nodes=8, devices_per_node=1)["runs"]
    users.wait_for_events(run, 8)
    high = users.cluster.submit("sleep 2", "-p", "high", "-N", "8", "--exclusive", user=None)
    users.wait_for_events(run, 8, "finish")
    job = users.wait_for_end(run)
    assert job["Restarts"] == "1"
    assert [x["restarts"] for x in users.starts(run)] == ["0", "1"]
    users.cluster.wait_for_job(high, "COMPLETED")


def test_ahead_of_the_time_limit_the_agents_are_told_and_the_run_goes_on(users: Site) -> None:
    (run,) = users.submit("hold-requeue", time_limit_min=1, lead_s=40.0)["runs"]
    users.wait_for_events(run, 2, "finish")
    assert users.wait_for_end(run)["Restarts"] == "1"
    signals = [x for x in users.seen(run) if x["event"] == "signal"]
    assert len(signals) == 2
    for told in signals:
        assert signal.SIGUSR2 in told["received"]
        assert signal.SIGTERM not in told["received"]


def test_the_script_outlives_scancel_to_do_what_the_agents_decided(users: Site) -> None:
    """The agents of this test decide nothing: the job stays cancelled and is not requeued."""
    (run,) = users.submit("hold")["runs"]
    users.wait_for_events(run, 2)
    users.cluster.run(["scancel", run["job_id"]], USER)
    users.wait_for_end(run, "CANCELLED")
    assert len([x for x in users.seen(run) if x["event"] == "signal"]) == 2
    assert len(users.starts(run)) == 1


def test_an_agent_that_leaves_early_does_not_take_the_others_with_it(users: Site) -> None:
    (run,) = users.submit("hold")["runs"]
    users.wait_for_events(run, 2)
    users.cluster.run(["scancel", "--signal=USR2", run["job_id"]], USER)
    users.wait_for_end(run, "FAILED")
    signals = [x for x in users.seen(run) if x["event"] == "signal"]
    assert sorted(x["rank"] for x in signals) == [0, 1]


def test_submitting_from_inside_an_allocation_leaks_nothing_of_it(users: Site) -> None:
    inherited = {
        "SLURM_JOB_ID": "1", "SLURM_CPU_BIND": "mask_cpu:0x1", "SBATCH_PARTITION": "high",
        "SBATCH_EXCLUSIVE": "1", "SBATCH_ARRAY_INX": "0-5", "SLURM_NTASKS_PER_NODE": "4",
        "LEAKED": "yes", "SRUN_CPUS_PER_TASK": "3",
    }  # fmt: skip
    (run,) = users.submit("finish", env=inherited)["runs"]
    job = users.wait_for_end(run)
    # A default that the user set is honoured, and is recorded in the run.
    assert job["Partition"] == "high"
    assert "partition: high" in (Path(run["run_dir"]) / "run.yaml").read_text()
    starts = [x for x in users.seen(run) if x["event"] == "start"]
    assert len(starts) == 2
    assert starts[0]["environ"]["LEAKED"] is None
    assert starts[0]["environ"]["SLURM_CPUS_PER_TASK"] is None


def test_export_none_gives_the_job_the_users_login_environment(users: Site) -> None:
    (run,) = users.submit("finish", cluster={"export": "NONE"}, env={"LEAKED": "yes"})["runs"]
    users.wait_for_end(run)
    assert users.starts(run)[0]["environ"]["LEAKED"] is None


def test_devices_are_bound_to_the_agents(users: Site) -> None:
    (run,) = users.submit("finish", devices_per_node=2, gpus="gres", gres_type="h100")["runs"]
    users.wait_for_end(run)
    starts = [x for x in users.seen(run) if x["event"] == "start"]
    assert [x["environ"]["CUDA_VISIBLE_DEVICES"] for x in starts] == ["0,1", "0,1"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_chain_is_submitted_ahead_and_each_link_waits_for_the_former(
    users: Site, number: int
) -> None:
    """Also when the former failed: aftercorr and afterok would leave the chain hanging."""
    runs = users.submit("fail", number, nodes=1, continuation="chain", chain_length=3)["runs"]
    for run in runs:
        assert len(run["job_ids"]) == 3
        users.wait_for_events(run, 3)
        assert len({x["job"] for x in users.starts(run)}) == 3
        times = [x["time"] for x in users.starts(run)]
        assert times == sorted(times)


def test_inside_an_allocation_the_same_script_runs_at_once(users: Site) -> None:
    options = {"nodes": 2, "cluster": fake_cluster("finish", kind="allocation")}
    words = [users.python.executable, "-m", "tests.launch.submitter", str(users.runs_dir), "1"]
    # salloc gives its nodes back when its command ends: the command waits for the agents.
    look = 'compgen -G "$0/*/attempts/seen"'
    script = f'"$@"; for i in {{1..300}}; do {look} && break; sleep 0.1; done; sleep 3'
    salloc = ["salloc", "-N2", "--ntasks-per-node=1", "bash", "-c", script, str(users.runs_dir)]
    words = [*salloc, *words, json.dumps(options)]
    users.cluster.run(words, USER, env=users.python.env, cwd=ROOT)
    (seen,) = users.runs_dir.glob("*/attempts/seen")
    starts = [json.loads(line) for line in seen.read_text().splitlines()]
    assert sorted(x["rank"] for x in starts if x["event"] == "start") == [0, 1]


def test_values_reach_slurm_exactly(devcluster: DevCluster, tmp_path: Path) -> None:
    values = [
        "a b", "it's", 'say "hi"', "a#b", "a # b", "$HOME", "`id`", "k=v w=x", "'", "''", "*", "!",
        "ü ☃ \N{GRINNING FACE}", ";", "~", "-x", "%j %A", "x" * 300, "a'b\"c", "(null)x",
    ]  # fmt: skip
    for value in values:
        assert quote.header_problem(value, "launch.comment") is None
        lines = header_lines((("comment", value), ("job-name", value), ("hold", True)))
        script = tmp_path / "job.sh"
        script.write_text("\n".join(["#!/bin/bash", *lines, "true", ""]))
        job = devcluster.run(["sbatch", "--parsable", str(script)]).stdout.strip()
        told = devcluster.run(["squeue", "-h", "-j", job, "-o", "%k\x1f%j"]).stdout
        devcluster.run(["scancel", job])
        assert told == f"{value}\x1f{value}\n"


def test_a_refused_submission_says_why_and_leaves_no_job(users: Site) -> None:
    options = {"cluster": fake_cluster("finish"), "reservation": "nosuch"}
    done = users.call(1, options, check=False)
    assert done.returncode == 1
    assert "reservation" in done.stderr.lower()
    assert "Traceback" not in done.stderr
    assert not users.cluster.run(["squeue", "-h"]).stdout


def test_an_answer_that_was_lost_is_found_again_by_the_jobs_name(devcluster: DevCluster) -> None:
    """What a submitter leaves that is killed between sbatch's answer and writing it down."""
    for site in made_site(devcluster, None):
        result = site.submit("finish", 3, nodes=1, sbatch={"hold": True})
        folder = submission_dir(site.runs_dir, result["submission_id"])
        record = load(folder)
        assert record is not None
        save(record.with_ask(0, state=AskState.ASKED, job_id=None, answer=""))
        again = json.loads(site.call(0, {}, result["submission_id"]).stdout)
        assert again["runs"] == result["runs"]
        queued = devcluster.run(["squeue", "-h", "-r", "-o", "%i"]).stdout.split()
        assert len(queued) == 3


def test_bad_input_never_reaches_sbatch(users: Site) -> None:
    options = {
        "cluster": fake_cluster("finish"), "nodes": 16, "partition": "lo", "comment": "a\nrm -rf ~",
    }  # fmt: skip
    done = users.call(1, options, check=False)
    assert done.returncode == 2
    assert done.stderr.count("launch.") == 2
    assert "Did you mean low?" in done.stderr
    assert not users.runs_dir.exists()


def test_a_thousand_tasks_cost_one_sbatch(devcluster: DevCluster) -> None:
    for site in made_site(devcluster, USER):
        result = site.submit("finish", 1000, nodes=1, sbatch={"hold": True})
        assert len({run["job_id"] for run in result["runs"]}) == 1
        assert result["complete"]
        record = submission_dir(site.runs_dir, result["submission_id"]) / "submission.json"
        assert len(json.loads(record.read_text())["asks"]) == 1
        assert os.stat(record).st_mode & 0o77 == 0
