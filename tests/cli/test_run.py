"""The verb `run`: dry runs, and real training on this machine, followed and stopped."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from air_hpc.rundir.commit import committed_steps
from air_hpc.rundir.layout import list_runs
from tests.cli.commands import air_hpc, environ, json_of

SMALL = [
    "model.dim=32",
    "model.layers=1",
    "model.heads=2",
    "model.kv_heads=2",
    "model.ffn_dim=64",
    "data.sequence_length=16",
    "train.global_batch_size=2",
    "schedule.warmup_steps=1",
    "tracking=spool",
    "code.snapshot=none",
]


def test_a_dry_run_shows_config_plan_and_script_and_touches_nothing(tmp_path: Path) -> None:
    words = ["cluster=slurm", "launch.partition=low", "launch.nodes=2", "code.snapshot=none"]
    env = {"PATH": "/nowhere"}
    done = air_hpc(*words, "--dry-run", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    for piece in ("partition: low", "FLOP/token", "#SBATCH --partition=low", "#!/bin/bash"):
        assert piece in done.stdout
    body = json_of(air_hpc(*words, "--dry-run", "--json", cwd=tmp_path, env=env))
    assert body["runs"][0]["config"]["launch"]["partition"] == "low"
    assert body["runs"][0]["plan"]["nodes"] == 2
    assert "#SBATCH --partition=low" in body["script"]
    assert list(tmp_path.iterdir()) == []


def test_without_torch_a_run_here_is_refused_with_what_to_install(tmp_path: Path) -> None:
    # It once made three attempts, and none of them said why it ended.
    code = "import sys; sys.modules['torch'] = None; from air_hpc.cli import main as m; "
    code += "sys.exit(m.main())"
    done = air_hpc("train.steps=30", cwd=tmp_path, program=("-c", code))
    assert done.returncode == 1
    assert "torch" in done.stderr
    assert "[train" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_this_machine_cannot_hold_is_refused(tmp_path: Path) -> None:
    done = air_hpc("model=llama_405b", "cluster=local", cwd=tmp_path)
    assert done.returncode == 2
    assert "optimizer state take" in done.stderr
    assert list(tmp_path.iterdir()) == []
    plan = air_hpc("plan", "model=llama_405b", cwd=tmp_path)
    assert plan.returncode == 0, "a plan is for another machine"


def test_there_is_nothing_to_resume(tmp_path: Path) -> None:
    done = air_hpc("--resume", "sweep-1", cwd=tmp_path)
    assert (done.returncode, "no such submission" in done.stderr) == (2, True)
    mixed = air_hpc("--resume", "sweep-1", "train.steps=2", cwd=tmp_path)
    assert "keeps its own config" in mixed.stderr


def test_an_agent_that_cannot_start_ends_the_command_and_names_its_log(tmp_path: Path) -> None:
    done = air_hpc(*SMALL, "cluster.python=/bin/false", cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    assert "FAILED: the agent ended before it said a word" in done.stdout
    assert "python -m air_hpc logs" in done.stdout


@pytest.mark.torch
def test_a_sweep_on_this_machine_goes_run_by_run_and_prints_one_object(tmp_path: Path) -> None:
    words = [*SMALL, "train.steps=4", "checkpoint.interval_steps=2", "-m", "train.seed=1,2"]
    done = air_hpc(*words, "--json", cwd=tmp_path, timeout_s=240)
    assert done.returncode == 0, done.stderr
    body = json_of(done)
    assert [run["state"] for run in body["runs"]] == ["FINISHED"] * 2
    for run in body["runs"]:
        assert run["step"] == run["steps"] == 4
        assert run["first_loss"] > 0
        assert run["checkpoints"] == [2, 4]
        assert run["attempts"] == 1
    assert "(2 of 2: train.seed=2)" in done.stderr
    assert "Training begins with step 1." in done.stderr
    assert "Saved step 4" in done.stderr
    started = [run["started"] for run in body["runs"]]
    assert started[1] >= body["runs"][0]["ended"]


@pytest.mark.torch
def test_ctrl_c_saves_and_ends_the_run(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "air_hpc", *SMALL, "train.steps=100000"],
        cwd=tmp_path,
        env=environ(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Whoever runs the tests in the background may have it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("step "):
            process.send_signal(signal.SIGINT)
            break
    rest, _ = process.communicate(timeout=120)
    text = "".join(said) + rest
    assert process.returncode == 130, text
    assert "Ctrl-C: the run saves its state and ends." in text
    assert re.search(r"state +CANCELLED", text)
    run = list_runs(tmp_path / "runs")[0]
    assert committed_steps(run), text


@pytest.mark.torch
def test_a_terminal_gets_a_bar_with_loss_and_rate_and_then_the_summary(tmp_path: Path) -> None:
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "air_hpc", *SMALL, "train.steps=40"],
        cwd=tmp_path,
        env=environ({"TERM": "xterm", "COLUMNS": "120"}),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    text = _read_all(main, process)
    assert process.wait(10) == 0, text
    assert "/40" in text
    assert "tokens/s" in text
    assert "Training begins with step 1." in text
    assert re.search(r"state +FINISHED", text)
    assert "goodput" in text


def _read_all(main: int, process: subprocess.Popen[bytes], timeout_s: float = 200) -> str:
    """Everything that is written to a terminal until its program ends."""
    data, deadline = b"", time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        ready, _, _ = select.select([main], [], [], 0.2)
        if not ready:
            if process.poll() is not None:
                break
            continue
        try:
            data += os.read(main, 65536)
        except OSError:
            break
    os.close(main)
    return data.decode(errors="replace")
