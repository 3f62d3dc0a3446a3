"""Checkpoints: what is committed, what is refused, what is chosen and what retention removes."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_hpc.rundir.atomic import ASIDE_PREFIX, write_file
from air_hpc.rundir.commit import (
    BAD,
    COMMITTED,
    MANIFEST,
    CheckpointInvalid,
    CheckpointUnreadable,
    FileRecord,
    abort_save,
    begin_save,
    checkpoint_path,
    commit_save,
    committed_steps,
    digest_file,
    find_candidates,
    inheritable,
    is_bad,
    mark_bad,
    read_checkpoint,
    verify_file,
    verify_fully,
    verify_sizes,
)
from air_hpc.rundir.fence import Fenced, Token, claim_next_attempt, record_inherited
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.retention import make_room, retire, steps_to_retire, sweep_leftovers
from tests.rundir.writers import SHARDS, attempt, newest, save, start


def test_a_checkpoint_reads_back_as_it_was_committed(run: RunDir) -> None:
    token, resumed = start(run)
    done = save(run, token, 10)
    read = read_checkpoint(checkpoint_path(run, 10))
    assert resumed == 0
    assert read == done
    assert set(read.files) == set(SHARDS)
    assert read.total_bytes == sum((read.path / name).stat().st_size for name in SHARDS)
    assert read.facts == {"written_by": "1.1"}
    verify_fully(read)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def _add(path: Path) -> None:
    path.with_name("more.bin").write_bytes(b"x")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(_cut, "has .* bytes, its writer reported"), (Path.unlink, "missing"), (_add, "nobody")],
)
def test_a_file_that_changed_its_size_or_went_is_seen_before_choosing(
    run: RunDir, damage: Callable[[Path], None], reason: str
) -> None:
    attempt(run, saves=2)
    damage(checkpoint_path(run, 20) / SHARDS[0])
    found = find_candidates(run)
    assert [checkpoint.step for checkpoint in found.usable] == [10]
    ((step, text),) = found.rejected
    assert step == 20
    with pytest.raises(CheckpointInvalid, match=reason):
        verify_sizes(read_checkpoint(checkpoint_path(run, 20)))
    assert "step-20" in text


def test_a_flipped_bit_is_seen_by_whoever_reads_the_file(run: RunDir) -> None:
    attempt(run)
    _flip(checkpoint_path(run, 10) / SHARDS[0])
    checkpoint = find_candidates(run).usable[0]
    verify_file(checkpoint, SHARDS[1])
    with pytest.raises(CheckpointInvalid, match="does not match its digest"):
        verify_file(checkpoint, SHARDS[0])
    with pytest.raises(CheckpointInvalid, match="does not match its digest"):
        verify_fully(checkpoint)


@pytest.mark.parametrize("name", [MANIFEST, COMMITTED])
@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink, lambda p: p.write_bytes(b"[]")])
def test_a_damaged_manifest_or_mark_rejects_with_a_reason(
    run: RunDir, name: str, damage: Callable[[Path], object]
) -> None:
    attempt(run, saves=2)
    damage(checkpoint_path(run, 20) / name)
    found = find_candidates(run)
    assert [checkpoint.step for checkpoint in found.usable] == [10]
    assert [step for step, _ in found.rejected] == [20]


@pytest.mark.parametrize("name", [MANIFEST, BAD])
def test_what_the_file_system_does_not_give_now_is_not_held_against_a_checkpoint(
    run: RunDir, name: str
) -> None:
    attempt(run, saves=2)
    path = checkpoint_path(run, 20) / name
    whole = path.read_bytes() if path.exists() else None
    path.unlink(missing_ok=True)
    path.symlink_to(path)  # ELOOP, as EIO and ESTALE: it is there and cannot be read
    found = find_candidates(run)
    assert [checkpoint.step for checkpoint in found.usable] == [10]
    assert found.rejected == ()
    assert [step for step, _ in found.unreadable] == [20]
    path.unlink()
    if whole is not None:
        path.write_bytes(whole)
    assert committed_steps(run) == [20, 10]


def test_a_shard_that_cannot_be_read_now_is_not_a_wrong_one(run: RunDir) -> None:
    attempt(run)
    checkpoint = read_checkpoint(checkpoint_path(run, 10))
    shard = checkpoint.path / SHARDS[0]
    shard.unlink()
    shard.symlink_to(shard)
    with pytest.raises(CheckpointUnreadable):
        verify_file(checkpoint, SHARDS[0])


def test_a_checkpoint_under_another_steps_name_is_rejected(run: RunDir) -> None:
    attempt(run)
    shutil.copytree(checkpoint_path(run, 10), checkpoint_path(run, 500))
    found = find_candidates(run)
    assert [checkpoint.step for checkpoint in found.usable] == [10]
    assert found.rejected == ((500, "step-500: its manifest is of step 10"),)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder, records: records.update({"ghost.bin": FileRecord(1, "0" * 64)}),
        lambda folder, records: records.pop(SHARDS[0]),
        lambda folder, records: _cut(folder / SHARDS[0]),
    ],
    ids=["reported but absent", "present but unreported", "shorter than reported"],
)
def test_a_save_that_is_not_what_its_writers_reported_commits_nothing(
    run: RunDir, change: Callable[[Path, dict[str, FileRecord]], object]
) -> None:
    attempt(run)
    token, _ = start(run)
    folder = begin_save(run, token, 20)
    for name in SHARDS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_file(folder / name, b"abc")
    records = {name: digest_file(folder / name) for name in SHARDS}
    change(folder, records)
    with pytest.raises(CheckpointInvalid):
        commit_save(run, token, 20, records)
    abort_save(folder)
    abort_save(folder)
    assert newest(run) == 10
    assert [path.name for path in run.checkpoints_dir.iterdir()] == ["step-10"]


def test_an_unfinished_save_of_the_same_step_is_begun_anew(run: RunDir) -> None:
    token, _ = start(run)
    (begin_save(run, token, 10) / "half.bin").write_bytes(b"x")
    save(run, token, 10)
    assert newest(run) == 10


def test_a_standing_usable_checkpoint_of_the_step_is_kept(run: RunDir) -> None:
    attempt(run)
    token, _ = start(run)
    assert save(run, token, 10).token == Token(1, 1)
    assert [path.name for path in run.checkpoints_dir.iterdir()] == ["step-10"]


def test_a_bad_checkpoint_is_never_chosen_and_is_replaced_by_a_new_save(run: RunDir) -> None:
    attempt(run, saves=2)
    mark_bad(run, 20, "its load crashed: \udcff")
    mark_bad(run, 999, "absent")
    assert committed_steps(run) == [10]
    token, resumed = start(run)
    assert resumed == 10
    assert save(run, token, 20).token == token
    assert committed_steps(run) == [20, 10]


def test_the_mark_of_a_fenced_generation_is_void_on_a_newer_ones_checkpoint(run: RunDir) -> None:
    attempt(run)
    token, _ = start(run)
    save(run, token, 20)
    mark_bad(run, 20, "late", token=Token(1, 1))
    mark_bad(run, 10, "its load crashed", token=token)
    assert committed_steps(run) == [20]
    (checkpoint_path(run, 20) / BAD).write_bytes(b"by hand")
    assert is_bad(checkpoint_path(run, 20))


def test_a_first_generation_that_inherits_nothing_keeps_its_commits_for_the_next(
    run: RunDir,
) -> None:
    token = claim_next_attempt(run)
    record_inherited(run, token, {})
    save(run, token, 10)
    assert start(run) == (Token(2, 1), 10)


# -- retention -----------------------------------------------------------------------------------


@given(
    st.sets(st.integers(0, 200)),
    st.integers(0, 5),
    st.none() | st.integers(1, 50),
    st.none() | st.integers(0, 200),
)
def test_retention_keeps_what_it_says(
    steps: set[int], keep_last: int, every: int | None, verified: int | None
) -> None:
    doomed = set(
        steps_to_retire(steps, keep_last=keep_last, keep_every_steps=every, verified=verified)
    )
    assert doomed <= steps
    kept = steps - doomed
    assert set(sorted(steps)[-max(1, keep_last) :]) <= kept
    assert verified not in doomed
    for step in kept - set(sorted(steps)[-max(1, keep_last) :]) - {verified}:
        assert every is not None
        assert step % every == 0


def test_retention_removes_the_older_ones_and_what_is_bad_or_void_behind_them(run: RunDir) -> None:
    attempt(run, saves=3, keep_last=9)
    mark_bad(run, 10, "torn")
    token = claim_next_attempt(run)
    record_inherited(run, token, {30: find_candidates(run).usable[0].manifest_sha256})  # 20: void
    save(run, token, 40)
    _cut(checkpoint_path(run, 30) / SHARDS[0])  # cannot be used, and nobody has judged it yet
    for step in (50, 60):
        save(run, token, step)
    assert retire(run, token, keep_last=2) == [10, 20, 40]
    names = sorted(path.name for path in run.checkpoints_dir.iterdir())
    assert names == ["step-30", "step-50", "step-60"]


def test_the_checkpoint_that_was_verified_by_reading_outlives_newer_ones(run: RunDir) -> None:
    attempt(run)
    token, resumed = start(run)
    for step in (20, 30):
        save(run, token, step)
    assert retire(run, token, keep_last=1, verified=resumed) == [20]
    assert committed_steps(run) == [30, 10]


def test_room_is_made_by_what_is_of_no_use_and_then_by_the_oldest_that_can_be_spared(
    run: RunDir,
) -> None:
    attempt(run, saves=4, keep_last=9)
    mark_bad(run, 30, "its load crashed")
    token, _ = start(run)
    save(run, token, 50)
    wanted = {"keep_every_steps": 40, "verified": 20}
    assert [make_room(run, token, **wanted) for _ in range(4)] == [30, 10, None, None]
    assert committed_steps(run) == [50, 40, 20]
    assert [make_room(run, token) for _ in range(4)] == [20, 40, None, None]
    assert committed_steps(run) == [50]


def test_room_can_be_made_where_not_even_a_directory_can(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt(run, saves=2)
    token, _ = start(run)

    def full(path: Path, mode: int = 0o777) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "mkdir", full)
    assert make_room(run, token) == 10
    with pytest.raises(Fenced):
        make_room(run, Token(1, 1))
    assert committed_steps(run) == [20]


def test_a_fenced_owner_leaves_the_live_save_of_another_token_alone(run: RunDir) -> None:
    """Also where it was stopped between its look at the token and what it then removes."""
    attempt(run, saves=3, keep_last=9)
    older, _ = start(run)
    mine = begin_save(run, older, 40)
    token = claim_next_attempt(run)
    record_inherited(run, token, inheritable(find_candidates(run).usable))
    theirs = begin_save(run, token, 40)
    for name in SHARDS[-1:]:
        write_file(theirs / name, b"abc")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("air_hpc.rundir.retention.require_newest", lambda run, token: None)
        assert sweep_leftovers(run, older) == []
        make_room(run, older, verified=20)
    abort_save(mine)
    done = commit_save(run, token, 40, {SHARDS[-1]: digest_file(theirs / SHARDS[-1])})
    verify_fully(done)
    assert committed_steps(run) == [40, 30, 20]


def test_a_fenced_generation_removes_nothing(run: RunDir) -> None:
    attempt(run, saves=3, keep_last=9)
    claim_next_attempt(run)
    for removal in (
        lambda: retire(run, Token(1, 1), keep_last=1),
        lambda: sweep_leftovers(run, Token(1, 1)),
        lambda: make_room(run, Token(1, 1)),
    ):
        with pytest.raises(Fenced):
            removal()
    assert committed_steps(run) == [30, 20, 10]


def test_a_sweep_takes_older_saves_and_halves_but_nothing_else(run: RunDir) -> None:
    older, _ = start(run)
    begin_save(run, older, 10)
    token = claim_next_attempt(run)
    begin_save(run, token, 10)
    (run.checkpoints_dir / f"{ASIDE_PREFIX}doomed-1").mkdir()
    (run.checkpoints_dir / "notes.txt").write_text("the user's")
    assert sweep_leftovers(run, token) == [f"{ASIDE_PREFIX}doomed-1", ".saving-step-10.1.1"]
    left = sorted(path.name for path in run.checkpoints_dir.iterdir())
    assert left == [".saving-step-10.2.1", "notes.txt"]
    with pytest.raises((CheckpointInvalid, Fenced)):
        commit_save(run, older, 10, {"a": FileRecord(1, "0")})
