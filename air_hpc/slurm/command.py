"""Runs one of Slurm's commands: no shell, a deadline, a scrubbed environment, bounded retries.

Reading commands are tried again, with growing pauses, while the failure is one a busy controller
gives (a socket that timed out, a controller that cannot be contacted) and the deadline allows.
Commands that change something are run once: whether to try again is for the caller to decide,
after looking. A command failed when its exit status is not zero, never because of text on stderr.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from air_hpc.errors import EnvironmentFailure
from air_hpc.slurm.environment import for_parsing

DEFAULT_TIMEOUT_S = 60.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0

_TRANSIENT = (
    "socket timed out",
    "unable to contact slurm controller",
    "connection refused",
    "connection reset",
    "connection timed out",
    "transport endpoint is not connected",
    "resource temporarily unavailable",
    "backup controller in standby",
    "zero bytes were transmitted or received",
    "unable to connect to database",
    "slurm_persist_conn_open_without_init",
)


@dataclass(frozen=True)
class CommandResult:
    """What a command printed, with exit status zero."""

    argv: tuple[str, ...]
    stdout: str
    stderr: str


class CommandFailure(EnvironmentFailure):
    """A Slurm command exited with a status that is not zero; `stderr` is what it said."""

    def __init__(self, argv: Sequence[str], returncode: int, stderr: str) -> None:
        self.argv = tuple(argv)
        self.returncode = returncode
        self.stderr = stderr
        said = " ".join(stderr.split()) or "nothing on stderr"
        super().__init__(
            f"{argv[0]} failed with exit status {returncode}: {said}",
            tried=" ".join(argv),
            next_step=_advice(argv[0], stderr),
        )

    @property
    def transient(self) -> bool:
        """Whether trying again may help: a busy controller, or the command was killed.

        Slurm signals every process of a step, a command that an agent is running among them.
        """
        text = self.stderr.lower()
        return self.returncode < 0 or any(sign in text for sign in _TRANSIENT)


def _advice(name: str, stderr: str) -> str:
    if "configuration source" in stderr or "unable to read" in stderr.lower():
        return "use a machine that is part of a Slurm cluster, set SLURM_CONF, or use cluster=local"
    return f"run `{name}` by hand; if it fails the same way, ask the site's support"


class CommandTimeout(EnvironmentFailure):
    """A Slurm command did not answer within its deadline. It may still have had its effect."""

    def __init__(self, argv: Sequence[str], timeout_s: float) -> None:
        self.argv = tuple(argv)
        super().__init__(
            f"{argv[0]} did not answer within {timeout_s:g} s",
            tried=" ".join(argv),
            next_step="try again later, or raise cluster.submit_timeout_s",
        )


def run_once(
    argv: Sequence[str],
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    environ: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> CommandResult:
    """Run `argv` once. `environ` is taken as it is (default: scrubbed, for parsing).

    Raises CommandFailure, CommandTimeout, and EnvironmentFailure where the command is missing.
    """
    try:
        done = subprocess.run(
            list(argv),
            env=dict(for_parsing(os.environ) if environ is None else environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=timeout_s,
            check=False,
            cwd=cwd,
        )
    except subprocess.TimeoutExpired:
        raise CommandTimeout(argv, timeout_s) from None
    except OSError as error:
        why = error.strerror or str(error)
        if isinstance(error, FileNotFoundError):
            why = "no such command is installed here, or PATH does not lead to it"
        raise EnvironmentFailure(
            f"{argv[0]} could not be started: {why}",
            tried=" ".join(argv),
            next_step="load the site's Slurm module, or use cluster=local",
        ) from None
    if done.returncode != 0:
        raise CommandFailure(argv, done.returncode, done.stderr.strip() or done.stdout.strip())
    return CommandResult(tuple(argv), done.stdout, done.stderr)


def read(
    argv: Sequence[str],
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    environ: Mapping[str, str] | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """What a reading command prints, tried again on transient failures until `timeout_s` is over.

    Raises as `run_once`, with the last failure.
    """
    deadline = clock() + timeout_s
    pause_s = FIRST_PAUSE_S
    while True:
        left_s = deadline - clock()
        try:
            return run_once(argv, timeout_s=max(left_s, 0.1), environ=environ).stdout
        except CommandFailure as failure:
            wait_s = pause_s * random.uniform(0.75, 1.25)
            if not failure.transient or clock() + wait_s >= deadline:
                raise
            sleep(wait_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
