"""What every worker of a node is doing, found out within a few seconds and written to a file.

Asked for when a worker is overdue. Of each worker: the state of its process, its Python stacks (by
py-spy where it is installed and may attach, else by the faulthandler in the worker, on a signal),
and what its own thread answers (`session.watch`). All workers at once, each in a thread of its own:
a process that is stopped, or a disk that does not answer, holds up nobody else.

`attempts/<k>/<g>/stacks-<node>.txt` gets all of it; the reports for the coordinator are what
`recovery.hang.blame` needs, about a kilobyte a rank.

What may go wrong: none of the ways gives a stack (a stopped process where py-spy may not attach);
the file says so for that worker. The file cannot be written: the reports go out all the same.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from air_hpc.recovery.hang import GONE, STOPPED, GroupReport, RankReport
from air_hpc.rundir.atomic import write_atomic
from air_hpc.session.page import begin_dump, read_dump
from air_hpc.session.watch import DUMP_SIGNAL

DEADLINE_S = 5.0
"""For an inspection in all, from its start to its reports."""
PY_SPY_S = 3.0
ANSWER_S = 3.0
"""For the worker's own thread to answer. It takes milliseconds, but for a starved machine."""
DUMP_S = 1.5
_POLL_S = 0.05
_MOST_BYTES_A_WORKER = 64 * 1024
_MOST_BYTES = 1024 * 1024
_LONGEST_TOP = 200
_FRAMES_IN_TOP = 3
_LONGEST_LABEL = 80

_FRAME = re.compile(
    r"^    (?P<name>\S.*) \((?P<file>[^()]*?):(?P<line>\d+)\)$"
    r'|^  File "(?P<at>[^"]*)", line (?P<number>\d+) in (?P<called>.+)$',
    re.M,
)
"""A frame as py-spy writes it, or as the faulthandler does."""


@dataclass(frozen=True)
class Subject:
    """A worker to look at. `dump_fd` is its page's file (-1: none), the inspection's to close."""

    rank: int
    pid: int
    phase: str
    begun: int
    done: int
    for_s: float
    limit_s: float
    dump_fd: int


class Inspection:
    """One inspection of a node's workers. `poll` never blocks."""

    def __init__(
        self,
        node: str,
        subjects: Sequence[Subject],
        path: Path,
        *,
        py_spy: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start. The caller has put the question to the workers, and brings their answers."""
        self._node = node
        self._path = path
        self._py_spy = py_spy
        self._clock = clock
        self._deadline = clock() + DEADLINE_S
        self._looks = [_Look(subject) for subject in subjects]
        self._threads = [
            threading.Thread(target=self._look, args=(look,), daemon=True) for look in self._looks
        ]
        self._writer = threading.Thread(target=self._finish, daemon=True)
        for thread in (*self._threads, self._writer):
            thread.start()

    def heard(self, rank: int, answer: dict[str, Any]) -> None:
        """A worker's own thread answered."""
        for look in self._looks:
            if look.subject.rank == rank:
                look.answer = answer
                look.answered.set()

    def poll(self) -> list[RankReport] | None:
        """The reports, once the file is written or time is up; None before."""
        if self._writer.is_alive() and self._clock() < self._deadline:
            return None
        return [look.report(self._node) for look in self._looks]

    def _look(self, look: _Look) -> None:
        subject = look.subject
        try:
            look.state, catches_dump = process_state(subject.pid)
            if look.state in GONE:
                return
            if self._py_spy is not None:
                look.stacks = _py_spy_stacks(self._py_spy, subject.pid)
            if not look.stacks and catches_dump and subject.dump_fd >= 0:
                look.stacks = _dumped_stacks(subject)
            # One that is stopped cannot answer, and one that does not catch the signal has not got
            # as far as its session.
            if catches_dump and look.state not in STOPPED:
                look.answered.wait(ANSWER_S)
        finally:
            if subject.dump_fd >= 0:
                os.close(subject.dump_fd)

    def _finish(self) -> None:
        for thread in self._threads:
            thread.join(max(0.0, self._deadline - _POLL_S - self._clock()))
        text = "\n".join(look.text()[:_MOST_BYTES_A_WORKER] for look in self._looks)
        with contextlib.suppress(OSError):
            write_atomic(self._path, text.encode(errors="replace")[:_MOST_BYTES])


class _Look:
    """What is found out about one worker. Each field has one writer."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.state: str | None = None
        self.stacks = ""
        self.answer: dict[str, Any] = {}
        self.answered = threading.Event()

    def report(self, node: str) -> RankReport:
        subject = self.subject
        return RankReport(
            rank=subject.rank,
            node=node,
            state=self.state,
            answered=self.answered.is_set(),
            phase=subject.phase,
            begun=subject.begun,
            done=subject.done,
            groups=tuple(
                GroupReport(
                    str(group["group"])[:_LONGEST_LABEL],
                    group["sequence"],
                    group["in_flight"] and str(group["in_flight"])[:_LONGEST_LABEL],
                )
                for group in self._groups()
            ),
            top=top_of(self.stacks) or top_of(str(self.answer.get("stacks", ""))),
            for_s=subject.for_s,
            limit_s=subject.limit_s,
        )

    def _groups(self) -> list[dict[str, Any]]:
        """A packet that was too long has text in the place of the list."""
        groups = self.answer.get("groups")
        return groups if isinstance(groups, list) else []

    def text(self) -> str:
        """For the file."""
        subject = self.subject
        lines = [
            f"=== rank {subject.rank}, pid {subject.pid}, state {self.state or 'unknown'}: phase "
            f"{subject.phase}, step {subject.begun} begun, {subject.done} done, "
            f"silent for {subject.for_s:.1f} s (limit {subject.limit_s:.1f} s) ==="
        ]
        if self.answered.is_set():
            for group in self._groups():
                waits = group["in_flight"]
                lines.append(
                    f"group {group['group']}: at #{group['sequence']}, "
                    f"{f'waits in {waits}' if waits else 'waits in nothing'}; "
                    f"newest: {', '.join(group['newest'])}"
                )
        else:
            lines.append("the worker's own thread did not answer")
        stacks = self.stacks or str(self.answer.get("stacks", "")) or "no stack could be had"
        return "\n".join([*lines, stacks.rstrip(), ""])


def find_py_spy() -> str | None:
    """The py-spy of this environment, or one on the PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def process_state(pid: int) -> tuple[str, bool]:
    """(the state's letter, whether the process catches DUMP_SIGNAL): proc(5), /proc/pid/status.

    A signal that is not caught would end a worker that has not got as far as its session.
    ("X", False) where there is no such process any more.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "X", False
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    caught = int(fields.get("SigCgt", "0").strip(), 16)
    return fields["State"].strip()[:1], bool(caught >> (DUMP_SIGNAL - 1) & 1)


def _py_spy_stacks(py_spy: str, pid: int) -> str:
    """The stacks as py-spy reads them from outside; empty where it may not attach or fails.

    It is told not to stop the process: that would wait for one that is stopped already.
    """
    try:
        done = subprocess.run(
            [py_spy, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=PY_SPY_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    text = done.stdout.decode(errors="replace")
    return text if done.returncode == 0 and "Thread " in text else ""


def _dumped_stacks(subject: Subject) -> str:
    """The stacks that the worker's faulthandler writes on a signal; empty where it writes none."""
    with contextlib.suppress(OSError):
        begin_dump(subject.dump_fd)
        os.kill(subject.pid, DUMP_SIGNAL)
    before, until = b"", time.monotonic() + DUMP_S
    while time.monotonic() < until:
        time.sleep(_POLL_S)
        data = read_dump(subject.dump_fd, _MOST_BYTES_A_WORKER)
        if data and data == before:  # it writes line by line: whole once it grows no more
            break
        before = data
    return before.decode(errors="replace")


def top_of(stacks: str) -> str | None:
    """The innermost frames of the main thread, innermost first, from any of the three ways."""
    blocks = re.split(r"^(?=(?:Current thread|Thread) )", stacks, flags=re.M)
    blocks = [block for block in blocks if block.startswith(("Thread ", "Current thread "))]
    if not blocks:
        return None
    # py-spy and the worker's own thread say which is the main one; a faulthandler's is the one
    # that took the signal, or the last (it lists the newest thread first).
    main = next((b for b in blocks if "MainThread" in b.partition("\n")[0]), None)
    current = next((b for b in blocks if b.startswith("Current thread")), blocks[-1])
    frames = [found.groupdict() for found in _FRAME.finditer(main or current)]
    names = [
        f"{f['name'] or f['called']} ({'/'.join(Path(f['file'] or f['at']).parts[-2:])}:"
        f"{f['line'] or f['number']})"
        for f in frames[:_FRAMES_IN_TOP]
    ]
    return " < ".join(names)[:_LONGEST_TOP] or None
