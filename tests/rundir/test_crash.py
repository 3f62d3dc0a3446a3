"""A crash or a loss of power at any system call of a save."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from air_hpc.rundir.atomic import ASIDE_PREFIX
from air_hpc.rundir.commit import find_candidates, mark_bad
from air_hpc.rundir.layout import RunDir
from tests.crash import Recorder, after_power_loss, intercept, run_killed
from tests.rundir.writers import attempt, attempt_on_a_full_disk, newest, save, start


def _copies(run: RunDir) -> RunDir:
    """A fresh copy of a prepared run, beside it."""
    path = run.path.with_name("copy")
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(run.path, path)
    return RunDir(path)


def _crash_everywhere(prepared: RunDir, action, before: int, after: int) -> int:
    """Kill `action` at each of its calls; check each time, and that the next attempt goes on."""
    seen = set()
    calls = 0
    while True:
        run = _copies(prepared)
        killed = run_killed(lambda run=run: action(run), calls)
        now = newest(run)
        assert now >= before, f"went back from {before} to {now} at call {calls}"
        seen.add(now)
        assert attempt(run) == [now + 10]
        assert newest(run) == now + 10
        leftovers = [p.name for p in run.checkpoints_dir.iterdir() if p.name.startswith(".")]
        assert leftovers == [], f"leftovers of a crash at call {calls}"
        if not killed:
            assert now == after
            assert seen == {before, after}, "no crash fell before, or none after the commit"
            return calls
        calls += 1


def test_a_kill_at_any_call_of_the_first_save_leaves_none_or_all_of_it(run: RunDir) -> None:
    assert _crash_everywhere(run, attempt, before=0, after=10) > 30


def test_a_kill_at_any_call_of_a_start_a_save_and_retention_never_goes_back(run: RunDir) -> None:
    attempt(run, saves=2)
    calls = _crash_everywhere(run, lambda run: attempt(run, keep_last=1), before=20, after=30)
    assert calls > 50


def test_a_kill_while_room_is_made_on_a_full_disk_never_goes_back(run: RunDir) -> None:
    attempt(run, saves=3, keep_last=9)  # 10 is what goes
    assert _crash_everywhere(run, attempt_on_a_full_disk, before=30, after=40) > 50


def test_a_kill_while_a_bad_checkpoint_is_replaced_never_goes_back(run: RunDir) -> None:
    attempt(run, saves=2)
    mark_bad(run, 20, "its load crashed")
    _crash_everywhere(run, attempt, before=10, after=20)


def test_a_kill_in_a_repeated_save_of_a_standing_step_keeps_it(run: RunDir) -> None:
    attempt(run, saves=2)

    def again(run: RunDir) -> None:
        token, _ = start(run)
        save(run, token, 20)

    calls = 0
    while True:
        crashed = _copies(run)
        killed = run_killed(lambda crashed=crashed: again(crashed), calls)
        assert newest(crashed) == 20
        if not killed:
            break
        calls += 1


def test_a_kill_while_a_checkpoint_is_marked_bad_marks_it_or_not(run: RunDir) -> None:
    attempt(run, saves=2)
    seen = set()
    calls = 0
    while True:
        crashed = _copies(run)
        killed = run_killed(lambda crashed=crashed: mark_bad(crashed, 20, "torn"), calls)
        seen.add(newest(crashed))
        if not killed:
            break
        calls += 1
    assert seen == {10, 20}
    assert newest(crashed) == 10


@pytest.mark.parametrize("scenario", ["first", "next", "replaces_bad"])
def test_a_loss_of_power_keeps_every_commit_that_was_reported(
    run: RunDir, folder: Path, scenario: str
) -> None:
    if scenario != "first":
        attempt(run, saves=2)
    if scenario == "replaces_bad":
        mark_bad(run, 20, "its load crashed")
    before = newest(run)
    recorder = Recorder(run.path)
    with intercept(recorder.hook):
        for _ in range(2):
            attempt(run, keep_last=1, saved=lambda step: recorder.mark(str(step)))
    rng = random.Random(5)
    promised = before
    for length in range(1, len(recorder.trace) + 1):
        entry = recorder.trace[length - 1]
        promised = int(entry) if isinstance(entry, str) else promised
        for keep in (0.0, 0.5, 1.0):
            lost = folder / "lost" / run.run_id
            shutil.rmtree(lost.parent, ignore_errors=True)
            lost.parent.mkdir()
            after_power_loss(recorder, length, keep, rng).write(lost)
            now = newest(RunDir(lost))
            assert now >= promised, f"{promised} was promised, {now} is there ({length}, {keep})"
            rejected = find_candidates(RunDir(lost)).rejected
            assert not rejected, f"a half checkpoint was left: {rejected} ({length}, {keep})"


def test_the_harness_kills_in_the_middle_of_a_write(folder: Path) -> None:
    path = folder / "file"

    def action() -> None:
        import os

        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(fd, b"12345678")

    assert run_killed(action, 1)
    assert path.read_bytes() == b"1234"
    assert not run_killed(action, 2)
    assert not path.name.startswith(ASIDE_PREFIX)


def test_the_harness_refuses_a_change_that_it_does_not_see(folder: Path) -> None:
    with pytest.raises(AssertionError, match="bypassed"):
        run_killed(lambda: (folder / "file").write_text("x"), 100)
