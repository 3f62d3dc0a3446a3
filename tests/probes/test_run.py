"""A node's checks in their own process: what hangs is cut at its deadline and named."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from air_hpc.probes.gpu import GPU_CHECKS, GpuAsked
from air_hpc.probes.host import HOST_CHECKS, HostAsked
from air_hpc.probes.node import Asked
from air_hpc.probes.result import Check
from air_hpc.probes.run import Findings, NodeProbe
from tests.agent.groups import ROOT, wait_until
from tests.probes.fake_nvml import write_module


def asked(group: str, run_dir: Path, *, checks: bool = True) -> Asked:
    host = HostAsked("n1", str(run_dir), str(run_dir), 0, None)
    return Asked(group, host, GpuAsked(2, {}, None, 0), checks)  # type: ignore[arg-type]


def probe(
    tmp_path: Path,
    nvml: str,
    *groups: str,
    timeout_s: float = 60,
    check_timeout_s: float = 60,
    checks: bool = True,
) -> NodeProbe:
    (tmp_path / "run").mkdir(exist_ok=True)
    path = f"{write_module(tmp_path / 'nvml', nvml)}:{ROOT}"
    return NodeProbe(
        [asked(group, tmp_path / "run", checks=checks) for group in groups],
        timeout_s=timeout_s,
        check_timeout_s=check_timeout_s,
        environ={**os.environ, "PYTHONPATH": path},
    )


def by_name(found: Findings) -> dict[str, Check]:
    return {check.name: check for check in found.checks}


TWO = "FakeNvml([Gpu('GPU-a'), Gpu('GPU-b')]"


def test_every_check_of_a_healthy_node_is_told(tmp_path: Path) -> None:
    found = probe(tmp_path, f"{TWO})", "host", "gpu").wait()
    assert set(by_name(found)) == {"nvml", *HOST_CHECKS, *GPU_CHECKS}
    assert [str(check) for check in found.checks if check.ok is not True] == []
    assert found.devices is not None
    assert [device.uuid for device in found.devices] == ["GPU-a", "GPU-b"]


def test_a_driver_that_hangs_at_the_start_is_cut_and_named(tmp_path: Path) -> None:
    running = probe(tmp_path, f"{TWO}, hangs='nvmlInit')", "host", "gpu", check_timeout_s=0.5)
    pids = [child._process.pid for child in running._children]
    found = by_name(running.wait())
    assert found["nvml"].ok is False
    assert found["nvml"].said == "hangs: not done within 0.5 s"
    assert {found[name].ok for name in GPU_CHECKS} == {None}
    assert "nvml hangs" in found["ecc"].said
    assert {found[name].ok for name in HOST_CHECKS} == {True}, "the other group is not held up"
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_what_was_told_before_a_check_hung_is_kept(tmp_path: Path) -> None:
    nvml = f"{TWO}, hangs='nvmlDeviceGetTotalEccErrors')"
    found = by_name(probe(tmp_path, nvml, "gpu", check_timeout_s=0.5).wait())
    assert found["devices"].ok is True
    assert found["ecc"].ok is False
    assert found["clocks"].ok is None


def test_the_time_of_all_checks_together_is_bounded(tmp_path: Path) -> None:
    began = time.monotonic()
    found = probe(tmp_path, f"{TWO}, hangs='nvmlInit')", "gpu", timeout_s=1.5).wait()
    assert by_name(found)["nvml"].ok is False
    assert found.seconds < 60
    assert time.monotonic() - began < 60


def test_a_process_that_dies_speaks_against_nobody_and_its_word_is_kept(tmp_path: Path) -> None:
    found = by_name(probe(tmp_path, f"{TWO}, crashes='nvmlDeviceGetClockInfo')", "gpu").wait())
    assert found["ecc"].ok is True
    assert found["clocks"].ok is None
    assert "libnvidia-ml crashed" in found["clocks"].said


def test_without_checks_the_devices_are_still_described(tmp_path: Path) -> None:
    found = probe(tmp_path, f"{TWO})", "gpu", checks=False).wait()
    assert [check.name for check in found.checks] == ["nvml"]
    assert len(found.devices or ()) == 2


def test_a_process_that_cannot_be_started_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no-python"):
        NodeProbe(
            [asked("host", tmp_path)],
            timeout_s=1,
            check_timeout_s=1,
            environ={},
            python=str(tmp_path / "no-python"),
        )
