"""Whether a process that a ledger names is still the same process.

A pid alone means nothing: it is used again, and another machine has another one. A process is known
by its pid, its start time and the boot it started in (`/proc/<pid>/stat`, field 22, in clock ticks
since boot: proc(5)). What another machine runs cannot be seen from here, and is then unknown.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ProcessIdentity:
    """One process of one boot of one machine. `start_ticks` is None where it was not recorded."""

    pid: int
    host: str | None = None
    boot_id: str | None = None
    start_ticks: int | None = None

    @classmethod
    def of(cls, pid: int | None = None) -> ProcessIdentity:
        """The identity of a process of this machine (default: of this one)."""
        chosen = os.getpid() if pid is None else pid
        return cls(chosen, socket.gethostname(), boot_id(), start_ticks(chosen))

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> ProcessIdentity | None:
        """What an event recorded (`pid`, `host`, `boot_id`, `pid_start`), or None without a pid."""
        pid, start = facts.get("pid"), facts.get("pid_start")
        if not isinstance(pid, int) or isinstance(pid, bool) or pid <= 1:
            return None
        return cls(
            pid,
            _text(facts.get("host")),
            _text(facts.get("boot_id")),
            int(start) if isinstance(start, int | float) else None,
        )

    def to_facts(self) -> dict[str, Any]:
        """The facts that `from_facts` reads."""
        return {
            "pid": self.pid,
            "host": self.host,
            "boot_id": self.boot_id,
            "pid_start": self.start_ticks,
        }

    def alive(self) -> bool | None:
        """True: it runs. False: it has ended. None: it is another machine's, nothing is known."""
        here = boot_id()
        if self.boot_id is not None and here is not None and self.boot_id != here:
            same_host = self.host is not None and self.host == socket.gethostname()
            return False if same_host else None
        if self.boot_id is None and self.host is not None and self.host != socket.gethostname():
            return None
        ticks = start_ticks(self.pid)
        if ticks is None:
            return False
        return self.start_ticks is None or ticks == self.start_ticks


def boot_id() -> str | None:
    """This boot's id, or None where the kernel tells none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is none or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may hold anything: the fields begin after the last one.
    fields = stat.rpartition(")")[2].split()
    if not fields or fields[0] in ("Z", "X"):
        return None
    return int(fields[19])


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
