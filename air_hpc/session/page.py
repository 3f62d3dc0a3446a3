"""The page: a few machine words shared between one worker and its agent.

The hot path of a step must not wait for anyone, so what worker and agent tell each other at every
step goes through shared memory: an anonymous memory file that the agent makes and the worker
inherits. Each word has one writer. A word is an aligned 64-bit integer, stored and loaded by a
single machine instruction (through a native `memoryview` cast), so it is never seen half written.

No word is ordered against another: a processor may hold a store back (for microseconds) while it
loads. So whoever sets STOP_FLAG waits some milliseconds before it reads BEGUN_STEP; by then either
the worker has seen the flag, or the step that it began without seeing it is in the page.

Behind the words, the same file takes the stacks that a worker writes when its agent signals it to
(`begin_dump`, `read_dump`): both hold it open already, it is memory, and it ends with them.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from enum import IntEnum
from typing import Self

_SIZE = mmap.PAGESIZE
NONE = -1
"""No step: nothing begun, no target."""


class Word(IntEnum):
    """Where each value is in the page, and who writes it."""

    BEGUN_STEP = 0
    """worker: the newest step it said it begins (NONE before the first)."""
    DONE_STEP = 1
    """worker: the newest step it completed."""
    PHASE = 2
    """worker: index into PHASES."""
    COMPUTE_NS = 3
    """worker: nanoseconds spent computing since its first step, without waiting for others."""
    COMPUTE_STEPS = 4
    """worker: over how many steps."""
    STOP_FLAG = 8
    """agent: 1 when a stop was asked for."""
    TARGET_STEP = 9
    """agent: the step that all run to; NONE until agreed."""
    LEASE_NS = 10
    """agent: the CLOCK_MONOTONIC nanosecond until which the worker may write."""


PHASES = (
    "start", "init", "compile", "data", "load", "step", "save", "eval", "finish", "preflight",
)  # fmt: skip


class Page:
    """One worker's page. Made by the agent (`create`), opened by the worker (`attach`)."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _SIZE)
        self._words = memoryview(self._map).cast("q")

    @classmethod
    def create(cls) -> Self:
        """A fresh page with nothing begun and no target."""
        fd = os.memfd_create("air_hpc_session")
        os.ftruncate(fd, _SIZE)
        # Shared by all who inherit it: whatever is written to the file goes behind the words.
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
        page = cls(fd)
        for word in (Word.BEGUN_STEP, Word.DONE_STEP, Word.TARGET_STEP):
            page.write(word, NONE)
        return page

    @classmethod
    def attach(cls, fd: int) -> Self:
        """The page behind an inherited file descriptor."""
        return cls(fd)

    def read(self, word: Word) -> int:
        """The present value of a word."""
        return self._words[word]

    def write(self, word: Word, value: int) -> None:
        """Set a word; only its one writer may."""
        self._words[word] = value

    def close(self) -> None:
        """Unmap and close; a second call does nothing."""
        if self.fd >= 0:
            self._words.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1


def begin_dump(fd: int) -> None:
    """Forget what was dumped behind the words of the page file `fd`."""
    os.ftruncate(fd, _SIZE)


def read_dump(fd: int, most_bytes: int) -> bytes:
    """What was dumped since `begin_dump`, at most `most_bytes` of it."""
    return os.pread(fd, most_bytes, _SIZE)
