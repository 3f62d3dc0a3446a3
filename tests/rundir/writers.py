"""What an attempt does with a run directory, in the order the agent and the workers do it."""

from __future__ import annotations

from collections.abc import Callable

from air_hpc.rundir.atomic import write_file
from air_hpc.rundir.commit import (
    Checkpoint,
    abort_save,
    begin_save,
    commit_save,
    digest_file,
    find_candidates,
    inheritable,
    verify_fully,
)
from air_hpc.rundir.fence import Token, claim_next_attempt, record_inherited
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.retention import make_room, retire, sweep_leftovers

SHARDS = ("model/layers/rank-0.bin", "optimizer/rank-0.bin", "counters.json")


def start(run: RunDir) -> tuple[Token, int]:
    """Claim, look up, inherit, sweep; returns the token and the step to resume from (0: none)."""
    token = claim_next_attempt(run)
    usable = find_candidates(run).usable
    record_inherited(run, token, inheritable(usable))
    sweep_leftovers(run, token)
    return token, usable[0].step if usable else 0


def content(token: Token, step: int, name: str) -> bytes:
    """The bytes of a shard: they tell whose they are."""
    return f"{name} of step {step} by {token}".encode() * 3


def save(run: RunDir, token: Token, step: int, shards: tuple[str, ...] = SHARDS) -> Checkpoint:
    """A whole save, by one process for all ranks."""
    folder = begin_save(run, token, step)
    for name in shards:
        path = folder / name
        for parent in reversed(path.relative_to(folder).parents):
            (folder / parent).mkdir(mode=0o700, exist_ok=True)
        write_file(path, content(token, step, name))
    records = {name: digest_file(folder / name) for name in shards}
    return commit_save(run, token, step, records, {"written_by": str(token)})


def attempt(
    run: RunDir,
    *,
    saves: int = 1,
    keep_last: int = 2,
    saved: Callable[[int], None] = lambda step: None,
) -> list[int]:
    """A whole attempt that saves every 10 steps; returns the steps it committed.

    `saved` is called when a commit has returned.
    """
    token, resumed = start(run)
    steps = [resumed + 10 * (i + 1) for i in range(saves)]
    for step in steps:
        save(run, token, step)
        saved(step)
        retire(run, token, keep_last=keep_last, verified=resumed or None)
    return steps


def attempt_on_a_full_disk(run: RunDir) -> None:
    """An attempt whose first save finds the disk full, and which makes room and tries again."""
    token, resumed = start(run)
    step = resumed + 10
    folder = begin_save(run, token, step)
    write_file(folder / "half.bin", b"as far as there was room")
    abort_save(folder)
    make_room(run, token)
    save(run, token, step)
    retire(run, token, keep_last=9, verified=resumed or None)


def newest(run: RunDir) -> int:
    """The newest step to resume from, 0 for none; all of them verify by reading."""
    usable = find_candidates(run).usable
    for checkpoint in usable:
        verify_fully(checkpoint)
    return usable[0].step if usable else 0
