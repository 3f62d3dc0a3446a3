"""The device and the links as the workers of a generation see them: the worker's own pre-flight.

Made after the process group is there and before the model is built, on every rank alike:

1. a timed matrix product on the rank's own device, compared with the median of all ranks;
2. a small all-reduce over the ranks of the node, then one over all ranks (where there are more),
   each in a group of its own with its own deadline, timed as the best of a few, and its sum looked
   at: a link that changes bytes is worse than a slow one.

It draws no number from torch's random state and leaves no group behind. A device that is too slow
fails on its own rank (`DeviceUnfit`), which names it; a link that is too slow on every rank that
uses it (`LinkUnfit`). A rank that does not come lets the group's deadline pass: a RuntimeError of
gloo, the end of the process under NCCL. Sizes on a CPU are small, since its cores are shared.
Not measured on a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from air_hpc.errors import AirHpcError
from air_hpc.probes.matmul import device_name, measure_matmul
from air_hpc.probes.result import Check

GPU_MATMUL_RATIO = 0.7
"""The floor for GPUs where none is set: up to 5 % between the GPUs of one node is normal."""
_TIMES = 3
_LINK_DEADLINES = 3
"""A group's deadline, in deadlines of the node's checks: ranks begin apart on a busy node."""


class DeviceUnfit(AirHpcError):
    """This rank's device is far slower than the others', or computes wrong sums."""


class LinkUnfit(AirHpcError):
    """The ranks reach each other too slowly."""


@dataclass(frozen=True)
class RanksAsked:
    """What is tried and against which floors; as in config.spec.PreflightSpec."""

    precision: str
    min_matmul_ratio: float | None
    max_all_reduce_s: float | None
    timeout_s: float


@dataclass(frozen=True)
class Here:
    """Where this rank stands; the ranks of a node are consecutive. `control` is gloo over all."""

    rank: int
    world_size: int
    local_world_size: int
    node: str
    device: torch.device
    control: ProcessGroup


def check_ranks(here: Here, asked: RanksAsked) -> list[Check]:
    """Try this rank's device and its links. Collective. Nothing is raised for a failed check.

    Raises RuntimeError when a rank is lost or does not come within the deadline.
    """
    checks = [_matmul(here, asked)]
    if here.local_world_size > 1:
        first = here.rank - here.rank % here.local_world_size
        node_ranks = list(range(first, first + here.local_world_size))
        checks.append(_all_reduce("all_reduce_node", node_ranks, here, asked))
    if here.world_size > here.local_world_size:
        ranks = list(range(here.world_size))
        checks.append(_all_reduce("all_reduce_world", ranks, here, asked))
    if here.device.type == "cuda":
        # What was measured must not count as the model's memory.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(here.device)
    return checks


def raise_if_unfit(checks: Sequence[Check]) -> None:
    """Raise DeviceUnfit or LinkUnfit for what failed here, with the values on both sides."""
    failed = [check for check in checks if check.ok is False]
    if not failed:
        return
    device = any(check.name == "matmul" for check in failed)
    raise (DeviceUnfit if device else LinkUnfit)(
        "pre-flight: " + "; ".join(f"{check.name}: {check.said}" for check in failed)
    )


def _matmul(here: Here, asked: RanksAsked) -> Check:
    gpu = here.device.type != "cpu"
    began = time.monotonic()
    rate = measure_matmul(
        here.device,
        asked.precision,
        size=8192 if gpu else 192,
        budget_s=0.3 if gpu else 0.05,
    ).flops_per_s
    rates: list[Any] = [rate] * here.world_size
    if here.world_size > 1:
        dist.all_gather_object(rates, rate, group=here.control)
    ratio = asked.min_matmul_ratio
    if ratio is None and gpu:
        ratio = GPU_MATMUL_RATIO
    return judge_rate(rate, rates, ratio, f"{device_name(here.device)} on {here.node}",
                      round(time.monotonic() - began, 3))  # fmt: skip


def judge_rate(
    rate: float, rates: Sequence[float], ratio: float | None, where: str, seconds: float = 0.0
) -> Check:
    """One device's rate (FLOP/s) against `ratio` of the median of all."""
    middle = statistics.median(rates)
    floor = None if ratio is None else ratio * middle
    said = f"{where}: {rate / 1e12:.3g} TFLOP/s, the median of {len(rates)} is {middle / 1e12:.3g}"
    if ratio is not None:
        said += f", at least {ratio:g} of it is asked for"
    return Check("matmul", floor is None or rate >= floor, rate, floor, "FLOP/s", said, seconds)


def _all_reduce(name: str, ranks: list[int], here: Here, asked: RanksAsked) -> Check:
    """Time an all-reduce over `ranks` (this one among them)."""
    began = time.monotonic()
    count = 2**24 if here.device.type != "cpu" else 2**18
    group = dist.new_group(
        ranks,
        timeout=timedelta(seconds=_LINK_DEADLINES * asked.timeout_s),
        use_local_synchronization=True,
    )
    try:
        best, right = float("inf"), True
        for _ in range(1 + _TIMES):  # the first one makes the connections
            values = torch.full((count,), float(here.rank + 1), device=here.device)
            _settle(here.device)
            start = time.perf_counter()
            dist.all_reduce(values, group=group)
            _settle(here.device)
            best = min(best, time.perf_counter() - start)
            right = right and bool((values == sum(rank + 1 for rank in ranks)).all())
    finally:
        dist.destroy_process_group(group)
    said = f"{len(ranks)} ranks, {4 * count / 2**20:g} MiB: {1e3 * best:.3g} ms"
    limit = asked.max_all_reduce_s
    ok = right and (limit is None or best <= limit)
    if not right:
        said += ", and the sum is wrong"
    elif not ok:
        said += f", at most {1e3 * (limit or 0):g} ms are allowed"
    took = round(time.monotonic() - began, 3)
    return Check(name, ok, round(best, 6), limit, "s", said, took)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
