"""The oom-killer's counter, from the files of both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from air_hpc.agent.oom import oom_kills


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_version_2_counts_in_the_events_of_the_group(tmp_path: Path) -> None:
    proc = write(tmp_path / "cgroup", "0::/slurm/job_7/step_0\n")
    mount = tmp_path / "fs"
    events = "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n"
    write(mount / "slurm/job_7/step_0/memory.events", events)
    assert oom_kills(proc, mount) == 2


def test_version_1_counts_in_the_oom_control_of_the_group(tmp_path: Path) -> None:
    lines = "9:name=systemd:/\n4:memory:/slurm/uid_1/job_7\n0::/\n"
    proc = write(tmp_path / "cgroup", lines)
    control = "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"
    write(tmp_path / "fs/memory/slurm/uid_1/job_7/memory.oom_control", control)
    assert oom_kills(proc, tmp_path / "fs") == 1


def test_a_container_sees_its_own_group_at_the_mount(tmp_path: Path) -> None:
    proc = write(tmp_path / "cgroup", "0::/../../outside\n")
    write(tmp_path / "fs/memory.events", "oom_kill 4\n")
    assert oom_kills(proc, tmp_path / "fs") == 4


@pytest.mark.parametrize("line", ["", "0::/gone\n", "7:memory:/gone\n", "nonsense\n"])
def test_what_cannot_be_read_is_unknown(tmp_path: Path, line: str) -> None:
    assert oom_kills(write(tmp_path / "cgroup", line), tmp_path / "fs") is None
    assert oom_kills(tmp_path / "none", tmp_path / "fs") is None


def test_a_counter_that_is_no_number_is_unknown(tmp_path: Path) -> None:
    proc = write(tmp_path / "cgroup", "0::/\n")
    write(tmp_path / "fs/memory.events", "oom_kill many\n")
    assert oom_kills(proc, tmp_path / "fs") is None
