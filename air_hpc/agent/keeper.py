"""The task that Slurm started on a node, which outlives its agent.

An agent that is killed -9 or stopped says nothing, and where that befalls the last one that could
have asked Slurm for the requeue, the job runs on empty until its time limit. So the agent is a
child of the task:

    keeper      waits, without a word, a file or a socket; dies with nothing
      agent     ends the keeper with its own exit code
                killed by a signal            → the keeper becomes the node's stand-by
                stopped for STOPPED_S         → killed, then the same
                leaves with EXIT_STAND_BY     → the same: the run goes on without this node

`standby` says what a stand-by does. The agent dies with its keeper, as workers do with their agent,
so that whoever ends the task ends all of it. With one node there is nobody to stand by: the batch
script sees how the task ended.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import NoReturn

from air_hpc.session.process import IGNORED_SIGNALS, die_with_parent

EXIT_STAND_BY = 75
"""Of an agent that leaves while the attempt goes on. Never the exit code of a task."""
STOPPED_S = 45.0
"""After so long a stopped agent is killed. The coordinator gave its node up long before; of a
stopped coordinator the others wait for a lease first."""
TICK_S = 1.0
STAND_BY = "--stand-by"


def fork_agent() -> int | None:
    """Fork. None in the child, which is the agent; its pid in the keeper."""
    parent = os.getpid()
    blocked = {signal.SIGCHLD, *IGNORED_SIGNALS}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    pid = os.fork()
    if pid:
        return pid
    die_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return None


def keep(pid: int, *, stopped_s: float = STOPPED_S) -> tuple[int, str]:
    """Wait for the agent's end: its exit code, and what ended it, as text, where it was a signal.

    Signals of the job stay blocked: Slurm sends them to every process of the step, and the agent
    answers them. Time in which this process stood still too (a suspended job) does not count.
    """
    stopped, stood_s, last = False, 0.0, time.monotonic()
    while True:
        signal.sigtimedwait([signal.SIGCHLD], TICK_S)
        now = time.monotonic()
        stood_s += min(now - last, 2 * TICK_S) if stopped else 0.0
        last = now
        while True:
            changed, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not changed:
                break
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                stopped, stood_s = os.WIFSTOPPED(status), 0.0
            elif os.WIFSIGNALED(status):
                number = os.WTERMSIG(status)
                how = f"was killed by {signal.Signals(number).name}"
                if stopped:
                    how = f"stood still for {stood_s:.0f} s and was ended"
                return 128 + number, how
            else:
                return os.WEXITSTATUS(status), ""
        if stopped and stood_s >= stopped_s:
            os.kill(pid, signal.SIGKILL)


def become_stand_by(run_dir: str, why: str) -> NoReturn:
    """Go on as the node's stand-by, in this process. SIGTERM ends it: then the job is ending."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # what is pending is let go
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, *IGNORED_SIGNALS})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.execv(sys.executable, [sys.executable, "-m", "air_hpc.agent", STAND_BY, why, run_dir])


def parent_of(pid: int) -> int:
    """The parent of a process; 0 where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in brackets, may hold anything.
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
