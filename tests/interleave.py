"""Several writers in one process, switched from one to another between any two system calls.

Each writer runs in a thread of its own, but only the one that holds the turn moves: it stops before
each call of `os` that changes the file system and before each that reads a directory or opens a
file. A schedule (whose turn, for how many calls) makes one exact interleaving.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.crash import intercept

_DEADLINE_S = 60


class Writer:
    """One program, its thread, and how it ended."""

    def __init__(self, program: Callable[[], None]) -> None:
        self._program = program
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.done = False
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self.pause(first=True)
        try:
            self._program()
        except BaseException as error:
            self.error = error
        self.done = True
        self._stopped.release()

    def pause(self, *, first: bool = False) -> None:
        """Called in the thread: give the turn back and wait for the next."""
        if not first:
            self._stopped.release()
        assert self._go.acquire(timeout=_DEADLINE_S)

    def turn(self) -> None:
        """Called by the scheduler: let it run to its next stop."""
        if not self.done:
            self._go.release()
            assert self._stopped.acquire(timeout=_DEADLINE_S)


def interleave(
    programs: Sequence[Callable[[], None]], schedule: Iterable[tuple[int, int]]
) -> list[BaseException | None]:
    """Run the programs by `schedule` (program, calls), then each to its end, the last one first.

    Returns the error that ended each of them, or None.
    """
    writers = [Writer(program) for program in programs]
    by_thread = {}
    for writer in writers:
        writer.thread.start()
        by_thread[writer.thread.ident] = writer

    def stop() -> None:
        writer = by_thread.get(threading.get_ident())
        if writer is not None:
            writer.pause()

    def hook(name: str, original: Any, args: Any, kwargs: Any) -> Any:
        stop()
        return original(*args, **kwargs)

    def reading(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            stop()
            return original(*args, **kwargs)

        return call

    listdir, opener = os.listdir, io.open
    with intercept(hook):
        os.listdir, io.open = reading(listdir), reading(opener)  # type: ignore[assignment]
        try:
            for index, calls in schedule:
                for _ in range(calls):
                    writers[index % len(writers)].turn()
            for writer in reversed(writers):
                while not writer.done:
                    writer.turn()
        finally:
            os.listdir, io.open = listdir, opener
    for writer in writers:
        writer.thread.join()
    return [writer.error for writer in writers]
