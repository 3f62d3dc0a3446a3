"""How long this rank computes, without its waiting for others: what a straggler is found by.

Every rank of a synchronous step takes as long as the slowest, so the time of a step tells nothing.
Running totals are kept of the time that a rank itself needs, and of the steps in it; work between
steps that only some ranks do (a save, the log line) is left out by `stop` and `start`.

    CPU     the training thread's time on a core and waiting for one, from the kernel's scheduler
            (/proc/thread-self/schedstat, documented in the kernel's sched-stats page). A wait in a
            collective sleeps, and counts as neither. Waiting for a core counts: a rank whose core
            is taken by somebody else is slow. Where the kernel keeps no such account, the thread's
            CPU time alone.
    CUDA    the time of the compute stream by events, less the time of the collectives in it by
            NCCL's flight recorder (which has durations with TORCH_NCCL_ENABLE_TIMING=1 alone;
            without them nothing is reported). All ranks share the first; of the second the one they
            wait for has the least. Collectives that overlap with compute are taken off all the
            same, so the figure is a lower bound, and the ratio of ranks not exact. NOT MEASURED:
            written from the documentation, not yet run on several GPUs.

What may go wrong: a rank that sleeps on a slow disk does not compute, and is not found by this.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch


class ComputeClock(Protocol):
    """Running totals of one rank; `stop` and `start` come in turn, from the training thread."""

    @property
    def total_ns(self) -> int | None:
        """Nanoseconds of compute up to the last `stop`; None where they cannot be known."""
        ...

    def start(self) -> None:
        """What comes now counts."""
        ...

    def stop(self) -> None:
        """What comes now does not count."""
        ...


class ThreadClock:
    """The calling thread's time on a core and in the queue for one."""

    def __init__(self, path: str = "/proc/thread-self/schedstat") -> None:
        self._total_ns = 0
        self._began: int | None = None
        try:
            # Kept open: a step pays for one read alone, and only where it logs.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._read_schedstat()
        except (OSError, ValueError):
            self._fd = -1

    @property
    def total_ns(self) -> int:
        """Nanoseconds of compute up to the last `stop`."""
        return self._total_ns

    def start(self) -> None:
        """What comes now counts."""
        self._began = self._now()

    def stop(self) -> None:
        """What comes now does not count."""
        if self._began is not None:
            self._total_ns += max(0, self._now() - self._began)
            self._began = None

    def _now(self) -> int:
        return time.thread_time_ns() if self._fd < 0 else self._read_schedstat()

    def _read_schedstat(self) -> int:
        on_core, in_queue, *_ = os.pread(self._fd, 128, 0).split()
        return int(on_core) + int(in_queue)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)


class StreamClock:
    """The current CUDA stream's time, less that of NCCL's collectives. Not measured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total_ns: int | None = 0
        self._began: torch.cuda.Event | None = None
        self._counted = _newest_collective()

    @property
    def total_ns(self) -> int | None:
        """Nanoseconds of compute up to the last `stop`; None without the recorder's durations."""
        return self._total_ns

    def start(self) -> None:
        """What comes now counts."""
        self._began = self._mark()

    def stop(self) -> None:
        """What comes now does not count. Waits for the stream, as reading the loss does next."""
        if self._began is None:
            return
        ended = self._mark()
        ended.synchronize()
        elapsed_ms = self._began.elapsed_time(ended)
        waited_ms, self._counted = collectives_ms(_recorded(), self._counted)
        self._began = None
        if waited_ms is None or self._total_ns is None:
            self._total_ns = None
        else:
            self._total_ns += int(max(0.0, elapsed_ms - waited_ms) * 1e6)

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def collectives_ms(entries: list[Mapping[str, Any]], after: int) -> tuple[float | None, int]:
    """(milliseconds of the completed collectives newer than `after`, the newest id).

    None where one has no duration. `entries` are the flight recorder's; `record_id` counts up.
    """
    total: float | None = 0.0
    newest = after
    for entry in entries:
        number = int(entry.get("record_id", -1))
        if number <= after or entry.get("state") != "completed":
            continue
        newest = max(newest, number)
        duration = entry.get("duration_ms")
        total = None if duration is None or total is None else total + float(duration)
    return total, newest


def _recorded() -> list[Mapping[str, Any]]:
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump is None:
        return []
    found = pickle.loads(dump(includeStackTraces=False))  # written by this process
    entries = found.get("entries", [])
    return list(entries)


def _newest_collective() -> int:
    return max((int(entry.get("record_id", -1)) for entry in _recorded()), default=-1)


def compute_clock(device: torch.device) -> ComputeClock:
    """The clock for what computes on `device`; of the calling thread on a CPU."""
    return StreamClock(device) if device.type == "cuda" else ThreadClock()
