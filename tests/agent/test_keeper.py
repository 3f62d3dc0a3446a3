"""The task that outlives its agent: what it passes on, and when it stands by instead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from air_hpc.agent.keeper import EXIT_STAND_BY
from tests.agent.groups import ROOT, gone, wait_until

KEPT = """
import os, signal, sys, time
from air_hpc.agent import keeper, main

main._run = lambda arguments: {agent}
keeper.STOPPED_S = 0.3
keeper.keep.__kwdefaults__["stopped_s"] = 0.3
os.execv = lambda path, words: (print("stands by:", words[-2], flush=True), os._exit(7))
sys.exit(main.main(["/a/run"]))
"""
SLEEPS = "print('here', flush=True) or time.sleep(60) or 0"


def start(agent: str, nodes: int = 2) -> subprocess.Popen[str]:
    environ = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_NODES": str(nodes)}
    environ["PYTHONPATH"] = str(ROOT)
    argv = [sys.executable, "-c", KEPT.format(agent=agent)]
    return subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True)


def agent_of(task: subprocess.Popen[str]) -> psutil.Process:
    """The agent, once it is at work."""
    assert task.stdout is not None
    assert task.stdout.readline() == "here\n"
    (agent,) = psutil.Process(task.pid).children()
    return agent


def end_of(task: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = task.communicate(timeout=60)
    return task.returncode, said.strip()


@pytest.mark.parametrize("code", [0, 1, 93])
def test_the_task_ends_as_its_agent_does(code: int) -> None:
    assert end_of(start(str(code))) == (code, "")


def test_a_killed_agent_leaves_a_node_that_stands_by() -> None:
    task = start(SLEEPS)
    agent_of(task).kill()
    assert end_of(task) == (7, "stands by: was killed by SIGKILL")


def test_a_stopped_agent_is_ended_and_one_that_goes_on_in_time_is_not() -> None:
    task = start(SLEEPS)
    agent = agent_of(task)
    agent.suspend()
    agent.resume()
    assert end_of_stopped(task, agent).startswith("stands by: stood still for")


def end_of_stopped(task: subprocess.Popen[str], agent: psutil.Process) -> str:
    """What comes of an agent that is stopped once its short stop has been seen to do no harm."""
    with pytest.raises(subprocess.TimeoutExpired):
        task.wait(2.5)  # longer than it may stand still, and than the keeper's tick
    agent.suspend()
    return end_of(task)[1]


def test_an_agent_that_takes_no_part_any_more_stands_by() -> None:
    assert end_of(start(str(EXIT_STAND_BY))) == (7, "stands by: takes no part any more")


def test_alone_there_is_nobody_to_stand_by_for() -> None:
    task = start(SLEEPS, nodes=1)
    agent_of(task).kill()
    assert end_of(task) == (128 + signal.SIGKILL, "")
    assert end_of(start(str(EXIT_STAND_BY), nodes=1)) == (1, "")


def test_signals_are_the_agents_to_answer() -> None:
    """Slurm sends them to every process of the step."""
    answers = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))"
    task = start(f"[{answers}, {SLEEPS}]")
    agent = agent_of(task)
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        task.send_signal(number)
    agent.terminate()
    assert end_of(task) == (5, "")


def test_an_agent_dies_with_its_task() -> None:
    task = start(SLEEPS)
    agent = agent_of(task)
    task.kill()
    wait_until(lambda: gone(agent.pid))
    task.communicate()
