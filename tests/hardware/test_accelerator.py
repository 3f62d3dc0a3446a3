"""Names that drivers report, and the mistakes that others made with them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_hpc.config.accelerators import load_accelerators
from air_hpc.hardware.accelerator import AcceleratorSpec, match_device

ALL = load_accelerators()

REPORTED = {
    "NVIDIA A100-SXM4-80GB": "a100_sxm_80gb",
    "NVIDIA A100-SXM4-40GB": "a100_sxm_40gb",
    "NVIDIA A100 80GB PCIe": "a100_pcie",
    "NVIDIA A100-PCIE-40GB": "a100_pcie_40gb",
    "NVIDIA H100 80GB HBM3": "h100_sxm",
    "NVIDIA H100 PCIe": "h100_pcie",
    "NVIDIA H100 NVL": "h100_nvl",
    "NVIDIA H20": "h20",
    "NVIDIA H200": "h200_sxm",
    "NVIDIA H200 NVL": "h200_nvl",
    "NVIDIA GH200 480GB": "gh200_96gb",
    "NVIDIA GH200 144G HBM3e": "gh200_141gb",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA B300 SXM6 AC": "b300",
    "NVIDIA GB300": "gb300",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA A10": "a10",
    "NVIDIA A10G": "a10g",
    "NVIDIA A30": "a30",
    "NVIDIA A40": "a40",
    "NVIDIA RTX A6000": "rtx_a6000",
    "NVIDIA GeForce RTX 3090": "rtx_3090",
    "NVIDIA GeForce RTX 4090": "rtx_4090",
    "NVIDIA GeForce RTX 5090": "rtx_5090",
    "Tesla V100-SXM2-32GB": "v100",
    "Tesla T4": "t4",
    "AMD Instinct MI250X / MI250": "mi250x",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI325X": "mi325x",
    "AMD Instinct MI355X": "mi355x",
    "trainium2": "trainium2",
    "GAUDI2": "gaudi2",
    "GAUDI3": "gaudi3",
}

UNLISTED = [
    "NVIDIA L40",
    "NVIDIA L40G",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA T4G",
    "NVIDIA T400 4GB",
    "NVIDIA A16",
    "NVIDIA RTX 6000 Ada Generation",
    "Tesla V100-PCIE-16GB",
    "AMD Instinct MI300A",
    "AMD Instinct MI210",
    "Intel(R) Xeon(R) CPU",
    "",
]


@pytest.mark.parametrize(("reported", "name"), REPORTED.items())
def test_a_reported_name_is_its_own_device(reported: str, name: str) -> None:
    found = match_device(reported, ALL)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("reported", UNLISTED)
def test_a_device_that_is_not_listed_is_unknown_and_no_neighbour(reported: str) -> None:
    assert match_device(reported, ALL) is None


def test_every_accelerator_but_the_cpu_is_reached_by_some_name() -> None:
    assert {a.name for a in ALL} - set(REPORTED.values()) == {"cpu"}


@pytest.mark.parametrize("reported", REPORTED)
def test_the_order_of_the_files_does_not_matter(reported: str) -> None:
    assert match_device(reported, ALL) == match_device(reported, tuple(reversed(ALL)))


def test_no_two_accelerators_answer_to_one_name() -> None:
    for one, other in itertools.combinations(ALL, 2):
        assert not set(one.device_names) & set(other.device_names), (one.name, other.name)


@pytest.mark.parametrize(
    ("mistake", "reported", "bf16"),
    [
        ("H200 taken for A100", "NVIDIA H200", 989e12),
        ("L40S never matched", "NVIDIA L40S", 362e12),
        ("A10G given the A10's 125", "NVIDIA A10G", 70e12),
        ("A10 given the A10G's 70", "NVIDIA A10", 125e12),
        ("GB200 matched as B200", "NVIDIA GB200", 2500e12),
        ("GB300 matched as B300", "NVIDIA GB300", 2500e12),
        ("H100 NVL matched as H100 SXM", "NVIDIA H100 NVL", 835e12),
        ("H20 matched as H200", "NVIDIA H20", 148e12),
        ("312 for everything", "NVIDIA B200", 2250e12),
    ],
)
def test_a_mistake_once_made_elsewhere(mistake: str, reported: str, bf16: float) -> None:
    found = match_device(reported, ALL)
    assert found is not None
    assert found.peak("bf16") == bf16, mistake


def test_an_unknown_precision_or_an_unlisted_device_has_no_peak() -> None:
    by_name = {a.name: a for a in ALL}
    assert by_name["h100_sxm"].peak("fp32") is None
    assert by_name["v100"].peak("bf16") is None
    assert by_name["cpu"].peak("fp32") is None
    assert by_name["cpu"].peak_source == "measured"


@pytest.mark.parametrize("accelerator", ALL, ids=lambda a: a.name)
def test_figures_are_dense_and_of_a_sane_size(accelerator: AcceleratorSpec) -> None:
    assert accelerator.source
    if accelerator.kind == "cpu":
        return
    peaks = accelerator.peak_flops
    assert peaks
    assert all(50e12 < peak < 6e15 for peak in peaks.values())
    if "bf16" in peaks and "fp8" in peaks:
        assert 0.9 < peaks["fp8"] / peaks["bf16"] < 2.1, "sparse figures are twice the dense"
    assert not set(peaks) & set(accelerator.unsupported_precisions)
    assert accelerator.memory_bytes is not None
    assert 16e9 <= accelerator.memory_bytes <= 300e9


@given(st.text())
def test_any_reported_text_is_answered(reported: str) -> None:
    match_device(reported, ALL)
