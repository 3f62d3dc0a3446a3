"""The process table, and ending a set of processes so that none escapes.

A pid alone names nothing: it is used again. A process here is a pid with its start time (clock
ticks after boot, field 22 of /proc/PID/stat, proc(5)), and a signal goes through a pidfd that was
opened before the start time was compared.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

Table = dict[int, "Process"]
MAX_LISTS = 20
STANDING = "TtZXD"  # states in which a process runs none of its own code (proc(5))


@dataclass(frozen=True)
class Process:
    """One process as /proc showed it."""

    pid: int
    start: int
    name: str = ""
    state: str = "R"
    parent: int = 0
    session: int = 0

    def command(self) -> list[str]:
        """Its argument list; empty if it is gone."""
        return [os.fsdecode(w) for w in _read(self.pid, "cmdline").split(b"\0") if w]

    def environment(self) -> dict[str, str]:
        """The environment that it was started with; empty if it is gone or cleaned it."""
        words = (w.partition(b"=") for w in _read(self.pid, "environ").split(b"\0"))
        return {os.fsdecode(name): os.fsdecode(value) for name, _, value in words if name}

    def open_files(self) -> Iterator[str]:
        """The targets of its open file descriptors."""
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{self.pid}/fd"):
                with contextlib.suppress(OSError):
                    yield os.readlink(entry.path)

    def alive(self) -> bool:
        """Whether this very process still is, and is no zombie."""
        now = read_process(self.pid)
        return now is not None and now.start == self.start and now.state not in "ZX"

    def send(self, signum: signal.Signals) -> None:
        """Signal this very process; nothing happens if it is gone or its pid is another's."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                if self.alive():
                    signal.pidfd_send_signal(handle, signum)
            finally:
                os.close(handle)


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def read_process(pid: int) -> Process | None:
    """The process with this pid now, or None."""
    head, closed, tail = os.fsdecode(_read(pid, "stat")).rpartition(")")
    if not closed:
        return None
    fields = tail.split()
    return Process(
        pid=pid,
        start=int(fields[19]),
        name=head.partition("(")[2],
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
    )


def process_table(look_at: Callable[[Process], None] = lambda process: None) -> Table:
    """All processes of this machine now, by pid; `look_at` gets each as soon as it is read.

    The list is taken again until it holds no new pid: one list alone is old before it is read,
    and misses every process of a chain in which each starts the next and ends.
    """
    table: Table = {}
    seen: set[str] = set()
    for _ in range(MAX_LISTS):
        new = [name for name in os.listdir("/proc") if name.isdigit() and name not in seen]
        if not new:
            break
        seen.update(new)
        for name in new:
            if process := read_process(int(name)):
                table[process.pid] = process
                look_at(process)
    return table


def with_descendants(table: Table, roots: Iterable[Process]) -> set[Process]:
    """`roots` and every child, grandchild ... of theirs in `table`."""
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    found: set[Process] = set()
    to_visit = list(roots)
    while to_visit:
        process = to_visit.pop()
        if process not in found:
            found.add(process)
            to_visit.extend(children.get(process.pid, ()))
    return found


def kill_all(
    find: Callable[[Table], Iterable[Process]],
    spot: Callable[[Process], bool] = lambda process: False,
    timeout_s: float = 60,
) -> tuple[set[Process], set[Process]]:
    """Kill -9 every process that `find` picks from the table: (those found, those still alive).

    All are stopped first, and looked for again until all stand still and none is new: a process
    that forks while it is being killed loses its child too. `spot` picks one without the table:
    such a process is stopped in the moment it is read, which catches chains of short-lived ones.
    This process itself is left out, so a task may end its own node.
    """
    deadline = time.monotonic() + timeout_s
    known: dict[tuple[int, int], Process] = {}

    def stop(process: Process) -> None:
        if process.pid != os.getpid():
            process.send(signal.SIGSTOP)
            known[process.pid, process.start] = process

    def stop_if_spotted(process: Process) -> None:
        if (process.pid, process.start) not in known and spot(process):
            stop(process)

    quiet_rounds = 0
    while quiet_rounds < 2:
        count = len(known)
        found = [p for p in find(process_table(stop_if_spotted)) if p.pid != os.getpid()]
        for process in found:
            if (process.pid, process.start) not in known:
                stop(process)
        still = all(process.state in STANDING for process in found)
        quiet_rounds = quiet_rounds + 1 if len(known) == count and still else 0
        if time.monotonic() > deadline:
            break
    # Children before their parents: a stopped process whose parent dies first is sent SIGHUP and
    # SIGCONT by the kernel, and an srun would use the moment to kill its tasks on other nodes.
    for process in sorted(known.values(), key=lambda p: (p.start, p.pid), reverse=True):
        process.send(signal.SIGKILL)
    while alive := {process for process in known.values() if process.alive()}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return set(known.values()), alive
