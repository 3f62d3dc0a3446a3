"""What a node shows besides its devices: ports, disks, the shared file system, its clock.

The shared file system is tried with a file of this node's own in the run directory, written,
fsynced, read back and removed. That file's time is the file server's, so it also tells how far this
node's clock is from it. A file system that is full says nothing against this node; one that refuses
or hangs does. Each check may hang (NFS), and runs in a process that may be killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from air_hpc.errors import EnvironmentFailure
from air_hpc.probes.ports import free_ports
from air_hpc.probes.result import Check, nothing_to_say
from air_hpc.rundir.atomic import write_all

PROBE_PREFIX = ".probe-"
"""What the probe's file in the run directory is called, with the node's name."""
_PATTERN = bytes(range(256)) * 256
_FULL = {errno.ENOSPC, errno.EDQUOT}
_CLOCK_TICK_S = 0.02
"""A file's time is that of the kernel's last tick (at most 10 ms ago with HZ=100)."""
_PORTS = 2


@dataclass(frozen=True)
class HostAsked:
    """What the host's checks need to know. Floors as in config.spec.PreflightSpec."""

    node: str
    run_dir: str
    node_local_dir: str
    min_disk_bytes: int
    max_clock_skew_s: float | None


def check_ports(asked: HostAsked) -> Check:
    """Whether the ports that a rendezvous needs are to be had."""
    try:
        found = free_ports(_PORTS, asked.node)
    except EnvironmentFailure as failure:
        return Check("ports", False, 0, _PORTS, said=str(failure))
    return Check("ports", True, len(found), _PORTS, said=f"e.g. {found[0]}")


def check_local_disk(asked: HostAsked) -> Check:
    """Free space for caches on the node's own disk."""
    return _space("local_disk", Path(asked.node_local_dir), asked.min_disk_bytes)


def check_run_dir_write(asked: HostAsked) -> Check:
    """Write, fsync and read back a file in the run directory.

    No space left is told by `run_dir_space`, since no other node would have any.
    """
    name = "run_dir_write"
    began = time.monotonic()
    try:
        with _probe_file(asked) as fd:
            back = os.pread(fd, len(_PATTERN) + 1, 0)
    except OSError as error:
        said = f"{asked.run_dir}: {_errno(error)}"
        return Check(name, None if error.errno in _FULL else False, said=said)
    took = time.monotonic() - began
    if back != _PATTERN:
        said = f"{asked.run_dir}: read back other bytes than were written"
        return Check(name, False, said=said)
    return Check(name, True, round(took, 4), unit="s", said=f"{len(_PATTERN)} bytes and back")


def check_run_dir_space(asked: HostAsked) -> Check:
    """Free space in the run directory; a quota shows only when it is written to."""
    found = _space("run_dir_space", Path(asked.run_dir), asked.min_disk_bytes)
    try:
        with _probe_file(asked):
            return found
    except OSError as error:
        if error.errno in _FULL:
            said = f"{asked.run_dir}: {_errno(error)}"
            return Check(found.name, False, 0, found.floor, "bytes", said)
        return found


def check_clock(asked: HostAsked) -> Check:
    """This node's clock against the file server's: how far a fresh file's time lies outside the
    interval in which it was made."""
    name, limit_s = "clock", asked.max_clock_skew_s
    try:
        before = time.time()
        with _probe_file(asked) as fd:
            after = time.time()
            stamp = os.fstat(fd).st_mtime
    except OSError as error:
        return nothing_to_say(name, f"no file's time to compare with: {_errno(error)}")
    skew_s = clock_skew_s(before, stamp, after)
    where = "behind" if skew_s > 0 else "ahead of"
    said = f"this clock is {abs(skew_s):.2f} s {where} the file server's"
    ok = limit_s is None or abs(skew_s) <= limit_s
    return Check(name, ok, round(skew_s, 3), limit_s, "s", said if skew_s else "")


def clock_skew_s(before: float, stamp: float, after: float) -> float:
    """By how much a foreign clock that gave `stamp` between our `before` and `after` is ahead of
    ours at the least (negative: behind); 0 where the two may agree."""
    if stamp > after:
        return stamp - after
    if stamp < before - _CLOCK_TICK_S:
        return stamp - before
    return 0.0


HOST_CHECKS: dict[str, Callable[[HostAsked], Check]] = {
    "ports": check_ports,
    "local_disk": check_local_disk,
    "run_dir_write": check_run_dir_write,
    "run_dir_space": check_run_dir_space,
    "clock": check_clock,
}
"""In the order they are made: what may hang comes last."""


def _space(name: str, folder: Path, floor: int) -> Check:
    """Free bytes for this user where `folder` is, or would be made."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Check(name, False, None, floor, "bytes", f"{place}: {_errno(error)}")
    said = f"{free / 2**30:.1f} GiB free at {place}, {floor / 2**30:.1f} asked for"
    return Check(name, free >= floor, free, floor, "bytes", said)


@contextlib.contextmanager
def _probe_file(asked: HostAsked) -> Iterator[int]:
    """A fresh, written and fsynced file of this node in the run directory; removed afterwards."""
    path = Path(asked.run_dir) / f"{PROBE_PREFIX}{asked.node}"
    with contextlib.suppress(FileNotFoundError):  # of a probe that was killed
        path.unlink()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        write_all(fd, _PATTERN)
        os.fsync(fd)
        yield fd
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            path.unlink()


def _errno(error: OSError) -> str:
    code = errno.errorcode.get(error.errno or 0, "")
    return f"{code} {error.strerror}".strip() or str(error)
