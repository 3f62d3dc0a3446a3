"""The coordinator's pen: events reach the ledger in their order, some of them late.

A file system that takes nothing for a while (full, a quota, rights that were lost) must not end a
run that could go on, and what happened meanwhile must not be missing from its story. An event that
cannot be written is kept, with its own time, and written once the file system takes it, before any
later one. What is left when the attempt ends is waited for, and then said to be lost.

Nor may one that does not answer: in the coordinator's loop a write that hangs for a lease would let
the leases of all nodes run out, and they would leave. So a thread writes (`BackgroundRecord`), and
whoever needs to know what happened asks `noted`, not the disk.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from air_hpc.rundir.events import Event, LedgerWriter
from air_hpc.rundir.fence import Token
from air_hpc.rundir.layout import RunDir

RETRY_S = 0.5
FLUSH_S = 5.0
"""A third of a default lease: the nodes wait meanwhile."""
_LOOK_S = 0.005
CLOSE_S = 20.0
"""How long a close waits for a file system that takes nothing. The nodes have been let go by then,
and a grace that ends before only cuts it short."""


class Record:
    """Writes `ledger/<writer>.jsonl`; never raises for the file system."""

    def __init__(
        self,
        run: RunDir,
        writer: str,
        *,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run = run
        self._writer = writer
        self._say = say
        self._clock = clock
        self._sleep = sleep
        self._ledger: LedgerWriter | None = None
        self._waiting: deque[Event] = deque()
        self.noted: list[Event] = []
        """All events of this record, written or not yet."""
        self._refused = False
        self._retry_at = float("-inf")

    def append(self, kind: str, token: Token | None, **facts: Any) -> None:
        """Note an event that happens now; written at once where the file system takes it."""
        self._note(kind, token, facts)
        self._try()

    def _note(self, kind: str, token: Token | None, facts: dict[str, Any]) -> None:
        event = Event(time.time(), str(kind), token, facts, self._writer)
        self.noted.append(event)
        self._waiting.append(event)

    def tick(self) -> None:
        """Try again what could not be written, at most every RETRY_S."""
        if self._waiting and self._clock() >= self._retry_at:
            self._try()

    def flush(self) -> None:
        """Let what was noted be written before anything is done about it, within reason."""

    def close(self, patience_s: float = CLOSE_S) -> None:
        """Write what is left, for at most `patience_s`; what is lost is said."""
        until = self._clock() + patience_s
        while self._waiting and self._clock() < until:
            self._sleep(RETRY_S)
            self._try()
        self._say_lost()
        self._waiting.clear()
        if self._ledger is not None:
            self._ledger.close()

    def _say_lost(self) -> None:
        for event in list(self._waiting):
            self._say(f"the ledger could not be written; lost: {event.to_json()}")

    def _try(self) -> None:
        try:
            if self._ledger is None:
                self._ledger = LedgerWriter(self._run, self._writer)
            while self._waiting:
                self._ledger.write(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._refused:
                self._say(f"the ledger could not be written ({error}); events are kept for later")
            self._refused = True
            self._retry_at = self._clock() + RETRY_S
        else:
            if self._refused:
                self._say("the ledger could be written again, with what had been kept")
            self._refused = False


class BackgroundRecord(Record):
    """The same, written by a thread: `append` returns at once whatever the file system does."""

    def __init__(self, run: RunDir, writer: str, *, say: Callable[[str], None]) -> None:
        super().__init__(run, writer, say=say)
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._write_all, name="ledger", daemon=True)
        self._thread.start()

    def append(self, kind: str, token: Token | None, **facts: Any) -> None:
        """Note an event that happens now; it is written soon."""
        self._note(kind, token, facts)
        self._wake.set()

    def tick(self) -> None:
        """The thread tries again by itself."""

    def flush(self) -> None:
        """Wait for the thread, for at most FLUSH_S."""
        until = self._clock() + FLUSH_S
        while self._waiting and self._clock() < until:
            self._sleep(_LOOK_S)

    def close(self, patience_s: float = CLOSE_S) -> None:
        """Write what is left, for at most `patience_s`; what is lost is said."""
        self._closing = True
        self._wake.set()
        self._thread.join(patience_s)
        self._say_lost()
        if self._ledger is not None and not self._thread.is_alive():
            self._ledger.close()

    def _write_all(self) -> None:
        while self._waiting or not self._closing:
            self._wake.wait(RETRY_S if self._waiting else None)
            self._wake.clear()
            self._try()
