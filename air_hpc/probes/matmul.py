"""The rate of a large square matrix product on one device.

The figure is the best of several repetitions: on a shared machine noise only ever slows. A product
of n × n matrices is counted as 2 n³ FLOP. For a CPU it stands in for the peak that no data sheet
gives, and is then named `measured`.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from air_hpc.rundir.atomic import write_atomic

_AGAIN = 0.3
"""The share of a first measurement's time that a later one takes."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class MatmulRate:
    """FLOP/s of one device (a CPU: of `threads` threads) at a precision."""

    flops_per_s: float
    precision: str
    device: str
    threads: int
    size: int


def measure_matmul(
    device: torch.device, precision: str, *, size: int = 1024, budget_s: float = 1.0
) -> MatmulRate:
    """Multiply matrices of `size` for about `budget_s` seconds, three times at the least."""
    dtype = _DTYPES[precision]
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.empty(size, size, device=device, dtype=torch.float32)
        .normal_(generator=generator)
        .to(dtype)
        for _ in range(2)
    )
    torch.mm(a, b)  # the first one pays for set-up
    best, repeats = float("inf"), 0
    end = time.perf_counter() + budget_s
    while repeats < 3 or time.perf_counter() < end:
        best = min(best, _once(a, b, device))
        repeats += 1
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    return MatmulRate(2 * size**3 / best, precision, device_name(device), threads, size)


def device_name(device: torch.device) -> str:
    """The model of a device, as its driver or the kernel names it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def calibrated_matmul(
    device: torch.device,
    precision: str,
    folder: Path,
    *,
    budget_s: float = 1.0,
    again: bool = True,
) -> MatmulRate:
    """The best rate seen on this device, precision and thread count; `folder` keeps it.

    The first measurement takes `budget_s`. Each later one is brief and can only raise the figure:
    a machine that was busy the first time would otherwise have too low a peak for good, and a run
    faster than that has no MFU. Without `again` there is no later one: a figure that is kept is
    taken. A file that cannot be read or written is no reason to fail.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    label = f"{device_name(device)} {platform.node()} {threads} threads {precision}"
    path = folder / f"matmul-{re.sub(r'[^A-Za-z0-9.]+', '-', label).strip('-')[:180]}.json"
    kept = None
    with contextlib.suppress(OSError, ValueError, TypeError):
        kept = MatmulRate(**json.loads(path.read_bytes()))
    if kept is not None and not again:
        return kept
    budget_s = budget_s if kept is None else budget_s * _AGAIN
    rate = measure_matmul(device, precision, budget_s=budget_s)
    if kept is not None and kept.flops_per_s >= rate.flops_per_s:
        return kept
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, json.dumps(asdict(rate)).encode())
    except OSError:
        pass
    return rate


def _once(a: torch.Tensor, b: torch.Tensor, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    torch.mm(a, b)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
