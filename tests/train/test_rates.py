from __future__ import annotations

import pytest

from air_hpc.config.accelerators import load_accelerators
from air_hpc.config.compose import Composer
from air_hpc.plan.flops import flops_per_token
from air_hpc.plan.types import FlopsPerToken
from air_hpc.train.peak import datasheet_peak, shared_fraction
from air_hpc.train.rates import StepMeter, rates

LLAMA_8B = Composer().compose(["model=llama_8b"]).model
KNOWN = {accelerator.name: accelerator for accelerator in load_accelerators()}


def test_mfu_agrees_with_a_published_run_in_both_conventions() -> None:
    """6,667 tokens/s of an H100 at 8,192 tokens: 39.0 % full, 34.7 % causal (torchtitan)."""
    flops = flops_per_token(LLAMA_8B, 8192)
    metrics = rates(1.0, 6667, flops, 989e12)
    assert metrics["perf/mfu_palm"] == pytest.approx(0.390, abs=5e-4)
    assert metrics["perf/mfu"] == pytest.approx(0.347, abs=5e-4)
    assert metrics["perf/tokens_per_second"] == 6667


def test_an_unknown_peak_gives_no_mfu() -> None:
    assert set(rates(0.5, 10, FlopsPerToken(1, 2), None)) == {
        "perf/step_time_s",
        "perf/tokens_per_second",
    }


def test_more_than_the_peak_is_flagged_and_not_shown() -> None:
    metrics = rates(1.0, 10, FlopsPerToken(2.0, 3.0), 15.0)
    assert metrics["perf/mfu_invalid"] == 1.0
    assert "perf/mfu" not in metrics
    assert "perf/mfu_palm" not in metrics


def test_attention_that_is_not_computed_hides_no_mfu() -> None:
    """An H100 at 131,072 tokens: 60 % by the causal convention is 102 % of full attention."""
    flops = flops_per_token(LLAMA_8B, 131_072)
    metrics = rates(1.0, 4007, flops, 989e12)
    assert metrics["perf/mfu"] == pytest.approx(0.60, abs=1e-3)
    assert "perf/mfu_palm" not in metrics
    assert "perf/mfu_invalid" not in metrics


def test_saves_are_left_out_of_the_time_of_a_step() -> None:
    now = [0.0]
    meter = StepMeter(lambda: now[0])
    for _ in range(4):
        meter.count()
    now[0] = 10.0
    assert meter.step_time_s(excluded_s=2.0) == 2.0
    meter.count()
    now[0] = 14.0
    assert meter.step_time_s(excluded_s=5.0) == 1.0  # 3 of the 4 s were a save
    assert meter.step_time_s(excluded_s=5.0) is None


@pytest.mark.parametrize(
    ("configured", "reported", "expected"),
    [
        ("h100_sxm", "NVIDIA H100 80GB HBM3", 989e12),
        ("h200_sxm", "NVIDIA H200", 989e12),
        ("a100_sxm_40gb", "NVIDIA A100-SXM4-40GB", 312e12),
        ("a10", "NVIDIA A10G", None),
        ("b200", "NVIDIA GB200", None),
        ("h100_sxm", "NVIDIA H100 NVL", None),
        ("a100_sxm_80gb", "NVIDIA H200", None),
        ("h100_sxm", "Some New Device", None),
    ],
)
def test_a_datasheet_counts_only_for_the_device_it_is_of(
    configured: str, reported: str, expected: float | None
) -> None:
    peak = datasheet_peak(KNOWN[configured], KNOWN.values(), "bf16", reported)
    assert peak.flops_per_device == expected
    assert (peak.source == "unknown") == (expected is None)
    assert bool(peak.note) == (expected is None)
    if expected is None:
        assert reported in peak.note


def test_an_unknown_precision_says_what_to_set() -> None:
    peak = datasheet_peak(KNOWN["h100_sxm"], KNOWN.values(), "fp32", "NVIDIA H100 80GB HBM3")
    assert peak.flops_per_device is None
    assert "accelerator.peak_flops.fp32" in peak.note


def test_workers_that_share_cores_share_the_peak() -> None:
    assert shared_fraction(cores=8, threads=4, workers=2) == 1.0
    assert shared_fraction(cores=2, threads=1, workers=4) == 0.5
    assert shared_fraction(cores=2, threads=4, workers=1) == 0.5
