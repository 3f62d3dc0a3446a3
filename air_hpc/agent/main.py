"""`python -m air_hpc.agent RUN_DIR`: one srun task a node (or the only one of a local run).

Under Slurm the task keeps the agent as a child of its own (`keeper`).

Handlers come before everything else, before any import that takes long: Slurm signals every process
of the step, and a signal without a handler kills. A handler only writes a byte into a pipe, which
the loop of `attempt` reads.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
import traceback

from air_hpc.agent import keeper

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


class SignalPipe:
    """Signals as bytes in a pipe: the only thing a handler does is to set a flag."""

    def __init__(self) -> None:
        self.fd, self._write_end = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_end, False)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        for number in (signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def wait(self, timeout_s: float) -> None:
        """Wait for a signal, at most `timeout_s`; it stays to be read."""
        select.select([self.fd], [], [], timeout_s)

    def read(self) -> list[str]:
        """The names of stop signals that arrived, in order."""
        try:
            data = os.read(self.fd, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(byte).name for byte in data if byte in STOP_SIGNALS]


def say(text: str) -> None:
    """One line to the batch log, with the time and the node.

    Lost without harm where nobody reads it any more: a node that Slurm gave up has no slurmstepd.
    """
    node = os.environ.get("SLURMD_NODENAME", "local")
    stamp = time.strftime("%H:%M:%S")
    with contextlib.suppress(OSError):
        print(f"{stamp} [air_hpc {node}] {text}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the agent of this node, kept or not; returns the task's exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == [keeper.STAND_BY]:
        return _stand_by(arguments[1:])
    if "SLURM_JOB_ID" in os.environ:
        step = os.getppid()
        pid = keeper.fork_agent()
        if pid is not None:
            return _keep(pid, step, arguments)
    return _run(arguments)


def _keep(pid: int, step: int, arguments: list[str]) -> int:
    exit_code, how = keeper.keep(pid)
    stands_by = how or exit_code == keeper.EXIT_STAND_BY
    alone = os.environ.get("SLURM_STEP_NUM_NODES", "1") == "1"
    # Where its slurmstepd is gone, Slurm has given up the node: nothing of ours may stay there.
    if stands_by and arguments and not alone and os.getppid() == step:
        keeper.become_stand_by(arguments[-1], how or "takes no part any more")
    return 1 if exit_code == keeper.EXIT_STAND_BY else exit_code


def _stand_by(arguments: list[str]) -> int:
    from air_hpc.agent import standby

    try:
        standby.main(arguments)
    except Exception as error:
        say(f"standing by failed: {type(error).__name__}: {error}")
    return 1


def _run(arguments: list[str]) -> int:
    """The agent itself."""
    signals = SignalPipe()
    from air_hpc.agent.attempt import run_agent
    from air_hpc.errors import EXIT_ENVIRONMENT, AirHpcError

    try:
        return run_agent(arguments, signals)
    except AirHpcError as error:
        say(f"{type(error).__name__}: {error}")
        return error.exit_code
    except OSError as error:
        say(f"the agent failed: {error}")
        return EXIT_ENVIRONMENT
    except Exception:
        say("the agent failed; this is a defect of air_hpc:")
        traceback.print_exc()
        return EXIT_ENVIRONMENT
