from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from air_hpc.probes.matmul import calibrated_matmul, device_name, measure_matmul

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rate_is_positive_and_says_what_it_is_of(precision: str) -> None:
    rate = measure_matmul(CPU, precision, size=64, budget_s=0.0)
    assert rate.flops_per_s > 0
    assert (rate.precision, rate.size) == (precision, 64)
    assert rate.device == device_name(CPU) != ""


def test_the_best_rate_of_a_machine_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "calibrations"
    first = calibrated_matmul(CPU, "fp32", folder, budget_s=0.0)
    [path] = folder.iterdir()
    kept = json.loads(path.read_text())
    assert first.flops_per_s == kept["flops_per_s"]
    path.write_text(json.dumps({**kept, "flops_per_s": 1e18}))
    assert calibrated_matmul(CPU, "fp32", folder, budget_s=0.0).flops_per_s == 1e18


def test_a_peak_measured_on_a_busy_machine_is_corrected_by_the_next_run(tmp_path: Path) -> None:
    # It once stood for good, and every later run was above it and had no MFU.
    calibrated_matmul(CPU, "fp32", tmp_path, budget_s=0.0)
    [path] = tmp_path.iterdir()
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "flops_per_s": 123.0}))
    rate = calibrated_matmul(CPU, "fp32", tmp_path, budget_s=0.0)
    assert rate.flops_per_s > 123.0
    assert json.loads(path.read_text())["flops_per_s"] == rate.flops_per_s


def test_a_restart_inside_the_allocation_takes_the_peak_that_is_kept(tmp_path: Path) -> None:
    # All other ranks wait for the measurement: it was most of what a restart took.
    calibrated_matmul(CPU, "fp32", tmp_path, budget_s=0.0)
    [path] = tmp_path.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), "flops_per_s": 123.0}))
    assert calibrated_matmul(CPU, "fp32", tmp_path, again=False).flops_per_s == 123.0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"flops_per_s": 1}'])
def test_an_unreadable_calibration_is_measured_again(tmp_path: Path, text: str) -> None:
    calibrated_matmul(CPU, "fp32", tmp_path, budget_s=0.0)
    [path] = tmp_path.iterdir()
    path.write_text(text)
    assert calibrated_matmul(CPU, "fp32", tmp_path, budget_s=0.0).flops_per_s > 1e6


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert calibrated_matmul(CPU, "fp32", tmp_path / "file" / "x", budget_s=0.0).flops_per_s > 0
