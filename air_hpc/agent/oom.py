"""How often the kernel's oom-killer has struck in this process's memory group.

A worker that the oom-killer ended looks like any `kill -9`. The counter of its control group tells
them apart: Slurm (with task/cgroup), containers and systemd give the agent and its workers a group
of their own. Where there is none, or it cannot be read, the answer is None: not known.

cgroup v2 counts in `memory.events` (of the group and all below it), v1 in `memory.oom_control`
(Linux 4.13 and later; Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst).
"""

from __future__ import annotations

from pathlib import Path

_COUNTER = "oom_kill"


def oom_kills(
    proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """The count of the memory group that `proc` names; None where it cannot be known."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if "memory" in controllers.split(","):
            return _first(mount / "memory", path, "memory.oom_control")
    for line in lines:
        if line.startswith("0::"):
            return _first(mount, line.removeprefix("0::"), "memory.events")
    return None


def _first(root: Path, path: str, name: str) -> int | None:
    """The counter of the group, or of the mount's root: a container sees its own group there."""
    for folder in (root / path.lstrip("/"), root):
        count = _read(folder / name)
        if count is not None:
            return count
    return None


def _read(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == _COUNTER:
                return int(value)
    except (OSError, ValueError):
        pass
    return None
