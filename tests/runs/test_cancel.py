import signal
import subprocess
import sys
from pathlib import Path

import pytest

from air_hpc.errors import EnvironmentFailure
from air_hpc.rundir.events import Kind, read_ledger
from air_hpc.rundir.words import RunState
from air_hpc.runs.cancel import cancel_runs, terminate
from air_hpc.runs.process import ProcessIdentity
from tests.runs.made import MadeRun, ToldSlurm, queued

WAITING = "import time; print('ready', flush=True); time.sleep(60)"


def wishes(run: MadeRun) -> int:
    return sum(e.kind == Kind.CANCEL_REQUESTED for e in read_ledger(run.dir).events)


def test_runs_are_cancelled_by_one_scancel_that_names_array_elements(
    tmp_path: Path, slurm: ToldSlurm
) -> None:
    runs = [MadeRun(tmp_path / "runs", f"tiny-{n}").submitted("100", n) for n in range(2)]
    slurm.tell("squeue", *(queued(f"100_{n}", "PENDING") for n in range(2)))
    done = cancel_runs([run.dir for run in runs])
    assert slurm.calls("scancel") == ["scancel --quiet 100_0 100_1"]
    assert [result.view.status.state for result in done] == [RunState.CANCELLED] * 2
    assert [wishes(run) for run in runs] == [1, 1]


def test_the_wish_is_in_the_ledger_before_slurm_is_told(tmp_path: Path, slurm: ToldSlurm) -> None:
    """The agent learns from the ledger that its SIGTERM is no preemption."""
    run = MadeRun(tmp_path / "runs").submitted()
    slurm.tell("squeue", queued("100", "PENDING"))
    seen = tmp_path / "seen"
    program = f"#!/bin/sh\ncat {run.dir.ledger_dir}/*.jsonl > {seen}\n"
    (slurm.folder / "scancel").write_text(program)
    cancel_runs([run.dir])
    assert Kind.CANCEL_REQUESTED.value in seen.read_text()


def test_asking_twice_is_the_same_as_once(tmp_path: Path, slurm: ToldSlurm) -> None:
    run = MadeRun(tmp_path / "runs").submitted().training(job_id="100")
    slurm.tell("squeue", queued("100", "RUNNING"))
    assert [cancel_runs([run.dir])[0].asked for _ in range(2)] == [True, True]
    assert wishes(run) == 1


def test_a_run_that_has_ended_is_left_alone(tmp_path: Path, slurm: ToldSlurm) -> None:
    run = MadeRun(tmp_path / "runs").submitted().training().ended()
    result = cancel_runs([run.dir])[0]
    assert (result.asked, "FINISHED" in result.done) == (False, True)
    assert wishes(run) == 0
    assert not slurm.calls("scancel")


def test_a_slurm_that_refuses_leaves_the_wish_and_says_what_to_do(
    tmp_path: Path, slurm: ToldSlurm
) -> None:
    run = MadeRun(tmp_path / "runs").submitted()
    slurm.tell("squeue", queued("100", "PENDING"))
    slurm.tell("scancel", error="Unable to contact slurm controller")
    with pytest.raises(EnvironmentFailure, match="run the same command again"):
        cancel_runs([run.dir])
    assert wishes(run) == 1


def test_a_local_run_gets_sigterm_at_its_agent_and_not_at_its_starter(tmp_path: Path) -> None:
    """The starter of a sweep has other runs to start."""
    agent = subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE)
    starter = subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE)
    try:
        assert agent.stdout is not None
        agent.stdout.readline()
        run = MadeRun(tmp_path / "runs")
        run.event(Kind.SUBMITTED, cluster="local", **ProcessIdentity.of(starter.pid).to_facts())
        run.training(scheduler="local", **ProcessIdentity.of(agent.pid).to_facts())
        assert cancel_runs([run.dir])[0].asked
        assert agent.wait(10) == -signal.SIGTERM
        assert starter.poll() is None
    finally:
        for process in (agent, starter):
            process.kill()
            process.communicate()


def test_a_local_run_that_has_not_started_is_cancelled_by_its_ledger_alone(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "runs")
    run.event(Kind.SUBMITTED, cluster="local", **ProcessIdentity.of().to_facts())
    assert cancel_runs([run.dir])[0].view.status.state is RunState.CANCELLED


def test_a_process_that_took_over_the_pid_is_not_signalled() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        own = ProcessIdentity.of(process.pid)
        assert own.started is not None
        assert not terminate(ProcessIdentity(own.pid, own.started - 60, own.boot_id, own.host))
        assert process.poll() is None
    finally:
        process.communicate()


def test_an_allocation_is_never_cancelled_with_the_run_inside_it(
    tmp_path: Path, slurm: ToldSlurm
) -> None:
    run = MadeRun(tmp_path / "runs")
    run.event(Kind.SUBMITTED, job_id="77", cluster="allocation")
    run.training(scheduler="slurm", job_id="100")
    slurm.tell("squeue", queued("100", "RUNNING"))
    cancel_runs([run.dir])
    assert not slurm.calls("scancel")
