"""The ledger: append-only events, one JSON object a line, one file for each writing process.

Reading merges all files by time. A reader never fails: a line cut short by a crash, or one that is
not an event, is skipped and counted. `Kind` names the kinds the fold understands; a reader keeps
kinds and facts it does not know.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from air_hpc.rundir.atomic import fsync_dir, open_file, write_all
from air_hpc.rundir.fence import Token
from air_hpc.rundir.layout import RunDir

SCHEMA_VERSION = 1


class Kind(StrEnum):
    """What can happen to a run."""

    SUBMITTED = "submitted"
    """job_id, array_task_id, cluster, key, script: the scheduler accepted the run."""
    SUBMIT_FAILED = "submit_failed"
    """reason: the scheduler refused it."""
    ATTEMPT_STARTED = "attempt_started"
    """job_id, array_job_id, array_task_id, restart_count, nodes (names), node_count."""
    GENERATION_STARTED = "generation_started"
    """world_size, nodes, resume_step (null: from scratch)."""
    RESUMED = "resumed"
    """step, checkpoint, lost_steps: the workers loaded a checkpoint."""
    TRAINING_STARTED = "training_started"
    """step: the first step of this generation begins."""
    CHECKPOINT_BEGUN = "checkpoint_begun"
    """step: the ranks begin to write a checkpoint."""
    CHECKPOINT_COMMITTED = "checkpoint_committed"
    """step, bytes, blocking_s, duration_s, started (wall clock of the state saved); interval_s,
    the seconds between two saves in force then, where it is `auto`."""
    CHECKPOINT_FAILED = "checkpoint_failed"
    """step, reason: a save that did not commit; training goes on. removed_step: the checkpoint that
    went to make room on a full disk, after which the save was tried again (tried_again)."""
    CHECKPOINT_BAD = "checkpoint_bad"
    """step, reason: a committed checkpoint that does not verify or load; never used again."""
    SIGNAL = "signal"
    """name, node: a signal or our own timer asked for a stop."""
    STOP_AGREED = "stop_agreed"
    """target_step, reason: all workers run to this step, save it and leave."""
    GENERATION_ENDED = "generation_ended"
    """failure_class, evidence, step, exits; verdict and reason (since restarts inside the
    allocation: `continue` when the attempt goes on); rule, action, hint, rank, node, device, phase
    of the failure that was first (null: not known, or it was none of a worker's)."""
    NODE_LOST = "node_lost"
    """node, why, silent_s: given up by the coordinator; its writers are fenced off."""
    HANG_FOUND = "hang_found"
    """rank, node, phase, for_s, limit_s, evidence, stacks (a path in the run directory)."""
    STRAGGLER = "straggler"
    """rank, node, device, ratio (its compute time over the median's), window_s, change: `found`,
    `worse`, or `ended` when it is slow no more."""
    PREFLIGHT = "preflight"
    """node, seconds, checks: [{name, ok, value, floor, said}]."""
    NODE_EXCLUDED = "node_excluded"
    """node, reason, failure_class, expires (seconds since the epoch)."""
    BATCH_SKIPPED = "batch_skipped"
    """step, reason, loss: the guard left the weights as they were."""
    LOSS_ALARM = "loss_alarm"
    """step, reason, loss, action: what the guard saw and asked for."""
    DATA_SKIPPED = "data_skipped"
    """first_batch, last_batch, from_step, reason: a rollback steps over these batches (0 is the
    first batch of the run's order)."""
    ATTEMPT_ENDED = "attempt_ended"
    """failure_class, verdict, evidence, step."""
    REQUEUE_INTENDED = "requeue_intended"
    """intent (requeue, resubmit): what the batch script is to do."""
    CANCEL_REQUESTED = "cancel_requested"
    """by: a person asked for the end."""
    MEASURED = "measured"
    """peak_flops_per_device, peak_source, peak_note, device_name, precision, threads, world_size,
    torch_version: facts of the workers, told once a generation."""
    TRACKING_STARTED = "tracking_started"
    """mlflow_run_id, uri."""


@dataclass(frozen=True)
class Event:
    """One line of the ledger. `time` is seconds since the epoch by the writer's clock."""

    time: float
    kind: str
    token: Token | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    writer: str = ""

    def to_json(self) -> str:
        """One line, without its newline."""
        body: dict[str, Any] = {"v": SCHEMA_VERSION, "time": self.time, "kind": self.kind}
        if self.token is not None:
            body["token"] = str(self.token)
        body["facts"] = dict(self.facts)
        return json.dumps(body, separators=(",", ":"), default=str)

    @classmethod
    def from_json(cls, line: str, writer: str = "") -> Event | None:
        """The event in a line, or None where there is none."""
        try:
            body = json.loads(line)
            token = body.get("token")
            facts = body.get("facts", {})
            moment = float(body["time"])
            if not isinstance(facts, dict) or not isinstance(body["kind"], str):
                return None
            if not math.isfinite(moment):
                return None
            return cls(
                time=moment,
                kind=body["kind"],
                token=None if token is None else Token.parse(token),
                facts=facts,
                writer=writer,
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return None


class LedgerWriter:
    """Appends events to this process's own file, each durable before the call returns."""

    def __init__(self, run: RunDir, writer: str, *, clock: Callable[[], float] = time.time) -> None:
        """Open `ledger/<writer>.jsonl` for appending; `writer` is unique for each process."""
        self._clock = clock
        self.writer = writer
        path = run.ledger_dir / f"{writer}.jsonl"
        self._fd = open_file(path, os.O_RDWR | os.O_APPEND)
        fsync_dir(run.ledger_dir)  # the name must not be lost either
        self._end_torn_line()

    def _end_torn_line(self) -> None:
        """A crash or a full disk may have cut a line: never glue the next event to it."""
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            write_all(self._fd, b"\n")

    def append(self, kind: str, token: Token | None = None, **facts: Any) -> Event:
        """Write one event; raises OSError when the file system does not take it."""
        event = Event(self._clock(), str(kind), token, facts, self.writer)
        self.write(event)
        return event

    def write(self, event: Event) -> None:
        """Write an event that was made before; raises OSError like `append`. Events of one writer
        are written in the order in which they happened."""
        self._end_torn_line()
        write_all(self._fd, event.to_json().encode() + b"\n")
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def record(run: RunDir, writer: str, kind: str, **facts: Any) -> Event:
    """Append a single event and close the file again."""
    with LedgerWriter(run, writer) as ledger:
        return ledger.append(kind, **facts)


@dataclass(frozen=True)
class Ledger:
    """All events of a run in order, and how many lines could not be read."""

    events: tuple[Event, ...]
    unreadable_lines: int = 0


def merge(parts: list[list[Event]]) -> tuple[Event, ...]:
    """Events of several writers in one order: by time, then writer, then position in its file.

    Within one writer the order of its file holds even where its clock stepped back.
    """
    keyed: list[tuple[float, str, int, Event]] = []
    for events in parts:
        latest = float("-inf")
        for position, event in enumerate(events):
            latest = max(latest, event.time)
            keyed.append((latest, event.writer, position, event))
    keyed.sort(key=lambda item: item[:3])
    return tuple(item[3] for item in keyed)


def parse_ledger(text: bytes, writer: str) -> tuple[list[Event], int]:
    """The events of one file, and the number of lines that hold none."""
    events, unreadable = [], 0
    for line in text.decode("utf-8", errors="replace").split("\n"):
        if not line.strip():
            continue
        event = Event.from_json(line, writer)
        if event is None:
            unreadable += 1
        else:
            events.append(event)
    return events, unreadable


def read_ledger(run: RunDir) -> Ledger:
    """Merge every file of the run's ledger. Never raises for what the files contain."""
    parts, unreadable = [], 0
    for path in sorted(run.ledger_dir.glob("*.jsonl")):
        events, skipped = parse_ledger(_read(path), path.stem)
        parts.append(events)
        unreadable += skipped
    return Ledger(merge(parts), unreadable)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
