"""What a device and its links reach in training, from its figures and three fitted constants.

A data sheet's peak is reached by nobody, the best matrix product's rate by no training step. So

    matmul rate     = (measured by the probe, else peak x matmul_ceiling) x matmul_share
    attention rate  = the same x attention_share
    link rate       = data sheet x link_share
    memory rate     = data sheet

The three shares are global: one value for every model, device and size. They were fitted on
torchtitan's published 8B runs alone (`tools/plan-published --fit`) and are kept with that
provenance in `fitted.json` beside this file. docs/planner.md shows what they make of every other
published run.

What may go wrong: a device whose matmuls reach another part of their best rate than H100s and
A100s do is misjudged by that much; a calibration of the device itself (`<runs_dir>/.air_hpc`)
takes the first factor's error away, not the second's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from air_hpc.hardware.accelerator import AcceleratorSpec
from air_hpc.hardware.network import Links, links_of

FITTED = Path(__file__).with_name("fitted.json")


@dataclass(frozen=True)
class Constants:
    """The three fitted shares."""

    matmul_share: float
    """Of the best matmul rate: what the matrix products of a step reach."""
    attention_share: float
    """Of the best matmul rate: what attention kernels reach."""
    link_share: float
    """Of a link's rate: what collectives reach, their copies in and out of buffers counted."""


@lru_cache(maxsize=1)
def fitted() -> Constants:
    """The constants as they were fitted."""
    return Constants(**json.loads(FITTED.read_text(encoding="utf-8"))["constants"])


@dataclass(frozen=True)
class Rates:
    """What is reached: FLOP/s of matrix products at the training precision (`linear`), of those
    kept in it where the linear layers run in another (`matmul`), and of attention; bytes/s of
    memory; the links and what is reached of them."""

    linear_flops_per_s: float
    matmul_flops_per_s: float
    attention_flops_per_s: float
    memory_bytes_per_s: float
    links: Links
    link_share: float
    source: str


@dataclass(frozen=True)
class Unknown:
    """There is no time, and why: for people."""

    reason: str


def rates_of(
    accelerator: AcceleratorSpec,
    devices_per_node: int,
    precision: str,
    *,
    linear_precision: str | None = None,
    measured_flops_per_s: float | None = None,
    constants: Constants | None = None,
) -> Rates | Unknown:
    """The rates of a device, or what is missing for them.

    `measured_flops_per_s` is the probe's best matmul at `precision`. `linear_precision` is what
    linear layers run in, if another: with fp8 as the precision they do, and the rest in bf16.
    """
    shares = constants or fitted()
    if precision == "fp8":
        precision, linear_precision = "bf16", "fp8"
    best = _best_matmul(accelerator, precision, measured_flops_per_s)
    if isinstance(best, Unknown):
        return best
    if accelerator.memory_bandwidth_bytes_per_s is None:
        return _missing(accelerator, "memory_bandwidth_bytes_per_s")
    linear = best
    if linear_precision is not None and linear_precision != precision:
        peak, other = accelerator.peak(precision), accelerator.peak(linear_precision)
        if other is None or peak is None:
            return _missing(accelerator, f"peak_flops.{linear_precision}")
        linear = best * other / peak
    source = "measured here" if measured_flops_per_s is not None else "datasheet and ceiling"
    return Rates(
        linear_flops_per_s=shares.matmul_share * linear,
        matmul_flops_per_s=shares.matmul_share * best,
        attention_flops_per_s=shares.attention_share * best,
        memory_bytes_per_s=accelerator.memory_bandwidth_bytes_per_s,
        links=links_of(accelerator, devices_per_node),
        link_share=shares.link_share,
        source=source,
    )


def _best_matmul(
    accelerator: AcceleratorSpec, precision: str, measured: float | None
) -> float | Unknown:
    if measured is not None:
        return measured
    peak = accelerator.peak(precision)
    if peak is None:
        return _missing(accelerator, f"peak_flops.{precision}")
    if accelerator.matmul_ceiling is None:
        return _missing(accelerator, "matmul_ceiling")
    return peak * accelerator.matmul_ceiling


def _missing(accelerator: AcceleratorSpec, key: str) -> Unknown:
    return Unknown(f"accelerator={accelerator.name} has no {key}")
