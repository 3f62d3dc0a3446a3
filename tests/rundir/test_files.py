"""Atomic writes, layout and modes, a full disk, and the writers of ledger and spool."""

from __future__ import annotations

import contextlib
import errno
import grp
import math
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from air_hpc.errors import BadInput, EnvironmentFailure
from air_hpc.rundir import spool as spool_module
from air_hpc.rundir.atomic import make_exclusive_dir, remove_tree, write_atomic, write_file
from air_hpc.rundir.commit import abort_save, begin_save, commit_save, digest_file
from air_hpc.rundir.events import LedgerWriter, read_ledger, record
from air_hpc.rundir.fence import Token, claim
from air_hpc.rundir.layout import (
    SHARED_DIR,
    RunDir,
    create_run_dir,
    list_runs,
    make_shared_dir,
    open_run_dir,
    runs_dir_problems,
)
from air_hpc.rundir.spool import (
    SpoolWriter,
    effective_samples,
    iterate_samples,
    read_spool,
    spool_files,
    spool_path,
)
from tests.crash import run_killed
from tests.rundir.writers import attempt, newest, start

# -- atomic --------------------------------------------------------------------------------------


def test_a_killed_replacement_leaves_the_old_bytes_or_the_new_ones(folder: Path) -> None:
    path = folder / "file"
    old, new = b"old" * 100, b"new" * 5000
    calls, seen = 0, set()
    while True:
        write_atomic(path, old)
        killed = run_killed(lambda: write_atomic(path, new), calls)
        seen.add(path.read_bytes())
        if not killed:
            break
        calls += 1
    assert seen == {old, new}


def test_a_replacement_that_fails_leaves_no_trace(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "file"
    write_atomic(path, b"old")

    def fails(source: object, target: object) -> None:
        raise OSError(errno.EDQUOT, "quota")

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match="quota"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in folder.iterdir()] == ["file"]


def test_a_new_file_never_replaces_one(folder: Path) -> None:
    write_file(folder / "file", b"1")
    with pytest.raises(FileExistsError):
        write_file(folder / "file", b"2")


def test_an_exclusive_directory_is_made_once(folder: Path) -> None:
    assert make_exclusive_dir(folder / "d")
    assert not make_exclusive_dir(folder / "d")
    remove_tree(folder / "d")
    remove_tree(folder / "d")
    assert list(folder.iterdir()) == []


# -- layout --------------------------------------------------------------------------------------


def _modes(run: RunDir) -> set[int]:
    folders = [run.path, *(path for path in run.path.rglob("*") if path.is_dir())]
    return {stat.S_IMODE(path.stat().st_mode) for path in folders}


@pytest.fixture(params=[0o022, 0o077, 0o002, 0o000])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_what_a_run_makes_is_its_owners_alone(folder: Path, umask: int) -> None:
    run = create_run_dir(folder / "runs", "r")
    attempt(run)
    record(run, "login", "submitted")
    SpoolWriter(run, Token(1, 1)).close()
    assert _modes(run) == {0o700}
    files = {stat.S_IMODE(p.stat().st_mode) for p in run.path.rglob("*") if p.is_file()}
    assert files == {0o600}


def test_a_run_shared_with_a_group_is_the_groups_whatever_the_umask(
    folder: Path, umask: int
) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    run = create_run_dir(folder / "runs", "r", group=group)
    assert _modes(run) == {0o2770}
    assert run.path.stat().st_gid == os.getgid()


def test_a_group_that_does_not_exist_is_named_and_nothing_is_made(folder: Path) -> None:
    with pytest.raises(BadInput, match=r"launch\.share_group=no_such_group"):
        create_run_dir(folder / "runs", "r", group="no_such_group")
    assert not (folder / "runs" / "r").exists()


def test_a_taken_id_and_a_folder_that_is_none_are_told_apart(folder: Path) -> None:
    create_run_dir(folder / "runs", "r")
    with pytest.raises(BadInput, match="run id=r: exists already"):
        create_run_dir(folder / "runs", "r")
    (folder / "file").write_text("")
    with pytest.raises(EnvironmentFailure, match="set runs_dir to a folder"):
        create_run_dir(folder / "file", "r")


def test_runs_are_listed_and_opened_by_their_frozen_spec(folder: Path) -> None:
    assert list_runs(folder / "absent") == []
    for name in ("b", "a", "unfinished"):
        run = create_run_dir(folder, name)
        if name != "unfinished":
            run.run_yaml.write_text("x")
    assert [run.run_id for run in list_runs(folder)] == ["a", "b"]
    assert open_run_dir(folder / "a").run_id == "a"
    with pytest.raises(BadInput, match="not a run directory"):
        open_run_dir(folder / "unfinished")


# -- a full disk ---------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    where = tmp_path / "small"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def _fill(folder: Path) -> Path:
    """Take every byte that is left."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return path


def test_a_save_on_a_full_disk_commits_nothing_and_leaves_the_older_one(small_disk: Path) -> None:
    run = create_run_dir(small_disk, "r")
    attempt(run)
    token, _ = start(run)
    folder = begin_save(run, token, 20)
    with pytest.raises(OSError, match="No space left"):
        write_file(folder / "big.bin", bytes(2**21))
    abort_save(folder)
    assert newest(run) == 10
    assert [path.name for path in run.checkpoints_dir.iterdir()] == ["step-10"]
    assert attempt(run) == [20], "the space was not given back"


def test_a_disk_that_fills_up_before_the_manifest_commits_nothing(small_disk: Path) -> None:
    run = create_run_dir(small_disk, "r")
    attempt(run)
    token, _ = start(run)
    folder = begin_save(run, token, 20)
    write_file(folder / "a.bin", b"x")
    files = {"a.bin": digest_file(folder / "a.bin")}
    filler = _fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        commit_save(run, token, 20, files)
    assert newest(run) == 10
    filler.unlink()
    commit_save(run, token, 20, files)
    assert newest(run) == 20


def test_the_ledger_says_that_the_disk_is_full_and_goes_on_when_it_is_not(
    small_disk: Path,
) -> None:
    run = create_run_dir(small_disk, "r")
    with LedgerWriter(run, "agent") as ledger:
        ledger.append("submitted")
        filler = _fill(small_disk)
        with pytest.raises(OSError, match="No space left"):
            ledger.append("measured", text="x" * 9000)  # some of it fits into the last page
        filler.unlink()
        ledger.append("attempt_started")
    read = read_ledger(run)
    assert [event.kind for event in read.events] == ["submitted", "attempt_started"]
    assert read.unreadable_lines == 1


def test_metrics_on_a_full_disk_wait_and_are_neither_lost_nor_doubled(small_disk: Path) -> None:
    run = create_run_dir(small_disk, "r")
    token = Token(1, 1)
    spool = SpoolWriter(run, token, interval_s=0.0)
    filler = _fill(small_disk)
    for step in range(300):  # some hundred bytes still fit into the file's page
        spool.log(step, {"loss": 1.0})
    with pytest.raises(OSError, match="No space left"):
        spool.flush()
    filler.unlink()
    spool.log(300, {"loss": 1.0})
    spool.close()
    samples, _ = read_spool(spool_path(run, token))
    assert [sample.step for sample in samples] == list(range(301))


# -- the ledger's file ---------------------------------------------------------------------------


def test_a_killed_append_loses_no_event_before_it_and_none_after(run: RunDir) -> None:
    def append(step: int) -> None:
        with LedgerWriter(run, "agent") as ledger:
            ledger.append("checkpoint_committed", Token(1, 1), step=step)

    append(0)
    calls = 0
    while run_killed(lambda step=calls + 1: append(step), calls):
        append(-calls)
        calls += 1
    read = [event.facts["step"] for event in read_ledger(run).events]
    assert set(read) >= {0, calls + 1, *range(-calls + 1, 1)}
    with LedgerWriter(run, "agent") as ledger:
        written = ledger.append("signal", Token(1, 1), name="TERM", node="n1")
    assert read_ledger(run).events[-1] == written


def test_a_writer_and_a_reader_agree(run: RunDir) -> None:
    times = iter([5.0, 3.0, 4.0])
    with LedgerWriter(run, "agent", clock=lambda: next(times)) as ledger:
        for kind in ("one", "two", "three"):
            ledger.append(kind, path=Path("/x"), text="é\n")
        ledger.close()
    record(run, "login", "later")
    events = read_ledger(run).events
    assert [event.kind for event in events] == ["one", "two", "three", "later"]
    assert events[0].facts == {"path": "/x", "text": "é\n"}


# -- the spool -----------------------------------------------------------------------------------


def test_a_kill_loses_nothing_that_was_flushed(run: RunDir) -> None:
    token = Token(1, 1)
    pid = os.fork()
    if pid == 0:
        spool = SpoolWriter(run, token, interval_s=1e9)
        for step in range(5):
            spool.log(step, {"loss": float(step)})
        spool.flush()
        spool.log(5, {"loss": 5.0})
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert [sample.step for sample in iterate_samples(run)] == [0, 1, 2, 3, 4]


def test_a_step_is_written_when_the_interval_has_passed(run: RunDir) -> None:
    now = [0.0]
    spool = SpoolWriter(run, Token(1, 1), interval_s=10.0, clock=lambda: now[0])
    path = spool_path(run, Token(1, 1))
    spool.log(1, {"a": 1.0})
    now[0] = 9.0
    spool.log(2, {"a": 1.0})
    assert path.stat().st_size == 0
    now[0] = 10.0
    spool.log(3, {"a": 1.0})
    samples, end = read_spool(path)
    assert [(sample.step, sample.time) for sample in samples] == [(1, 0.0), (2, 9.0), (3, 10.0)]
    assert end == path.stat().st_size
    spool.close()
    spool.close()


def test_numbers_that_are_none_come_back(run: RunDir) -> None:
    spool = SpoolWriter(run, Token(1, 1))
    spool.log(1, {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "tiny": 5e-324})
    spool.close()
    (sample,) = iterate_samples(run)
    assert math.isnan(sample.metrics["nan"])
    others = {key: value for key, value in sample.metrics.items() if key != "nan"}
    assert others == {"inf": math.inf, "minus": -math.inf, "tiny": 5e-324}
    for line in spool_path(run, Token(1, 1)).read_text().splitlines():
        assert "NaN" not in line, "not JSON to other readers"
        assert "Infinity" not in line, "not JSON to other readers"


def test_a_torn_last_line_is_read_once_it_is_whole(run: RunDir) -> None:
    path = spool_path(run, Token(1, 1))
    line = b'{"step": %d, "time": 1, "metrics": {"a": 1}}\n'
    path.write_bytes(line % 1 + (line % 2)[:10])
    samples, offset = read_spool(path)
    assert [sample.step for sample in samples] == [1]
    path.write_bytes(line % 1 + line % 2 + b"\x00\xff garbage\n" + line % 3)
    samples, offset = read_spool(path, offset)
    assert [sample.step for sample in samples] == [2, 3]
    assert read_spool(path, offset) == ([], offset)
    assert read_spool(path.with_name("9.9.jsonl"), 7) == ([], 7)


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": Infinity, "time": 1, "metrics": {}}',
        b'{"step": 1, "time": 1' + b"0" * 400 + b', "metrics": {}}',
        b'{"step": 1, "time": 1, "metrics": {"a": 1' + b"0" * 400 + b"}}",
        b'{"step": 1, "time": 1, "metrics": {"a": "high"}}',
        b'{"step": 1, "time": 1, "metrics": [1]}',
        b'{"step": 1, "time": 1}',
        b"[" * 100_000,
        b"7",
    ],
)
def test_a_line_that_is_no_sample_is_skipped(run: RunDir, line: bytes) -> None:
    path = spool_path(run, Token(1, 1))
    path.write_bytes(line + b'\n{"step": 2, "time": 1, "metrics": {"a": 1}}\n')
    assert [sample.step for sample in read_spool(path)[0]] == [2]


def test_for_a_step_the_newest_generation_that_trained_it_counts(run: RunDir) -> None:
    for token, steps in {
        Token(1, 1): range(1, 51),  # committed at 40, lost
        Token(2, 1): range(41, 61),  # committed at 20 only after the 40 was found bad
        Token(2, 2): range(21, 31),
        Token(10, 1): range(31, 33),
        Token(11, 1): range(0),  # began, logged nothing
    }.items():
        spool = SpoolWriter(run, token)
        for step in steps:
            spool.log(step, {"by": token.attempt + token.generation / 10})
        spool.close()
    (run.metrics_dir / "notes.jsonl").write_text("{}\n")
    counted = effective_samples(run)
    assert list(counted) == list(range(1, 33))
    owners = [str(sample.token) for sample in counted.values()]
    assert owners == ["1.1"] * 20 + ["2.2"] * 10 + ["10.1"] * 2
    names = [path.name for path in spool_files(run)]
    assert names == ["1.1.jsonl", "2.1.jsonl", "2.2.jsonl", "10.1.jsonl", "11.1.jsonl"]
    assert [str(s.token) for s in iterate_samples(run)][-1] == "10.1"


def test_a_part_of_a_write_is_followed_by_the_rest(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """write(2) may take less than it was given."""
    write = os.write
    monkeypatch.setattr(spool_module.os, "write", lambda fd, data: write(fd, bytes(data)[:7]))
    spool = SpoolWriter(run, Token(1, 1))
    for step in range(3):
        spool.log(step, {"a": 1.0})
    spool.close()
    record(run, "agent", "submitted", text="é" * 50)
    claim(run, Token(1, 1))
    write_atomic(run.path / "file", b"0123456789" * 3)
    assert [sample.step for sample in iterate_samples(run)] == [0, 1, 2]
    assert read_ledger(run).events[0].facts == {"text": "é" * 50}
    assert (run.path / "file").read_bytes() == b"0123456789" * 3
    shutil.rmtree(run.path)


def test_a_runs_folder_is_judged_before_anything_is_made(tmp_path: Path) -> None:
    assert runs_dir_problems(tmp_path / "not" / "there" / "yet") == []
    assert runs_dir_problems(tmp_path) == []
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "file", tmp_path / "file" / "runs"):
        (problem,) = runs_dir_problems(wrong)
        assert (problem.key, problem.value) == ("runs_dir", str(wrong))
    (tmp_path / SHARED_DIR).touch()
    (problem,) = runs_dir_problems(tmp_path)
    assert problem.message == f"{tmp_path / SHARED_DIR} is no folder"
    assert not (tmp_path / "not").exists()


def test_what_a_users_runs_share_is_for_the_user_alone(tmp_path: Path) -> None:
    make_shared_dir(tmp_path / "a" / "runs")
    assert (tmp_path / "a" / "runs" / SHARED_DIR).stat().st_mode & 0o777 == 0o700
