import os
import time
from pathlib import Path

import pytest

from air_hpc.errors import EnvironmentFailure
from air_hpc.slurm import command
from air_hpc.slurm.command import CommandFailure, CommandTimeout


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes an executable of bash lines in a folder that is first on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def write(name: str, lines: str) -> Path:
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{lines}\n")
        path.chmod(0o755)
        return path

    return write


def test_text_on_stderr_with_status_zero_is_no_failure(program) -> None:
    program("sinfo", "echo 'error: a banner' >&2; echo fine")
    assert command.read(["sinfo"]) == "fine\n"


def test_a_failure_says_what_was_tried_and_what_slurm_said(program) -> None:
    program("sinfo", "echo 'invalid partition' >&2; exit 3")
    with pytest.raises(CommandFailure) as caught:
        command.read(["sinfo", "-p", "x"])
    assert caught.value.returncode == 3
    assert "invalid partition" in str(caught.value)
    assert caught.value.tried == "sinfo -p x"
    assert caught.value.next_step


def test_a_busy_controller_is_asked_again_until_it_answers(program, tmp_path: Path) -> None:
    count = tmp_path / "count"
    program(
        "squeue",
        f"echo x >> {count}; if (( $(wc -l < {count}) < 3 )); then "
        "echo 'slurm_load_jobs error: Socket timed out on send/recv operation' >&2; exit 1; fi; "
        "echo answer",
    )
    pauses: list[float] = []
    assert command.read(["squeue"], sleep=pauses.append) == "answer\n"
    assert len(pauses) == 2
    assert pauses[1] > pauses[0] * 1.1


def test_a_wrong_request_is_not_repeated(program, tmp_path: Path) -> None:
    count = tmp_path / "count"
    program("squeue", f"echo x >> {count}; echo 'Invalid user' >&2; exit 1")
    with pytest.raises(CommandFailure):
        command.read(["squeue"], sleep=lambda s: None)
    assert count.read_text() == "x\n"


def test_retries_end_at_the_deadline(program) -> None:
    program("squeue", "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(CommandFailure):
        command.read(["squeue"], timeout_s=20, sleep=sleep, clock=lambda: now[0])
    assert 5 < now[0] < 20


def test_a_command_that_hangs_is_ended_at_its_deadline(program) -> None:
    program("scontrol", "sleep 60")
    began = time.monotonic()
    with pytest.raises(CommandTimeout, match="did not answer within"):
        command.run_once(["scontrol"], timeout_s=0.3)
    assert time.monotonic() - began < 20


def test_a_missing_command_says_what_to_do() -> None:
    with pytest.raises(EnvironmentFailure, match="could not be started") as caught:
        command.run_once(["no-such-slurm-command"])
    assert "module" in caught.value.next_step


def test_arguments_are_never_read_by_a_shell(program) -> None:
    program("sacct", 'printf "%s\\n" "$@"')
    assert command.read(["sacct", "$(id)", "a b", ";ls"]) == "$(id)\na b\n;ls\n"


def test_a_command_killed_by_the_jobs_signal_is_run_again(program, tmp_path: Path) -> None:
    """Slurm signals every process of a step; once that made a preempted run a cancelled one."""
    first = tmp_path / "first"
    program(
        "scontrol", f"if [[ ! -e {first} ]]; then touch {first}; kill -TERM $$; fi; echo answer"
    )
    assert command.read(["scontrol"], sleep=lambda s: None) == "answer\n"
