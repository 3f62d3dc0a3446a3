"""The compute time of a rank: what it does itself counts, waiting for the others does not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from air_hpc.config.spec import StragglerSpec
from air_hpc.recovery.stragglers import Stragglers
from air_hpc.train.compute_time import ThreadClock, collectives_ms
from tests.torch_ranks import run_ranks

STEPS_A_QUARTER = 8
STEPS = 5 * STEPS_A_QUARTER
WORK_S = 0.005
SLOW, FACTOR = 2, 4


def burn(seconds: float) -> None:
    """CPU time of this thread, whatever else the machine does."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def measured(clock: ThreadClock, does: Callable[[], None]) -> float:
    before = clock.total_ns
    clock.start()
    does()
    clock.stop()
    return (clock.total_ns - before) / 1e9


@pytest.mark.parametrize("path", ["/proc/thread-self/schedstat", "/no/such/file"])
def test_work_counts_and_sleep_does_not(path: str) -> None:
    clock = ThreadClock(path)
    assert measured(clock, lambda: burn(0.03)) >= 0.025
    # The kernel may keep it from its core after the sleep; that is not the sleep.
    assert min(measured(clock, lambda: time.sleep(0.1)) for _ in range(5)) < 0.05


def test_what_another_thread_does_does_not_count() -> None:
    other = threading.Thread(target=lambda: burn(0.05))
    clock = ThreadClock()
    clock.start()
    other.start()
    other.join()
    clock.stop()
    assert clock.total_ns >= 0
    quiet = min(measured(clock, lambda: time.sleep(0.01)) for _ in range(5))
    assert quiet < 0.01


def test_waiting_for_a_core_counts() -> None:
    """A rank whose core somebody else uses is slow, though its own CPU time is not more."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    says_and_spins = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", says_and_spins], stdout=subprocess.PIPE) as rival:
        try:
            assert rival.stdout is not None
            rival.stdout.readline()
            took = measured(ThreadClock(), lambda: burn(0.3))
        finally:
            rival.kill()
            os.sched_setaffinity(0, cores)
    assert took > 1.2 * 0.3


def _rank(rank: int, rendezvous: str) -> list[tuple[int, int]]:
    """Steps with an all-reduce, on which two ranks wait for the one that works longer."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(rendezvous, 3), rank=rank, world_size=3)
    clock, reports = ThreadClock(), []
    clock.start()
    for step in range(1, STEPS + 1):
        burn(WORK_S * (FACTOR if rank == SLOW else 1))
        dist.all_reduce(torch.ones(64))
        if step % STEPS_A_QUARTER == 0:
            clock.stop()
            reports.append((clock.total_ns, step))
            clock.start()
    dist.destroy_process_group()
    return reports


def test_the_rank_that_works_longer_is_named_and_those_that_wait_for_it_are_not() -> None:
    reports = run_ranks(3, _rank)
    spec = StragglerSpec(threshold=0.5, window_s=4.0)
    stragglers = Stragglers(spec, {rank: f"n{rank}" for rank in range(3)})
    told = []
    for number in range(STEPS // STEPS_A_QUARTER):
        for rank in range(3):
            stragglers.sample(rank, *reports[rank][number], now=float(number))
        told += stragglers.tick(float(number))
    assert [one.rank for one in told] == [SLOW]
    assert told[0].ratio > 2.0


class TestCollectives:
    """What NCCL's flight recorder is read as."""

    def entry(
        self, number: int, duration: float | None, state: str = "completed"
    ) -> dict[str, object]:
        return {"record_id": number, "duration_ms": duration, "state": state}

    def test_only_new_and_completed_ones_count(self) -> None:
        entries = [self.entry(1, 5.0), self.entry(2, 2.0), self.entry(3, 1.5)]
        entries.append(self.entry(4, None, state="started"))
        assert collectives_ms(entries, after=1) == (3.5, 3)
        assert collectives_ms(entries, after=3) == (0.0, 3)

    def test_without_durations_nothing_is_known(self) -> None:
        assert collectives_ms([self.entry(1, None), self.entry(2, 1.0)], after=0) == (None, 2)
