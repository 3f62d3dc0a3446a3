"""What an accelerator can do, as figures with a source; read from `conf/accelerator/*.yaml`.

Peaks are dense and for one device; links are uni-directional. A figure that is not known is None,
and what depends on it is then unknown too: there is never a fallback to another device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["fp32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True)
class AcceleratorSpec:
    """The figures of one device model.

    `peak_flops` maps a precision to dense FLOP/s for one device (absent: unknown).
    `device_names` are the lower-case pieces of the names the driver reports, longest matched
    first. `peak_source` is `datasheet` or `measured` (a CPU: measured once for each machine).
    """

    name: str
    kind: Literal["cuda", "rocm", "cpu", "neuron", "hpu"] = "cuda"
    device_names: tuple[str, ...] = ()
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: int | None = None
    memory_bandwidth_bytes_per_s: float | None = None
    scale_up_bytes_per_s: float | None = None
    matmul_ceiling: float | None = None
    unsupported_precisions: tuple[Precision, ...] = ()
    peak_source: Literal["datasheet", "measured"] = "datasheet"
    source: str = ""

    def peak(self, precision: str) -> float | None:
        """Dense peak in FLOP/s at a precision, or None where it is unknown."""
        return self.peak_flops.get(precision)


def match_device(
    reported: str, accelerators: tuple[AcceleratorSpec, ...]
) -> AcceleratorSpec | None:
    """The accelerator whose longest name occurs in the driver's `reported` name, or None.

    The longest wins, so that "NVIDIA GB200" is never taken for a B200 nor "L40S" for an L40.
    """
    text = reported.lower()
    best: tuple[int, AcceleratorSpec] | None = None
    for accelerator in accelerators:
        for name in accelerator.device_names:
            if name in text and (best is None or len(name) > best[0]):
                best = (len(name), accelerator)
    return best[1] if best else None
