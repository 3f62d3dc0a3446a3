"""Retention: which checkpoints stay, and what earlier writers left behind.

Removal is by name first: a crash leaves no half of a checkpoint under its own name (`atomic`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from air_hpc.rundir.atomic import ASIDE_PREFIX, fsync_dir, remove_tree
from air_hpc.rundir.commit import (
    SAVING_NAME,
    CheckpointInvalid,
    checkpoint_path,
    committed_steps,
    counts,
    is_bad,
    read_checkpoint,
    remove_unless_newer,
    step_dirs,
)
from air_hpc.rundir.fence import Token, require_newest
from air_hpc.rundir.layout import RunDir


def steps_to_retire(
    steps: Iterable[int], *, keep_last: int, keep_every_steps: int | None, verified: int | None
) -> list[int]:
    """Which of the usable `steps` retention removes: never the newest, never the verified one."""
    ordered = sorted(steps, reverse=True)
    kept = set(ordered[: max(1, keep_last)])
    if keep_every_steps:
        kept |= {step for step in ordered if step % keep_every_steps == 0}
    if verified is not None:
        kept.add(verified)
    return [step for step in ordered if step not in kept]


def retire(
    run: RunDir,
    token: Token,
    *,
    keep_last: int,
    keep_every_steps: int | None = None,
    verified: int | None = None,
) -> list[int]:
    """Remove checkpoints that retention no longer keeps; returns their steps.

    `verified` is the newest step whose digests were checked by reading (the one resumed from): it
    stays although newer ones exist, since those were only written. Bad ones, and late ones of
    fenced writers, go too when they are older than every kept checkpoint. Raises Fenced when this
    token is no longer the newest.
    """
    require_newest(run, token)
    fsync_dir(run.checkpoints_dir)  # the names of those that stay, before any other goes
    usable = committed_steps(run)
    doomed = steps_to_retire(
        usable, keep_last=keep_last, keep_every_steps=keep_every_steps, verified=verified
    )
    oldest_kept = min(set(usable) - set(doomed), default=None)
    if oldest_kept is not None:
        doomed += [
            step
            for step, path in step_dirs(run)
            if step < oldest_kept and step not in usable and _is_refuse(run, path)
        ]
    for step in doomed:
        remove_unless_newer(checkpoint_path(run, step), token)
    return sorted(doomed)


def make_room(
    run: RunDir, token: Token, *, keep_every_steps: int | None = None, verified: int | None = None
) -> int | None:
    """Remove one checkpoint for a save that found the disk full; its step, or None.

    First one that is of no use (bad, or void), then the oldest that retention could spare with
    `keep_last=1`: the newest usable one, the verified one and those kept for ever stay, so a run
    that has a checkpoint keeps one. Raises Fenced when this token is no longer the newest.
    """
    require_newest(run, token)
    fsync_dir(run.checkpoints_dir)
    usable = committed_steps(run)
    refuse = sorted(step for step, path in step_dirs(run) if _is_refuse(run, path))
    spared = steps_to_retire(
        usable, keep_last=1, keep_every_steps=keep_every_steps, verified=verified
    )
    for step in [*refuse, *sorted(spared)][:1]:
        remove_unless_newer(checkpoint_path(run, step), token)
        return step
    return None


def _is_refuse(run: RunDir, path: Path) -> bool:
    """Whether a checkpoint is marked bad or void; one that cannot be read now is neither."""
    with contextlib.suppress(CheckpointInvalid):
        return is_bad(path) or not counts(run, read_checkpoint(path))
    return False


def sweep_leftovers(run: RunDir, token: Token) -> list[str]:
    """Remove unfinished saves of older tokens and half-removed folders; returns their names.

    An older writer that is still at work finds its folder gone: it can commit nothing.
    """
    require_newest(run, token)
    removed = []
    for path in run.checkpoints_dir.iterdir():
        match = SAVING_NAME.fullmatch(path.name)
        stale = match is not None and Token.parse(match[2]) < token
        if stale or (path.name.startswith(ASIDE_PREFIX) and path.is_dir()):
            removed.append(path.name)
            remove_tree(path)
    return sorted(removed)
