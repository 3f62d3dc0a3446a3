"""Saves: staged while training stands still, written and committed while it goes on.

    training thread   stage: copy this rank's share to host memory      (what a save costs)
    background        write the shards, fsync, digest them, tell rank 0; rank 0 commits; retention

All ranks call `save` at the same step. One save is in flight at a time; the next waits for it.
A rank that cannot write makes the save fail on every rank, through collectives on a gloo group of
the saver's own: the unfinished folder is removed, the agent is told, and training goes on. The
result of a save is looked at only where all ranks wait for it, so that they count alike; the third
failure in a row raises SavesFail everywhere. Fenced is raised everywhere too: a newer attempt
owns the run.

`asynchronous=False` and `wait=True` do the same in the training thread.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter  # type: ignore[attr-defined]
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save

from air_hpc.checkpoint.ranks import Ranks
from air_hpc.config.spec import CheckpointSpec
from air_hpc.errors import AirHpcError, EnvironmentFailure
from air_hpc.rundir.commit import FileRecord, digest_file
from air_hpc.rundir.fence import Fenced
from air_hpc.session.messages import Message
from air_hpc.session.session import Session

MAX_FAILURES = 3
"""So many failed saves in a row end the worker: a run that cannot save makes no progress."""
_TIMEOUT_S = 1800.0
"""How long a rank waits in a save for the slowest writer, whatever a training step may take."""

_PROBE_BYTES = 1 << 20


class SavesFail(EnvironmentFailure):
    """Several saves in a row could not be written."""


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended, the same on every rank. `reason` is None when it was committed."""

    step: int
    reason: str | None = None
    fenced: bool = False


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
        self._failures = 0
        self.newest_step: int | None = verified
        self.blocked_s = 0.0

    def save(self, step: int, state: dict[str, Any], *, wait: bool = False) -> SaveOutcome | None:
        """Save `state` as that after `step` steps. Collective.

        Returns the outcome when it waited for it, else None; adds what it took from training to
        `blocked_s`. Raises SavesFail or Fenced as `wait` does.
        """
        if self._ranks.device.type == "cuda":
            # Steps that the device still has in its queue are training, no cost of the save.
            torch.cuda.synchronize(self._ranks.device)
        began = time.monotonic()
        with self._session.phase("save"):
            self.wait()
            started = time.time()
            folder = self._begin(step)
            staged = self._stager.stage(state)
            blocking_s = time.monotonic() - began
            self._pending = self._executor.submit(
                self._write, step, folder, staged, started, blocking_s
            )
            waits = wait or not self._spec.asynchronous
            outcome = self.wait() if waits else None
        self.blocked_s += time.monotonic() - began
        return outcome

    def wait(self) -> SaveOutcome | None:
        """The outcome of the save in flight, or None. Collective in effect: all ranks call it."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        outcome = pending.result()
        if outcome.fenced:
            raise Fenced(outcome.reason or "a newer attempt owns the run")
        if outcome.reason is None:
            self._failures = 0
            self.newest_step = outcome.step
            return outcome
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise SavesFail(
                f"{self._failures} saves in a row failed, the last at step {outcome.step}: "
                f"{outcome.reason}",
                tried=str(self._session.run.checkpoints_dir),
                next_step="free space or quota there; the run resumes from its newest checkpoint",
            )
        return outcome

    def close(self) -> None:
        """End the background thread; a save in flight is finished first."""
        self._executor.shutdown(wait=True)
        self._stager.close()

    def abandon(self) -> None:
        """Leave a save in flight to itself: another rank may never answer it."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    # -- in the training thread ------------------------------------------------------------------

    def _begin(self, step: int) -> Path | str | Fenced:
        """Rank 0: the folder, or why there is none; told to the others by the background."""
        if not self._session.is_first:
            return ""
        try:
            return self._session.begin_save(step)
        except Fenced as error:
            return error
        except OSError as error:
            return _reason(0, error)

    # -- in the background -----------------------------------------------------------------------

    def _write(
        self, step: int, folder: Path | str | Fenced, staged: Any, started: float, blocking_s: float
    ) -> SaveOutcome:
        began = time.monotonic()
        folder = self._ranks.tell(folder)
        if isinstance(folder, Fenced):
            return SaveOutcome(step, str(folder), fenced=True)
        if isinstance(folder, str):
            self._report_failure(None, step, folder)
            return SaveOutcome(step, folder)
        files, reason = self._write_shards(folder, staged)
        reports = self._ranks.hear((files, reason))
        reasons = [text for _, text in reports if text]
        if reasons:
            self._report_failure(folder, step, reasons[0])
            return SaveOutcome(step, reasons[0])
        every = {name: record for part, _ in reports for name, record in part.items()}
        duration_s = blocking_s + time.monotonic() - began
        outcome = self._commit(step, folder, every, started, blocking_s, duration_s)
        told: SaveOutcome = self._ranks.tell(outcome)
        return told

    def _write_shards(self, folder: Path, staged: Any) -> tuple[dict[str, FileRecord], str]:
        """This rank's files and their digests; or why not, with the rank named."""
        rank = self._ranks.rank
        try:
            writer = FileSystemWriter(folder, sync_files=True)
            save(staged, storage_writer=writer, process_group=self._ranks.group)
            names = [f"__{rank}_0.distcp"] + ([".metadata"] if rank == 0 else [])
            return {n: digest_file(folder / n) for n in names if (folder / n).exists()}, ""
        except CheckpointException as error:
            first = min(error.failures)
            return {}, _reason(first, error.failures[first][0]) + _disk_says(folder)
        except (OSError, RuntimeError) as error:
            return {}, _reason(rank, error) + _disk_says(folder)

    def _commit(
        self,
        step: int,
        folder: Path,
        files: dict[str, FileRecord],
        started: float,
        blocking_s: float,
        duration_s: float,
    ) -> SaveOutcome:
        if not self._session.is_first:
            return SaveOutcome(step)
        try:
            self._session.commit_save(
                step,
                files,
                facts=self._facts,
                started=started,
                blocking_s=blocking_s,
                duration_s=duration_s,
            )
        except Fenced as error:
            return SaveOutcome(step, str(error), fenced=True)
        except (OSError, AirHpcError) as error:
            self._report_failure(folder, step, str(error))
            return SaveOutcome(step, str(error))
        with contextlib.suppress(OSError, AirHpcError):
            # What cannot be removed now is removed after the next save.
            self._session.retire(
                keep_last=self._spec.keep_last,
                keep_every_steps=self._spec.keep_every_steps,
                verified=self._verified,
            )
        return SaveOutcome(step)

    def _report_failure(self, folder: Path | None, step: int, reason: str) -> None:
        if not self._session.is_first:
            return
        if folder is None:
            self._session.note(Message.SAVE_FAILED, step=step, reason=reason)
            return
        try:
            self._session.abort_save(folder, step, reason)
        except OSError:
            self._session.note(Message.SAVE_FAILED, step=step, reason=reason)


def _disk_says(folder: Path) -> str:
    """What the file system answers to a write now (` (No space left on device)`), or nothing.

    torch's own writer says only that a write failed, and never why.
    """
    probe = folder / f".probe-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f" ({error.strerror})"
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return ""


def _reason(rank: int, error: BaseException) -> str:
    return f"rank {rank}: {type(error).__name__}: {error}"
