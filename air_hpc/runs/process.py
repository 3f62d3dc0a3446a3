"""Whether a process that a ledger names is still the same process.

A pid alone means nothing: it is used again, and another machine has another one. A process is known
by its pid, its start time and the boot it started in. What another machine runs cannot be seen from
here, and is then unknown.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TOLERANCE_S = 2.0
"""The boot time that start times are counted from is told in whole seconds (proc(5), btime)."""


@dataclass(frozen=True)
class ProcessIdentity:
    """One process of one boot of one machine; `started` is in seconds since the epoch.

    What was not recorded is None.
    """

    pid: int
    started: float | None = None
    boot_id: str | None = None
    host: str | None = None

    @classmethod
    def of(cls, pid: int | None = None) -> ProcessIdentity:
        """The identity of a process of this machine (default: of this one)."""
        chosen = os.getpid() if pid is None else pid
        return cls(chosen, start_time(chosen), boot_id(), socket.gethostname())

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> ProcessIdentity | None:
        """What an event recorded (`pid`, `pid_start` or `pid_create_time`, `boot_id`, `host`)."""
        pid = facts.get("pid")
        start = facts.get("pid_start", facts.get("pid_create_time"))
        if not isinstance(pid, int) or isinstance(pid, bool) or pid <= 1:
            return None
        return cls(
            pid,
            float(start) if isinstance(start, int | float) else None,
            _text(facts.get("boot_id")),
            _text(facts.get("host")),
        )

    def to_facts(self) -> dict[str, Any]:
        """The facts that `from_facts` reads."""
        return {
            "pid": self.pid,
            "pid_start": self.started,
            "boot_id": self.boot_id,
            "host": self.host,
        }

    def alive(self) -> bool | None:
        """True: it runs. False: it has ended. None: it may be another machine's."""
        same_host = self.host is not None and self.host == socket.gethostname()
        if self.boot_id is not None and self.boot_id != boot_id():
            return False if same_host else None
        if self._runs_here():
            return True
        return False if self.boot_id is not None or same_host else None

    def _runs_here(self) -> bool:
        started = start_time(self.pid)
        if started is None:
            return False
        return self.started is None or abs(started - self.started) <= _TOLERANCE_S


def boot_id() -> str | None:
    """This boot's id, or None where the kernel tells none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None


def start_time(pid: int) -> float | None:
    """When a process started (seconds since the epoch); None for none, and for a zombie.

    From `/proc/<pid>/stat`, field 22, in clock ticks since boot: proc(5).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may hold anything: the fields begin after the last one.
    fields = stat.rpartition(")")[2].split()
    if not fields or fields[0] in ("Z", "X"):
        return None
    return _boot_time() + int(fields[19]) / os.sysconf("SC_CLK_TCK")


@cache
def _boot_time() -> int:
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith("btime "):
            return int(line.split()[1])
    return 0


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
