"""Runs a node's checks from outside, under deadlines: what hangs is killed and named.

A driver or a file system that hangs must hang a process that may be given up, never the agent. The
host's checks and the devices' are processes of their own, so that one cannot hide the other. Each
tells what it begins (`air_hpc.probes.node`); one check that lasts longer than `check_timeout_s`, or
all of them longer than `timeout_s`, and the process is killed with its group: the check that was
being made has failed, those that it kept from being made are not told. A process in an
uninterruptible wait does not die of SIGKILL; nobody waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from air_hpc.probes.devices import Device
from air_hpc.probes.node import Asked
from air_hpc.probes.result import Check, nothing_to_say
from air_hpc.session.process import kill_group, spawn

POLL_S = 0.02
REAP_S = 0.2
"""What a killed process is given to end; one in an uninterruptible wait does not."""


@dataclass(frozen=True)
class Findings:
    """What a node's checks found. `devices` is None where they were not asked for or not told."""

    checks: tuple[Check, ...]
    devices: tuple[Device, ...] | None = None
    seconds: float = 0.0


class NodeProbe:
    """The checks of one node, being made. Poll it until it answers; close it in any case."""

    def __init__(
        self,
        asked: Sequence[Asked],
        *,
        timeout_s: float,
        check_timeout_s: float,
        environ: Mapping[str, str],
        python: str = sys.executable,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the checks; raises OSError when no process can be started."""
        self._clock = clock
        self._began = clock()
        self._timeout_s, self._check_timeout_s = timeout_s, check_timeout_s
        self._children: list[_Child] = []
        try:
            for each in asked:
                self._children.append(_Child(each, python, environ))
        except OSError:
            self.close()
            raise

    def poll(self) -> Findings | None:
        """The findings, or None while checks are being made within their deadlines."""
        for child in self._children:
            child.listen(self._clock())
            now = self._clock()
            if child.over:
                continue
            if now - self._began > self._timeout_s:
                child.cut(f"not done {self._timeout_s:g} s after the start of all checks")
            elif child.begun_at is not None and now - child.begun_at > self._check_timeout_s:
                child.cut(f"not done within {self._check_timeout_s:g} s")
        if not all(child.over for child in self._children):
            return None
        told = [child.devices for child in self._children if child.devices is not None]
        return Findings(
            tuple(check for child in self._children for check in child.checks),
            told[0] if told else None,
            round(self._clock() - self._began, 3),
        )

    def close(self) -> None:
        """Kill what is left."""
        for child in self._children:
            child.kill()

    def wait(self) -> Findings:
        """The findings, at the latest when the time is over (for a verb; an agent polls)."""
        while (found := self.poll()) is None:
            time.sleep(POLL_S)
        self.close()
        return found


class _Child:
    """One process of checks and what it has told."""

    def __init__(self, asked: Asked, python: str, environ: Mapping[str, str]) -> None:
        self.checks: list[Check] = []
        self.devices: tuple[Device, ...] | None = None
        self.begun: str | None = None
        self.begun_at: float | None = None
        self.over = False
        self._asked = asked
        self._words = ""
        self._buffer = b""
        self._fd, theirs = os.pipe()
        try:
            os.set_blocking(self._fd, False)
            argv = [python, "-m", "air_hpc.probes.node", asked.to_json()]
            self._process: subprocess.Popen[bytes] = spawn(argv, environ, theirs)
        except OSError:
            os.close(self._fd)
            raise
        finally:
            os.close(theirs)

    def listen(self, now: float) -> None:
        """Take in what it has told."""
        while not self.over:
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                return
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                self._take(line, now)
            if not data:
                self._ended(f"its process ended: {self._words or 'without a word'}")

    def _take(self, line: bytes, now: float) -> None:
        try:
            told: dict[str, Any] = json.loads(line)
            if "begun" in told:
                self.begun, self.begun_at = str(told["begun"]), now
            elif "check" in told:
                self.checks.append(Check.from_json(told["check"]))
                self.begun, self.begun_at = None, None
            elif "devices" in told:
                self.devices = tuple(Device(**device) for device in told["devices"])
            elif "done" in told:
                self._ended("")
        except (ValueError, TypeError, KeyError):
            self._words = line.decode(errors="replace").strip() or self._words

    def cut(self, why: str) -> None:
        """Give it up: the check it was at has failed."""
        self.kill()
        if self.begun is None:
            self._ended(f"the checks of the {self._asked.group} were {why}")
            return
        self.checks.append(Check(self.begun, False, said=f"hangs: {why}"))
        self._ended(f"not made, since {self.begun} hangs")

    def _ended(self, why: str) -> None:
        self.over = True
        told = {check.name for check in self.checks}
        self.checks += [nothing_to_say(n, why) for n in self._asked.names if n not in told and why]

    def kill(self) -> None:
        """SIGKILL to the process and its children; it is waited for a moment only."""
        if self._fd >= 0:
            kill_group(self._process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(REAP_S)
            os.close(self._fd)
            self._fd = -1
