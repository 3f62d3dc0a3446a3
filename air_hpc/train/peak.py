"""The peak that MFU is measured against.

A GPU has its data sheet's figure, if the name its driver reports is that of the accelerator the
run was configured for; otherwise there is no peak and a line that says why. A CPU has none on
paper: the best that a large matmul with a worker's threads reached on this machine is kept in the
runs folder, and a short measurement at each attempt's start may raise it. Where the workers of a
node have more threads than the cores they may use together, each can have only its share of what
one reached alone, and the peak is scaled by cores / threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from air_hpc.hardware.accelerator import AcceleratorSpec, match_device
from air_hpc.probes.matmul import calibrated_matmul, device_name


@dataclass(frozen=True)
class Peak:
    """Dense FLOP/s of one device, or None and why. `source`: datasheet, measured or unknown."""

    flops_per_device: float | None
    source: str
    device: str
    note: str = ""


def datasheet_peak(
    accelerator: AcceleratorSpec,
    known: Iterable[AcceleratorSpec],
    precision: str,
    reported: str,
) -> Peak:
    """The configured accelerator's figure, if `reported` names it and no other more exactly."""
    everyone = (*(a for a in known if a.name != accelerator.name), accelerator)
    matched = match_device(reported, everyone)
    shares_name = matched is not None and any(
        name in matched.device_names and name in reported.lower()
        for name in accelerator.device_names
    )
    if matched is None or not (matched.name == accelerator.name or shares_name):
        found = "no accelerator known here" if matched is None else f"accelerator={matched.name}"
        note = f"configured accelerator={accelerator.name}, but the device is {reported}: {found}"
        return Peak(None, "unknown", reported, f"{note}. No MFU; set the accelerator that it is")
    figure = accelerator.peak(precision)
    if figure is None:
        note = f"no {precision} peak is known for {accelerator.name}. No MFU; set "
        return Peak(None, "unknown", reported, f"{note}accelerator.peak_flops.{precision}")
    return Peak(figure, accelerator.peak_source, reported)


def measured_cpu_peak(
    precision: str, workers: int, cores: int, folder: Path, *, again: bool = True
) -> Peak:
    """What one of `workers` on `cores` of this machine can reach; for one process of a run."""
    rate = calibrated_matmul(torch.device("cpu"), precision, folder, again=again)
    share = shared_fraction(cores, rate.threads, workers)
    note = ""
    if share < 1:
        note = (
            f"the measured peak is scaled by {share:.2f}: {workers} workers with {rate.threads} "
            f"threads each share {cores} cores"
        )
    return Peak(rate.flops_per_s * share, "measured", rate.device, note)


def shared_fraction(cores: int, threads: int, workers: int) -> float:
    """Of the rate that one worker reaches alone, what each of `workers` can have at once."""
    return min(1.0, max(1, cores) / (threads * workers))


def find_peak(
    accelerator: AcceleratorSpec,
    known: Iterable[AcceleratorSpec],
    precision: str,
    device: torch.device,
    workers: int,
    cores: int,
    folder: Path,
    *,
    again: bool = True,
) -> Peak:
    """The peak of `device`; rank 0's stands for all. `workers` of its node may use `cores`.

    A figure that is configured for a CPU is taken as it is; without `again` one that was measured
    is too.
    """
    if device.type != "cpu":
        return datasheet_peak(accelerator, known, precision, device_name(device))
    figure = accelerator.peak(precision)
    if figure is not None:
        return Peak(figure, accelerator.peak_source, device_name(device))
    return measured_cpu_peak(precision, workers, cores, folder, again=again)
