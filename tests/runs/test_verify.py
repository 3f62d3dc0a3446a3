"""Checkpoints read whole, also of a run that is being trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from air_hpc.errors import BadInput
from air_hpc.rundir.commit import checkpoint_path, committed_steps, mark_bad, verify_file
from air_hpc.rundir.fence import claim_next_attempt, record_inherited
from air_hpc.rundir.layout import RunDir, create_run_dir
from air_hpc.rundir.retention import retire
from air_hpc.runs.verify import State, mark, resume_step, verify_run
from tests.run_builder import commit_step, commit_steps


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return create_run_dir(tmp_path, "run")


def states(run: RunDir, step: int | None = None) -> dict[int, State]:
    return {one.step: one.state for one in verify_run(run, step)}


def flip(run: RunDir, step: int) -> None:
    (checkpoint_path(run, step) / "shard").write_bytes(b"stats")


def test_every_byte_is_compared_and_each_kind_of_harm_has_its_name(run: RunDir) -> None:
    commit_steps(run, 10, 20, 30, 40, 50, 60)
    flip(run, 60)
    (checkpoint_path(run, 50) / "shard").unlink()
    mark_bad(run, 40, "its load crashed")
    manifest = checkpoint_path(run, 30) / "manifest.json"
    manifest.unlink()
    manifest.symlink_to(manifest)
    found = verify_run(run)
    assert [(one.step, one.state) for one in found] == [
        (60, State.BAD),
        (50, State.BAD),
        (40, State.MARKED),
        (30, State.UNREADABLE),
        (20, State.GOOD),
        (10, State.GOOD),
    ]
    assert [one.failed for one in found] == [True] * 4 + [False] * 2
    assert "does not match its digest" in str(found[0].reason)
    assert found[2].reason == "its load crashed"
    assert (found[4].total_bytes, found[4].files) == (5, 1)
    assert resume_step(found) == 20
    assert mark(run, found) == [60, 50]
    assert states(run, 60) == {60: State.MARKED}
    assert committed_steps(run) == [20, 10]


def test_what_a_fenced_writer_committed_is_void_and_no_error(run: RunDir) -> None:
    older = commit_steps(run, 10)
    token = claim_next_attempt(run)
    record_inherited(run, token, {})
    assert states(run) == {10: State.VOID}
    assert not verify_run(run)[0].failed
    assert older < token


def test_a_checkpoint_that_retention_takes_during_the_look_is_no_error(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = commit_steps(run, 10, 20, 30)

    def slowly(checkpoint, name: str) -> None:
        if checkpoint.step == 20:
            assert retire(run, token, keep_last=1) == [10, 20]
        verify_file(checkpoint, name)

    monkeypatch.setattr("air_hpc.rundir.commit.verify_file", slowly)
    found = verify_run(run)
    assert [one.state for one in found] == [State.GOOD, State.REMOVED, State.REMOVED]
    assert not any(one.failed for one in found)


def test_a_checkpoint_that_a_new_save_replaces_during_the_look_is_read_anew(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_steps(run, 10)
    replaced = []

    def slowly(checkpoint, name: str) -> None:
        if not replaced:
            mark_bad(run, 10, "doubted")
            token = claim_next_attempt(run)
            record_inherited(run, token, {})
            commit_step(run, token, 10, b"another state")
            replaced.append(token)
        verify_file(checkpoint, name)

    monkeypatch.setattr("air_hpc.rundir.commit.verify_file", slowly)
    assert states(run) == {10: State.GOOD}


def test_a_step_that_was_never_saved_is_refused_with_those_that_were(run: RunDir) -> None:
    assert verify_run(run) == []
    assert resume_step([]) is None
    commit_steps(run, 10, 20)
    with pytest.raises(BadInput, match=r"no checkpoint of this step.*20, 10"):
        verify_run(run, 15)
