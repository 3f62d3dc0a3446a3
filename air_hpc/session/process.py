"""What every process that an agent starts becomes first, however it is started."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence

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


def spawn(
    argv: Sequence[str],
    environ: Mapping[str, str],
    output_fd: int,
    *,
    stdin: int = subprocess.DEVNULL,
    inherited_fds: Sequence[int] = (),
    affinity: Collection[int] | None = None,
) -> subprocess.Popen[bytes]:
    """A child with the job's signals ignored, in its own group, that dies with this process.

    The signals are blocked over the fork, so that none meets a handler in the child or a default
    action between fork and exec: a pending one is discarded when it becomes ignored.
    """
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)

    def prepare() -> None:
        become_worker(parent, affinity)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        return subprocess.Popen(
            list(argv),
            env=dict(environ),
            stdin=stdin,
            stdout=output_fd,
            stderr=output_fd,
            pass_fds=inherited_fds,
            start_new_session=True,
            preexec_fn=prepare,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill_group(pid: int) -> None:
    """SIGKILL to a process group, if it is still there."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
