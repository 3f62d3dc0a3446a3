"""What a node's disks, shared file system, clock and ports show."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from air_hpc.probes.host import HOST_CHECKS, HostAsked, clock_skew_s
from air_hpc.probes.result import Check


@pytest.fixture
def asked(tmp_path: Path) -> HostAsked:
    return HostAsked("n1", str(tmp_path), str(tmp_path / "not" / "made"), 1, 5.0)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A file system of a test's own; skipped where none may be mounted."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("no file system may be mounted here")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True, check=False)


def made(asked: HostAsked) -> dict[str, Check]:
    return {name: check(asked) for name, check in HOST_CHECKS.items()}


def test_a_healthy_node_passes_and_nothing_is_left(asked: HostAsked, tmp_path: Path) -> None:
    found = made(asked)
    assert {name: check.ok for name, check in found.items()} == dict.fromkeys(HOST_CHECKS, True)
    assert all(check.name == name for name, check in found.items())
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_probe_left_is_taken_away(asked: HostAsked, tmp_path: Path) -> None:
    (tmp_path / ".probe-n1").write_text("old")
    assert HOST_CHECKS["run_dir_write"](asked).ok is True
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_said_with_both_values(asked: HostAsked) -> None:
    for name in ("local_disk", "run_dir_space"):
        check = HOST_CHECKS[name](replace(asked, min_disk_bytes=2**60))
        assert (check.ok, check.floor) == (False, 2**60)
        assert "1073741824.0 asked for" in check.said


def test_a_full_file_system_is_nothing_against_the_node(
    asked: HostAsked, mounted: Callable[[str], Path]
) -> None:
    folder = mounted("size=8k")
    found = made(replace(asked, run_dir=str(folder), min_disk_bytes=0))
    assert found["run_dir_space"].ok is False
    assert "ENOSPC" in found["run_dir_space"].said
    assert found["run_dir_write"].ok is None
    assert "ENOSPC" in found["run_dir_write"].said
    assert found["clock"].ok is None
    assert list(folder.iterdir()) == []


def test_a_file_system_that_refuses_is_named(
    asked: HostAsked, mounted: Callable[[str], Path]
) -> None:
    folder = mounted("ro")
    check = HOST_CHECKS["run_dir_write"](replace(asked, run_dir=str(folder)))
    assert check.ok is False
    assert str(folder) in check.said
    assert "EROFS" in check.said


def test_a_run_directory_that_is_none_is_named(asked: HostAsked, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = HOST_CHECKS["run_dir_write"](replace(asked, run_dir=str(tmp_path / "file")))
    assert check.ok is False
    assert "ENOTDIR" in check.said


@pytest.mark.parametrize(
    ("stamp", "skew_s"), [(100.0, 0), (100.2, 0), (99.99, 0), (90.0, -10.0), (107.5, 7.3)]
)
def test_a_clock_is_off_by_what_lies_outside_the_interval(stamp: float, skew_s: float) -> None:
    assert clock_skew_s(100.0, stamp, 100.2) == pytest.approx(skew_s)


def test_a_clock_beyond_the_limit_fails(asked: HostAsked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("air_hpc.probes.host.time.time", lambda: 1e9)
    check = HOST_CHECKS["clock"](asked)
    assert (check.ok, check.floor) == (False, 5.0)
    assert "behind the file server" in check.said
    assert HOST_CHECKS["clock"](replace(asked, max_clock_skew_s=None)).ok is True
