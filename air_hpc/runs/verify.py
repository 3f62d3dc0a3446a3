"""Reads whole checkpoints of a run, also while it trains, and says which are what was committed.

Promises: every byte is compared with the manifest. Nothing is changed but by `mark`. A checkpoint
that retention removes meanwhile, or that a new save takes the place of, is no error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from air_hpc.errors import BadInput
from air_hpc.rundir.commit import (
    BAD,
    Checkpoint,
    CheckpointInvalid,
    CheckpointUnreadable,
    counts,
    is_bad,
    mark_bad,
    read_checkpoint,
    step_dirs,
    verify_fully,
)
from air_hpc.rundir.layout import RunDir

Progress = Callable[[int, int, int], None]
"""progress(step, bytes compared so far, bytes in all)."""


class State(StrEnum):
    """What a look at a checkpoint found."""

    GOOD = "good"
    BAD = "bad"
    MARKED = "marked"
    """Judged before: it is never chosen, and its files are not read again."""
    VOID = "void"
    """Committed by a writer that was fenced off: it is never chosen."""
    UNREADABLE = "unreadable"
    """The file system did not give it now."""
    REMOVED = "removed"
    """Retention took it during the look."""


@dataclass(frozen=True)
class Verified:
    """One checkpoint, and why where it is not good."""

    step: int
    state: State
    reason: str | None = None
    total_bytes: int | None = None
    files: int | None = None

    @property
    def failed(self) -> bool:
        """Whether it is not what was committed, or could not be compared."""
        return self.state in (State.BAD, State.MARKED, State.UNREADABLE)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "step": self.step,
            "state": str(self.state),
            "reason": self.reason,
            "total_bytes": self.total_bytes,
            "files": self.files,
        }


def verify_run(
    run: RunDir, step: int | None = None, progress: Progress = lambda step, done, total: None
) -> list[Verified]:
    """Verify all checkpoints of a run, newest first, or that of `step`.

    Raises BadInput when the run has no checkpoint of `step`.
    """
    found = dict(step_dirs(run)) if run.checkpoints_dir.is_dir() else {}
    if step is not None and step not in found:
        raise BadInput.single(
            "--step",
            step,
            f"{run.run_id} has no checkpoint of this step",
            allowed=", ".join(map(str, sorted(found, reverse=True))) or "it has none at all",
        )
    chosen = sorted(found, reverse=True) if step is None else [step]
    return [_verify(run, number, found[number], progress) for number in chosen]


def _verify(run: RunDir, step: int, path: Path, progress: Progress) -> Verified:
    while True:
        checkpoint: Checkpoint | None = None
        try:
            if is_bad(path):
                return Verified(step, State.MARKED, _mark(path))
            checkpoint = read_checkpoint(path)
            if checkpoint.step != step:
                raise CheckpointInvalid(f"{path.name}: its manifest is of step {checkpoint.step}")
            verify_fully(checkpoint, partial(_report, progress, checkpoint))
        except CheckpointUnreadable as error:
            return _found(step, State.UNREADABLE, checkpoint, str(error))
        except CheckpointInvalid as error:
            if not path.is_dir():
                return _found(step, State.REMOVED, checkpoint)
            if checkpoint is not None and _replaced(checkpoint):
                continue
            return _found(step, State.BAD, checkpoint, str(error))
        if not counts(run, checkpoint):
            reason = f"committed by {checkpoint.token}, which was fenced off"
            return _found(step, State.VOID, checkpoint, reason)
        return _found(step, State.GOOD, checkpoint)


def _report(progress: Progress, checkpoint: Checkpoint, done: int) -> None:
    progress(checkpoint.step, done, checkpoint.total_bytes)


def _replaced(checkpoint: Checkpoint) -> bool:
    """Whether another checkpoint stands in its place now."""
    try:
        return read_checkpoint(checkpoint.path).manifest_sha256 != checkpoint.manifest_sha256
    except CheckpointInvalid:
        return False


def _mark(path: Path) -> str:
    """Why it was marked, as far as the mark says so."""
    try:
        return str(json.loads((path / BAD).read_bytes())["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return "marked by hand"


def _found(
    step: int, state: State, checkpoint: Checkpoint | None, reason: str | None = None
) -> Verified:
    if checkpoint is None:
        return Verified(step, state, reason)
    return Verified(step, state, reason, checkpoint.total_bytes, len(checkpoint.files))


def resume_step(verified: Sequence[Verified]) -> int | None:
    """The step that the run would resume from; None where no good one was found."""
    return max((one.step for one in verified if one.state is State.GOOD), default=None)


def mark(run: RunDir, verified: Sequence[Verified]) -> list[int]:
    """Mark what was found bad, so that no start chooses it; returns the steps."""
    steps = [one.step for one in verified if one.state is State.BAD]
    for one in verified:
        if one.state is State.BAD:
            mark_bad(run, one.step, f"verify: {one.reason}")
    return steps
