"""What every process that an agent starts becomes first, however it is started."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection

IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
"""Slurm sends these to every process of a step; the agent alone answers them."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int) -> None:
    """Be killed when the thread that started this process ends; also when it ended just before."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def become_worker(parent_pid: int, affinity: Collection[int] | None) -> None:
    """Die with the parent, ignore the job's signals, stay on the given CPUs."""
    die_with_parent(parent_pid)
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if affinity:
        os.sched_setaffinity(0, affinity)
