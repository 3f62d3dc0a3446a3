"""The silence of a node's workers: whose phase lasts too long, and what all of them are doing then.

Looks at the workers' pages (three loads each, at most ten times a second) and runs at most one
inspection at a time (`agent.inspect`). What comes of an overdue worker, the coordinator decides.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from air_hpc.agent.inspect import Inspection, Subject, find_py_spy
from air_hpc.config.spec import HangSpec
from air_hpc.recovery.hang import Overdue, PhaseDurations, PhaseWatch, RankReport
from air_hpc.session.messages import INSPECT, encode
from air_hpc.session.page import NONE, Word

if TYPE_CHECKING:
    from air_hpc.agent.workers import Worker

LOOK_INTERVAL_S = 0.1


def stacks_path(generation_dir: Path, node: str) -> Path:
    """Where the stacks of a node's workers are written when one of them hangs."""
    return generation_dir / f"stacks-{node}.txt"


class SilenceWatch:
    """The clocks of a node's workers in one generation. `now` is in seconds of one clock."""

    def __init__(self, node: str, path: Path, hang: HangSpec, durations: PhaseDurations) -> None:
        self._node = node
        self._path = path
        self._hang = hang
        self._durations = durations
        self._watches: dict[int, PhaseWatch] = {}
        self._next_look = float("-inf")
        self._stalled_s = 0.0
        self._inspection: Inspection | None = None
        self._question = 0
        self.overdue: list[Overdue] = []
        """Who was overdue at the last look."""

    def look(self, workers: Iterable[Worker], now: float, stalled_s: float = 0.0) -> None:
        """Look for signs of progress; call it at every turn of the agent's loop.

        `stalled_s`: how long the agent itself stood still since the turn before.
        """
        self._stalled_s += stalled_s
        if now < self._next_look:
            return
        self._next_look = now + LOOK_INTERVAL_S
        stalled_s, self._stalled_s = self._stalled_s, 0.0
        late = [self._look_at(w, now, stalled_s) for w in workers if w.exit_status is None]
        self.overdue = [overdue for overdue in late if overdue is not None]

    def inspect(self, workers: Iterable[Worker], now: float) -> None:
        """Begin to find out what every worker is doing; nothing while that is under way."""
        if self._inspection is not None:
            return
        self._question += 1
        question = encode(INSPECT, {"question": self._question})
        subjects = []
        for worker in workers:
            if worker.exit_status is not None:
                continue
            subjects.append(self._subject(worker, now))
            with contextlib.suppress(OSError):  # one that has closed its end does not answer
                worker.channel.send(question)
        self._inspection = Inspection(self._node, subjects, self._path, py_spy=find_py_spy())

    def heard(self, rank: int, answer: dict[str, Any]) -> None:
        """A worker's own thread answered; an answer to an older question is dropped."""
        if self._inspection is not None and answer.get("question") == self._question:
            self._inspection.heard(rank, answer)

    def inspected(self) -> list[RankReport] | None:
        """The reports of the inspection that was begun, once; None before, and without one."""
        reports = None if self._inspection is None else self._inspection.poll()
        if reports is not None:
            self._inspection = None
        return reports

    def _look_at(self, worker: Worker, now: float, stalled_s: float) -> Overdue | None:
        page, watch = worker.page, self._watch_of(worker)
        watch.observe(
            worker.phase,
            page.read(Word.BEGUN_STEP),
            page.read(Word.DONE_STEP),
            now,
            stalled_s=stalled_s,
            awaits_target=bool(page.read(Word.STOP_FLAG)) and page.read(Word.TARGET_STEP) == NONE,
        )
        return watch.overdue(now)

    def _watch_of(self, worker: Worker) -> PhaseWatch:
        if worker.rank not in self._watches:
            self._watches[worker.rank] = PhaseWatch(worker.rank, self._hang, self._durations)
        return self._watches[worker.rank]

    def _subject(self, worker: Worker, now: float) -> Subject:
        dump_fd = -1
        with contextlib.suppress(OSError):  # too many open files: no dump then
            dump_fd = os.dup(worker.page.fd)
        for_s, limit_s = self._watch_of(worker).standing(now)
        return Subject(
            rank=worker.rank,
            pid=worker.process.pid,
            phase=worker.phase,
            begun=worker.page.read(Word.BEGUN_STEP),
            done=worker.page.read(Word.DONE_STEP),
            for_s=round(for_s, 3),
            limit_s=round(limit_s, 3),
            dump_fd=dump_fd,
        )
