"""What an accelerator can do, as figures with a source; read from `conf/accelerator/*.yaml`.

Peaks are dense and for one device; links are uni-directional. A figure that is not known is None,
and what depends on it is then unknown too: there is never a fallback to another device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["fp32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True)
class AcceleratorSpec:
    """The figures of one device model.

    `peak_flops` maps a precision to dense FLOP/s for one device (absent: unknown, or, if it is one
    of `unsupported_precisions`, not there). `device_names` are the names that the driver reports,
    without vendor and memory size unless those tell models apart; the longest is matched first.
    `matmul_ceiling` is the part of the bf16 peak that the best matmul is known to reach.
    `peak_source` is `datasheet` or `measured` (a CPU: measured once for each machine).

    `scale_up` is the fast link inside a domain of `scale_up_devices` (None: a node), `scale_out`
    one device's share of the network between domains, as in the vendor's reference system: a site
    with another network overrides it. A latency is that of one hop; None leaves it out.
    `host_link_bytes_per_s` is between a device and its host. `cost_per_device_hour` is an input,
    in whatever currency it is given in.
    """

    name: str
    kind: Literal["cuda", "rocm", "cpu", "neuron", "hpu"] = "cuda"
    device_names: tuple[str, ...] = ()
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: int | None = None
    memory_bandwidth_bytes_per_s: float | None = None
    scale_up_bytes_per_s: float | None = None
    scale_up_devices: int | None = None
    scale_up_latency_s: float | None = None
    scale_out_bytes_per_s: float | None = None
    scale_out_latency_s: float | None = None
    host_link_bytes_per_s: float | None = None
    matmul_ceiling: float | None = None
    cost_per_device_hour: float | None = None
    unsupported_precisions: tuple[Precision, ...] = ()
    peak_source: Literal["datasheet", "measured"] = "datasheet"
    source: str = ""

    def peak(self, precision: str) -> float | None:
        """Dense peak in FLOP/s at a precision, or None where it is unknown."""
        return self.peak_flops.get(precision)


_SEPARATORS = re.compile(r"[^a-z0-9.]+")
_NO_PART_OF_THE_MODEL = re.compile(
    r"nvidia|amd|aws|intel|habana|instinct|tesla|geforce|graphics|gpu|accelerator"
    r"|\d+g|\d+gb|\d+gib|hbm\d?e?|gddr\d\w?"
)


def match_device(reported: str, accelerators: Iterable[AcceleratorSpec]) -> AcceleratorSpec | None:
    """The accelerator that the driver's `reported` name is of, or None.

    A name counts when its words follow one another in the reported name and what is left over
    says nothing about the model (vendor, memory size). So a variant that no accelerator lists (an
    "RTX 4090 Laptop GPU", a MIG slice, an L40 beside L4 and L40S) is unknown, never a neighbour.
    The longest name wins.
    """
    words = _words(reported)
    best: tuple[int, AcceleratorSpec] | None = None
    for accelerator in accelerators:
        for name in accelerator.device_names:
            if _names(words, _words(name)) and (best is None or len(name) > best[0]):
                best = (len(name), accelerator)
    return best[1] if best else None


def _words(text: str) -> list[str]:
    return [word for word in _SEPARATORS.split(text.lower()) if word]


def _names(reported: list[str], name: list[str]) -> bool:
    size = len(name)
    for start in range(len(reported) - size + 1):
        if reported[start : start + size] == name:
            rest = reported[:start] + reported[start + size :]
            if all(_NO_PART_OF_THE_MODEL.fullmatch(word) for word in rest):
                return True
    return False
