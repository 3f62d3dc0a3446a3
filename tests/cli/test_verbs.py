"""status, logs, cancel and completion on run directories made by the real writers."""

import subprocess
from pathlib import Path

import pytest

from air_hpc.rundir.commit import committed_steps
from air_hpc.rundir.events import Kind
from air_hpc.rundir.fence import Token
from tests.cli.commands import ROOT, air_hpc, environ, json_of
from tests.run_builder import commit_steps
from tests.runs.made import MadeRun, ToldSlurm, queued


@pytest.fixture
def slurm(tmp_path: Path) -> ToldSlurm:
    return ToldSlurm(tmp_path / "bin")


def test_status_of_one_run_is_one_object_and_of_all_a_list(
    tmp_path: Path, slurm: ToldSlurm
) -> None:
    slurm.tell("squeue", queued("100_0", "RUNNING"), queued("100_1", "PENDING", "Resources"))
    run = MadeRun(tmp_path / "runs", "tiny-a").submitted("100", 0)
    run.training(job_id="101", array_job_id="100", array_task_id=0)
    run.metrics({1: {"train/loss": 2.5}})
    MadeRun(tmp_path / "runs", "tiny-b").submitted("100", 1)
    one = json_of(air_hpc("status", "tiny-a", "--json", cwd=tmp_path, env=slurm.environ))
    assert (one["run_id"], one["state"], one["step"]) == ("tiny-a", "RUNNING", 1)
    assert (one["nodes"], one["job_id"]) == (["n1", "n2"], "100_0")
    every = json_of(air_hpc("status", "--json", cwd=tmp_path, env=slurm.environ))
    assert [run["state"] for run in every["runs"]] == ["RUNNING", "PENDING"]
    text = air_hpc("status", cwd=tmp_path, env=slurm.environ).stdout
    assert "waits in the queue (Resources)" in text
    assert "tiny-a  RUNNING" in text


def test_status_in_full_names_why_and_where(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "runs").submitted().training()
    run.ended(failure_class="user_error", evidence="ValueError: bad shape")
    text = air_hpc("status", "latest", cwd=tmp_path).stdout
    for piece in ("FAILED", "ValueError: bad shape", "user_error", str(run.dir.path)):
        assert piece in text


def test_runs_of_another_folder(tmp_path: Path) -> None:
    MadeRun(tmp_path / "elsewhere").submitted().training().ended()
    for words, env in ((["--runs-dir", "elsewhere"], {}), ([], {"AIR_HPC_RUNS_DIR": "elsewhere"})):
        done = air_hpc("status", "--json", *words, cwd=tmp_path, env=env)
        assert len(json_of(done)["runs"]) == 1
    assert "no runs" in air_hpc("status", cwd=tmp_path).stderr


def test_logs_by_rank_and_attempt(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "runs").submitted().training().ended()
    run.log("r0 | hello\nr1 | other\n")
    run.log("r0 | again\n", Token(2, 1))
    done = air_hpc("logs", "--rank", "0", cwd=tmp_path)
    assert done.stdout == (
        "==> attempt 1, generation 1, node n1 <==\n[0] hello\n"
        "==> attempt 2, generation 1, node n1 <==\n[0] again\n"
    )
    body = json_of(air_hpc("logs", "tiny-1", "--attempt", "1", "--json", cwd=tmp_path))
    assert [line["text"] for line in body["lines"]] == ["hello", "other"]
    followed = air_hpc("logs", "--follow", "--tail", "1", cwd=tmp_path)
    assert followed.stdout.splitlines()[-1] == "[0] again"
    nothing = air_hpc("logs", "--node", "n9", cwd=tmp_path)
    assert "There are: attempt 1, generation 1, node n1" in nothing.stderr


def test_cancel_a_sweep(tmp_path: Path, slurm: ToldSlurm) -> None:
    for n in range(2):
        MadeRun(tmp_path / "runs", f"tiny-{n}", "sweep-1").submitted("100", n)
    MadeRun(tmp_path / "runs", "tiny-other").submitted("200")
    slurm.tell("squeue", *(queued(f"100_{n}", "PENDING") for n in range(2)))
    done = air_hpc("cancel", "--all-of", "sweep-1", "--json", cwd=tmp_path, env=slurm.environ)
    assert done.returncode == 0, done.stderr
    assert [run["state"] for run in json_of(done)["runs"]] == ["CANCELLED"] * 2
    assert slurm.calls("scancel") == ["scancel --quiet 100_0 100_1"]
    again = air_hpc("cancel", "tiny-0", cwd=tmp_path, env=slurm.environ)
    assert (again.returncode, "has ended already (CANCELLED)" in again.stdout) == (0, True)


def test_verify_says_what_is_bad_marks_it_and_where_the_run_would_go_on(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "runs", "tiny-a")
    commit_steps(run.dir, 10, 20)
    whole = air_hpc("verify", "latest", cwd=tmp_path)
    assert (whole.returncode, whole.stdout.splitlines()[-1]) == (0, "resumes from: 20")
    (run.dir.checkpoints_dir / "step-20" / "shard").write_bytes(b"stats")
    body = json_of(air_hpc("verify", "tiny-a", "--json", cwd=tmp_path))
    assert [(c["step"], c["state"]) for c in body["checkpoints"]] == [(20, "bad"), (10, "good")]
    assert (body["resume_step"], body["marked"]) == (10, [])
    one = air_hpc("verify", "tiny-a", "--step", "10", cwd=tmp_path)
    assert (one.returncode, "resumes" in one.stdout) == (0, False)
    assert committed_steps(run.dir) == [20, 10]
    marked = air_hpc("verify", "tiny-a", "--mark", cwd=tmp_path)
    assert (marked.returncode, "marked: 20" in marked.stdout) == (1, True)
    assert committed_steps(run.dir) == [10]
    assert "takes one run" in air_hpc("verify", cwd=tmp_path).stderr


def test_bash_completes_verbs_runs_options_and_overrides(tmp_path: Path) -> None:
    MadeRun(tmp_path / "runs", "tiny-a").event(Kind.SUBMITTED, cluster="local")
    script = air_hpc("--shell-completion", "install=bash", cwd=tmp_path).stdout
    program = tmp_path / "air_hpc"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {_python()} -m air_hpc "$@"\n')
    program.chmod(0o755)
    for line, expected in (
        ("air_hpc sta", ["status"]),
        ("air_hpc status ti", ["tiny-a"]),
        ("air_hpc logs --fol", ["--follow"]),
        ("air_hpc plan model=llama_8", ["llama_8b"]),
        ("air_hpc cluster=slurm train.pre", ["train.precision="]),
    ):
        words = " ".join(f"'{word}'" for word in line.split())
        last = len(line.split()) - 1
        test = f"""{script}
compopt() {{ :; }}
COMP_LINE='{line}' COMP_POINT={len(line)} COMP_WORDS=({words}) COMP_CWORD={last}
_air_hpc_complete
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        done = subprocess.run(
            ["bash", "-c", test],
            cwd=tmp_path,
            env=environ(env),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.split() == expected, (line, done.stderr)


def _python() -> str:
    import sys

    return sys.executable
