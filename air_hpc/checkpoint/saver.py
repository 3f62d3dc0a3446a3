"""Saves: staged while training stands still, written and committed while it goes on.

    training thread   stage: copy this rank's share to host memory      (what a save costs)
    background        look for NaN and Inf, write the shards, fsync, digest them, tell rank 0;
                      rank 0 commits; retention

All ranks call `save` at the same step. One save is in flight at a time; the next waits for it.

What may go wrong, and where it surfaces:

- A rank that cannot write makes the save fail on every rank, through collectives on a gloo group of
  the saver's own: the unfinished folder is removed, the agent and the log are told at once, and
  training goes on, however often. On a full disk or quota the oldest checkpoint that retention can
  spare goes first, and the same save is tried once more. The outcome of a save is counted where all
  ranks wait for it (`wait`, and the next `save`), so that they come to the same end.
- A newer attempt owns the run (Fenced), or the background broke (a lost rank, no memory): raised by
  `check` before the next step of whichever rank knows it; the others follow, or are ended with it.
- A state with a NaN or Inf in it is never committed (`SaveOutcome.not_finite`): retention would
  take the good ones for it.

`asynchronous=False` and `wait=True` do the same in the training thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter  # type: ignore[attr-defined]
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save

from air_hpc.checkpoint.ranks import Ranks
from air_hpc.checkpoint.state import first_not_finite
from air_hpc.config.spec import CheckpointSpec
from air_hpc.errors import AirHpcError, EnvironmentFailure
from air_hpc.rundir.commit import FileRecord, abort_save, begin_save, digest_file
from air_hpc.rundir.fence import Fenced
from air_hpc.rundir.retention import make_room
from air_hpc.session.messages import Message
from air_hpc.session.session import Session

_TIMEOUT_S = 1800.0
"""How long a rank waits in a save for the slowest writer, whatever a training step may take."""

_PROBE_BYTES = 1 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class SavesFail(EnvironmentFailure):
    """The last state of a run could not be written, however often it was tried."""


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended, the same on every rank. `reason` is None when it was committed."""

    step: int
    reason: str | None = None
    fenced: bool = False
    not_finite: bool = False


@dataclass(frozen=True)
class _Failure:
    """Why a save failed; `error` is the errno where there is one."""

    reason: str
    error: int | None = None
    fenced: bool = False
    not_finite: bool = False

    @property
    def full(self) -> bool:
        return self.error in _FULL


@dataclass(frozen=True)
class _Work:
    """A save on its way: what was staged, and what its manifest and its event say."""

    step: int
    staged: Any
    started: float
    blocking_s: float
    facts: Mapping[str, Any]
    told: Mapping[str, Any]
    began: float = field(default_factory=time.monotonic)


class Saver:
    """The saves of one worker. `verified` is the step that was resumed from, if any."""

    def __init__(
        self,
        session: Session,
        ranks: Ranks,
        spec: CheckpointSpec,
        facts: Mapping[str, Any],
        verified: int | None = None,
    ) -> None:
        cuda = ranks.device.type == "cuda"
        self._ranks = ranks.apart(_TIMEOUT_S)
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=cuda,
            )
        )
        self._session = session
        self._spec = spec
        self._facts = dict(facts)
        self._verified = verified
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._pending: Future[SaveOutcome] | None = None
        self._waited_s = 0.0
        self._made_room = False
        self.newest_step: int | None = verified
        self.blocked_s = 0.0
        """What all saves took from training so far."""
        self.last_blocking_s: float | None = None
        """What the last save took, the waiting for the one before it included."""

    def save(
        self,
        step: int,
        state: dict[str, Any],
        *,
        facts: Mapping[str, Any] | None = None,
        told: Mapping[str, Any] | None = None,
        wait: bool = False,
    ) -> SaveOutcome | None:
        """Save `state` as that after `step` steps. Collective.

        `facts` go into the manifest beside the saver's own, `told` into the event of the commit.
        Returns the outcome when it waited for it, else None; that of a save before is lost unless
        `wait` was called for it. Raises Fenced as `wait` does.
        """
        self.wait()
        began = self._now()
        with self._session.phase("save"):
            started = time.time()
            self._made_room = False
            begun = self._begin(step)
            staged = self._stager.stage(state)
            blocking_s = self._waited_s + time.monotonic() - began
            work = _Work(
                step, staged, started, blocking_s, {**self._facts, **(facts or {})}, told or {}
            )
            self._pending = self._executor.submit(self._write, work, begun)
        self.blocked_s += time.monotonic() - began
        self._waited_s, self.last_blocking_s = 0.0, blocking_s
        return self.wait() if wait or not self._spec.asynchronous else None

    def wait(self) -> SaveOutcome | None:
        """The outcome of the save in flight, or None. Collective in effect: all ranks call it."""
        if self._pending is None:
            return None
        began = self._now()
        with self._session.phase("save"):
            pending, self._pending = self._pending, None
            outcome = pending.result()
        waited_s = time.monotonic() - began
        self.blocked_s += waited_s
        self._waited_s += waited_s
        if outcome.fenced:
            raise Fenced(outcome.reason or "a newer attempt owns the run")
        if outcome.reason is None:
            self.newest_step = outcome.step
        return outcome

    def check(self) -> None:
        """Raise what the save in flight ended with, where it is over and nothing can go on.

        Costs a look at a flag; not collective. A save that merely failed is left for `wait`.
        """
        if self._pending is not None and self._pending.done():
            outcome = self._pending.result()
            if outcome.fenced:
                raise Fenced(outcome.reason or "a newer attempt owns the run")

    def close(self) -> None:
        """End the background thread; a save in flight is finished first."""
        self._executor.shutdown(wait=True)
        self._stager.close()

    def abandon(self) -> None:
        """Leave a save in flight to itself: another rank may never answer it."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    # -- in the training thread ------------------------------------------------------------------

    def _now(self) -> float:
        """The clock, once the device is done: steps still in its queue are no cost of a save."""
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)
        return time.monotonic()

    def _begin(self, step: int) -> Path | _Failure | None:
        """Rank 0: the folder, or why there is none; told to the others by the background."""
        if not self._session.is_first:
            return None
        while True:
            try:
                return self._session.begin_save(step)
            except Fenced as error:
                return _Failure(str(error), fenced=True)
            except OSError as error:
                failure = _Failure(_reason(0, error), error.errno)
            if not self._makes_room(step, failure):
                return failure

    # -- in the background -----------------------------------------------------------------------

    def _write(self, work: _Work, begun: Path | _Failure | None) -> SaveOutcome:
        failure = self._attempt(work, self._ranks.tell(begun))
        if failure is not None and failure.full:
            failure = self._attempt(work, self._ranks.tell(self._begin_again(work.step, failure)))
        if failure is None:
            self._retire()
            return SaveOutcome(work.step)
        if not failure.fenced:
            self._report(work.step, failure)
        return SaveOutcome(work.step, failure.reason, failure.fenced, failure.not_finite)

    def _begin_again(self, step: int, failure: _Failure) -> Path | _Failure | None:
        """Rank 0: a new folder after room was made; else the failure stands."""
        if not self._session.is_first:
            return None
        if not self._makes_room(step, failure):
            return failure
        try:
            self._session.require_lease()
            return begin_save(self._session.run, self._session.token, step)
        except Fenced as error:
            return _Failure(str(error), fenced=True)
        except OSError as error:
            return _Failure(_reason(0, error), error.errno)

    def _attempt(self, work: _Work, begun: Path | _Failure) -> _Failure | None:
        """Write and commit; what went wrong, the same on every rank, or None."""
        if isinstance(begun, _Failure):
            return begun
        failure = self._write_and_commit(work, begun)
        if failure is not None and not failure.fenced and self._session.is_first:
            abort_save(begun)
        return failure

    def _write_and_commit(self, work: _Work, folder: Path) -> _Failure | None:
        found = [name for name in self._ranks.hear(first_not_finite(work.staged)) if name]
        if found:
            return _Failure(f"a NaN or Inf is in {found[0]}: it is not saved", not_finite=True)
        files, mine = self._write_shards(folder, work.staged)
        reports = self._ranks.hear((files, mine))
        failures = [failure for _, failure in reports if failure is not None]
        if failures:
            # Of several the one that knows most: all ranks say that a rank failed, it alone why.
            return max(failures, key=lambda failure: (failure.full, failure.error is not None))
        every = {name: record for part, _ in reports for name, record in part.items()}
        failure: _Failure | None = self._ranks.tell(self._commit(work, folder, every))
        return failure

    def _write_shards(
        self, folder: Path, staged: Any
    ) -> tuple[dict[str, FileRecord], _Failure | None]:
        """This rank's files and their digests; or why not, with the rank named."""
        rank = self._ranks.rank
        try:
            writer = FileSystemWriter(folder, sync_files=True)
            save(staged, storage_writer=writer, process_group=self._ranks.group)
            names = [f"__{rank}_0.distcp"] + ([".metadata"] if rank == 0 else [])
            return {n: digest_file(folder / n) for n in names if (folder / n).exists()}, None
        except CheckpointException as error:
            first = min(error.failures)
            return {}, _failure(first, error.failures[first][0], folder)
        except (OSError, RuntimeError) as error:
            return {}, _failure(rank, error, folder)

    def _commit(self, work: _Work, folder: Path, files: dict[str, FileRecord]) -> _Failure | None:
        if not self._session.is_first:
            return None
        try:
            self._session.commit_save(
                work.step,
                files,
                facts=work.facts,
                started=work.started,
                blocking_s=work.blocking_s,
                duration_s=work.blocking_s + time.monotonic() - work.began,
                told=work.told,
            )
        except Fenced as error:
            return _Failure(str(error), fenced=True)
        except OSError as error:
            return _Failure(_reason(0, error), error.errno)
        except AirHpcError as error:
            return _Failure(str(error))
        return None

    def _retire(self) -> None:
        if self._session.is_first:
            with contextlib.suppress(OSError, AirHpcError):
                # What cannot be removed now is removed after the next save.
                self._session.retire(
                    keep_last=self._spec.keep_last,
                    keep_every_steps=self._spec.keep_every_steps,
                    verified=self._verified,
                )

    def _makes_room(self, step: int, failure: _Failure) -> bool:
        """Rank 0, once a save: remove what can be spared on a full disk; whether that was any."""
        if self._made_room or not failure.full:
            return False
        self._made_room = True
        removed = None
        with contextlib.suppress(OSError, AirHpcError):
            self._session.require_lease()
            removed = make_room(
                self._session.run,
                self._session.token,
                keep_every_steps=self._spec.keep_every_steps,
                verified=self._verified,
            )
        if removed is not None:
            self._report(step, failure, removed)
        return removed is not None

    def _report(self, step: int, failure: _Failure, removed: int | None = None) -> None:
        """Rank 0 tells the agent and the log."""
        if not self._session.is_first:
            return
        self._session.note(
            Message.SAVE_FAILED,
            step=step,
            reason=failure.reason,
            removed_step=removed,
            tried_again=removed is not None,
        )
        then = "training goes on without it"
        if removed is not None:
            then = f"the checkpoint of step {removed} was removed to make room; trying once more"
        print(f"warning: step {step} was not saved: {failure.reason}; {then}", file=sys.stderr)


def _failure(rank: int, error: BaseException, folder: Path) -> _Failure:
    """A failed write. torch's own writer says only that it failed, and never why: so the file
    system is asked what it answers to a write now."""
    number = error.errno if isinstance(error, OSError) else None
    text = _reason(rank, error)
    if number is None:
        number = _disk_says(folder)
        text += "" if number is None else f" ({os.strerror(number)})"
    return _Failure(text, number)


def _disk_says(folder: Path) -> int | None:
    """The errno of a write into `folder`, or None where it works."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return None


def _reason(rank: int, error: BaseException) -> str:
    return f"rank {rank}: {type(error).__name__}: {error}"
