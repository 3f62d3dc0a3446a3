"""Runs without sbatch; a fake agent stands in for the real one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from air_hpc.errors import BadInput
from air_hpc.launch import submit as submitting
from air_hpc.launch.local import LocalAgentExecutor
from air_hpc.launch.submission import submission_dir
from air_hpc.rundir.events import read_ledger
from air_hpc.rundir.layout import RunDir
from tests.launch import making

LOCAL = {"kind": "local", "name": "local"}


def wait_until(look: Callable[[], Any], what: str, timeout_s: float = 60) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := look()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)
    return value


def seen(run_dir: Path, event: str = "start") -> list[dict[str, Any]]:
    path = run_dir / "attempts" / "seen"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in map(json.loads, lines) if line["event"] == event]


def local(behaviour: str, **more: Any) -> dict[str, Any]:
    return {**making.fake_cluster(behaviour), **LOCAL, **more}


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_run_starts_here_with_the_same_surroundings_as_in_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    made = making.tasks(tmp_path / "ru ns", cluster=local("finish"))
    (run,) = submitting.submit(made, cwd=tmp_path).runs
    (start,) = wait_until(lambda: seen(run.run_dir), "the agent")
    assert start["argv"] == ["-m", "air_hpc.agent", str(run.run_dir)]
    assert start["environ"]["PYTHONPATH"].split(":")[0] == f"{run.run_dir}/code"
    assert start["environ"]["PYTHONSAFEPATH"] == "1"
    # Not another job's, and no device is hidden.
    assert start["job"] == "none"
    assert start["environ"]["CUDA_VISIBLE_DEVICES"] == "1"
    (event,) = read_ledger(RunDir(run.run_dir)).events
    assert event.facts["pid"] == int(run.pid or 0)
    assert event.facts["cluster"] == "local"


def test_a_run_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    options = json.dumps({"cluster": local("hold")})
    words = [sys.executable, "-m", "tests.launch.submitter", str(tmp_path / "runs"), "1", options]
    submitter = subprocess.Popen(
        words, cwd=making.ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    answer, _ = submitter.communicate(timeout=60)
    (run,) = json.loads(answer)["runs"]
    run_dir, pid = Path(run["run_dir"]), int(run["pid"])
    wait_until(lambda: seen(run_dir), "the agent")
    # What a closing terminal does to the submitter's session.
    assert os.getsid(pid) != submitter.pid
    assert alive(pid)
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: seen(run_dir, "signal"), "the agent's signal")
    wait_until(lambda: not alive(pid), "the end")


def test_no_function_is_pickled(tmp_path: Path) -> None:
    executor = LocalAgentExecutor(tmp_path, environ={}, limit_min=1, lead_s=1)
    with pytest.raises(NotImplementedError):
        executor.submit(print)
    assert not list(tmp_path.rglob("*.pkl"))


def test_the_runs_of_a_sweep_go_one_after_another(tmp_path: Path) -> None:
    made = making.tasks(tmp_path / "runs", 3, cluster=local("fail"))
    runs = submitting.submit(made, cwd=tmp_path).runs
    wait_until(lambda: all(seen(run.run_dir) for run in runs), "all agents")
    times = [seen(run.run_dir)[0]["time"] for run in runs]
    assert times == sorted(times)
    paths = [seen(run.run_dir)[0]["environ"]["PYTHONPATH"].split(":")[0] for run in runs]
    assert paths == [f"{run.run_dir}/code" for run in runs]


def test_a_signal_ends_the_present_run_and_those_not_yet_begun(tmp_path: Path) -> None:
    made = making.tasks(tmp_path / "runs", 2, cluster=local("hold"))
    first, second = submitting.submit(made, cwd=tmp_path).runs
    wait_until(lambda: seen(first.run_dir), "the first agent")
    os.kill(int(first.pid or 0), signal.SIGTERM)
    wait_until(lambda: seen(first.run_dir, "signal"), "the agent's signal")
    wait_until(lambda: not alive(int(first.pid or 0)), "the end")
    assert not seen(second.run_dir)


def test_a_local_submission_is_not_started_twice(tmp_path: Path) -> None:
    made = making.tasks(tmp_path / "runs", cluster=local("finish"))
    result = submitting.submit(made, cwd=tmp_path)
    again = submitting.submit(made, cwd=tmp_path, submission_id=result.submission_id)
    assert again.runs == result.runs
    wait_until(lambda: seen(result.runs[0].run_dir), "the agent")
    assert len(seen(result.runs[0].run_dir)) == 1


def test_a_run_whose_submitter_died_while_starting_it_is_not_started_again(tmp_path: Path) -> None:
    from dataclasses import replace

    from air_hpc.launch.submission import AskState, load, save

    made = making.tasks(tmp_path / "runs", cluster=local("finish"))
    result = submitting.submit(made, cwd=tmp_path)
    folder = submission_dir(tmp_path / "runs", result.submission_id)
    record = load(folder)
    assert record is not None
    save(replace(record.with_ask(0, state=AskState.ASKED, job_id=None)))
    with pytest.raises(BadInput, match="interrupted"):
        submitting.resume_submission(folder)


def test_outside_an_allocation_that_is_what_the_error_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    made = making.tasks(tmp_path / "runs", cluster=local("finish", kind="allocation"))
    with pytest.raises(BadInput, match="in no allocation"):
        submitting.submit(made, cwd=tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    made = making.tasks(tmp_path / "runs", nodes=2, cluster=local("finish", kind="allocation"))
    with pytest.raises(BadInput, match="more than the allocation 7 has"):
        submitting.submit(made, cwd=tmp_path)
    assert not (tmp_path / "runs").exists()
