"""Saves that fail, saves that are fenced off, and training that goes on meanwhile."""

from __future__ import annotations

import resource
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from air_hpc.checkpoint.ranks import Ranks
from air_hpc.checkpoint.saver import SaveOutcome, Saver
from air_hpc.config.spec import CheckpointSpec
from air_hpc.plan.types import Mesh
from air_hpc.rundir.commit import committed_steps, find_candidates, verify_fully
from air_hpc.rundir.fence import Fenced, Token, claim_next_attempt, record_inherited
from air_hpc.rundir.layout import RunDir, create_run_dir
from air_hpc.session.session import Session
from tests.torch_ranks import join_world, run_ranks

pytestmark = pytest.mark.torch
SPEC = CheckpointSpec(keep_last=2, keep_every_steps=10)


def saver_of(
    rank: int,
    rendezvous: str,
    run_path: str,
    size: int,
    token: str,
    spec: CheckpointSpec = SPEC,
) -> Saver:
    world = join_world(rank, rendezvous, Mesh(dp_replicate=size))
    session = Session.standalone(
        RunDir(Path(run_path)), rank=rank, world_size=size, token=Token.parse(token)
    )
    ranks = Ranks(rank, size, world.device, world.control)
    return Saver(session, ranks, spec, {"note": "test"})


def state_of(rank: int, value: float = 1.0) -> dict[str, Any]:
    return {"model": {f"w{rank}": torch.full((50_000,), value)}}


class CannotWrite:
    """No file of this process may grow: what a full disk or quota does, without one."""

    def __init__(self, active: bool) -> None:
        self.active = active

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.active:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, self.before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def fail_once_then_save(
    rank: int, rendezvous: str, run_path: str, token: str
) -> tuple[str | None, str | None]:
    saver = saver_of(rank, rendezvous, run_path, 2, token)
    with CannotWrite(rank == 1):
        failed = saver.save(1, state_of(rank), wait=True)
    worked = saver.save(2, state_of(rank), wait=True)
    assert failed is not None
    assert worked is not None
    return failed.reason, worked.reason


def fail_five_times(
    rank: int, rendezvous: str, run_path: str, token: str
) -> list[SaveOutcome | None]:
    saver = saver_of(rank, rendezvous, run_path, 2, token)
    with CannotWrite(rank == 1):
        outcomes = [saver.save(step, state_of(rank), wait=True) for step in range(1, 6)]
    return [*outcomes, saver.save(6, state_of(rank), wait=True)]


def save_on_a_small_disk(
    rank: int, rendezvous: str, run_path: str, token: str, filled: bool
) -> list[tuple[Any, ...]]:
    """Saves of 0.4 MB where there is room for three; what the agent is told of the failures."""
    spec = replace(SPEC, keep_last=100, keep_every_steps=None)
    saver = saver_of(rank, rendezvous, run_path, 2, token, spec)
    told: list[tuple[Any, ...]] = []

    def note(kind: str, **facts: Any) -> None:
        if kind == "save_failed":
            assert "No space left" in facts["reason"]
            told.append((facts["step"], facts["removed_step"], facts["tried_again"]))

    saver._session.note = note  # type: ignore[method-assign]
    ballast = Path(run_path).parent / "ballast"
    for step in (1, 2, 3, 4, 5):
        if filled and step == 2 and rank == 0:
            fill(ballast)
        saver.save(step, state_of(rank), wait=True)
        if filled and step == 3 and rank == 0:
            ballast.unlink()
    return told


def fill(path: Path) -> None:
    """Take every byte that the file system has left."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def save_what_is_not_finite(
    rank: int, rendezvous: str, run_path: str, token: str
) -> list[SaveOutcome | None]:
    saver = saver_of(rank, rendezvous, run_path, 2, token)
    state = state_of(rank)
    outcomes = [saver.save(10, state, wait=True)]
    for step, value in ((11, float("nan")), (12, float("inf"))):
        if rank == 1:
            state["model"]["w1"][-1] = value
        outcomes.append(saver.save(step, state, wait=True))
    state["model"][f"w{rank}"].fill_(3e38)  # huge, and a sum of them is no number any more
    outcomes.append(saver.save(13, state, wait=True))
    return outcomes


def find_out_before_the_next_step(
    rank: int, rendezvous: str, run_path: str, token: str
) -> tuple[str, int | None]:
    saver = saver_of(rank, rendezvous, run_path, 2, token)
    saver.check()
    with CannotWrite(rank == 1):
        saver.save(1, state_of(rank))
        assert saver._pending is not None
        saver._pending.exception()  # it is over
    saver.check()  # a save that failed is no reason to end
    if rank == 0:
        claim_next_attempt(RunDir(Path(run_path)))
    saver.save(2, state_of(rank))
    saver._pending.exception()
    with pytest.raises(Fenced) as caught:
        saver.check()
    return str(caught.value), saver.newest_step


def save_when_fenced(rank: int, rendezvous: str, run_path: str, token: str) -> str:
    saver = saver_of(rank, rendezvous, run_path, 2, token)
    if rank == 0:
        claim_next_attempt(RunDir(Path(run_path)))
    with pytest.raises(Fenced) as caught:
        saver.save(1, state_of(rank), wait=True)
    return str(caught.value)


def save_often_and_change(rank: int, rendezvous: str, run_path: str, token: str) -> None:
    saver = saver_of(rank, rendezvous, run_path, 1, token)
    state = state_of(rank, 0.0)
    for step in (10, 11, 12, 13):
        state["model"]["w0"].fill_(step)
        saver.save(step, state)
        state["model"]["w0"].fill_(-1.0)  # training goes on before the file is written
    saver.wait()
    saver.close()


def save_without_a_place(rank: int, rendezvous: str, run_path: str, token: str) -> str | None:
    saver = saver_of(rank, rendezvous, run_path, 2, token)
    checkpoints = RunDir(Path(run_path)).checkpoints_dir
    if rank == 0:
        checkpoints.rmdir()
        checkpoints.write_text("no directory")
    outcome = saver.save(1, state_of(rank), wait=True)
    assert outcome is not None
    return outcome.reason


def save_behind_a_queue(
    rank: int, rendezvous: str, run_path: str, token: str
) -> tuple[float, float]:
    """The time that a device took to come to its end, and what the save counts as its own."""
    saver = saver_of(rank, rendezvous, run_path, 1, token)
    saver._ranks = replace(saver._ranks, device=torch.device("cuda", 0))
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda device: now.append(now.pop() + 100.0))
        clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
        patch.setattr("air_hpc.checkpoint.saver.time", clock)
        saver.save(1, state_of(rank), wait=True)
    return now[0], saver.blocked_s


def new_run(tmp_path: Path) -> tuple[RunDir, str]:
    run = create_run_dir(tmp_path, "run")
    token = claim_next_attempt(run)
    record_inherited(run, token, {})
    return run, str(token)


def test_a_rank_that_cannot_write_fails_the_save_everywhere_and_the_next_one_works(
    tmp_path: Path,
) -> None:
    run, token = new_run(tmp_path)
    results = run_ranks(2, fail_once_then_save, str(run.path), token)
    assert results[0] == results[1]
    reason, worked = results[0]
    assert reason.startswith("rank 1: ")
    assert worked is None
    assert [path.name for path in run.checkpoints_dir.iterdir()] == ["step-2"]


def test_a_run_that_cannot_save_goes_on_however_often_it_fails(tmp_path: Path) -> None:
    run, token = new_run(tmp_path)
    first, second = run_ranks(2, fail_five_times, str(run.path), token)
    assert first == second
    assert all("rank 1" in outcome.reason for outcome in first[:5])
    assert first[5] == SaveOutcome(6)
    assert committed_steps(run) == [6]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that holds three small checkpoints."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_on_a_full_disk_the_oldest_checkpoint_goes_and_the_save_is_tried_again(
    small_disk: Path,
) -> None:
    run, token = new_run(small_disk)
    told, others = run_ranks(2, save_on_a_small_disk, str(run.path), token, False)
    assert told == [(4, 1, True), (5, 2, True)]
    assert others == []
    assert committed_steps(run) == [5, 4, 3]
    for checkpoint in find_candidates(run).usable:
        verify_fully(checkpoint)


def test_what_no_removal_helps_ends_neither_the_run_nor_its_last_checkpoint(
    small_disk: Path,
) -> None:
    """A disk that somebody else fills, and the only checkpoint on it."""
    run, token = new_run(small_disk)
    told, _ = run_ranks(2, save_on_a_small_disk, str(run.path), token, True)
    assert told == [(2, None, False), (3, None, False)]
    assert committed_steps(run) == [5, 4, 1]
    assert not list(run.checkpoints_dir.glob(".saving-*"))


def test_a_state_with_a_nan_or_inf_is_never_committed(tmp_path: Path) -> None:
    run, token = new_run(tmp_path)
    first, second = run_ranks(2, save_what_is_not_finite, str(run.path), token)
    assert first == second
    assert [outcome.not_finite for outcome in first] == [False, True, True, False]
    assert "in w1" in first[1].reason
    assert committed_steps(run) == [13, 10]


def test_what_ends_a_run_is_raised_before_the_next_step_and_a_failed_save_is_not(
    tmp_path: Path,
) -> None:
    run, token = new_run(tmp_path)
    for text, newest in run_ranks(2, find_out_before_the_next_step, str(run.path), token):
        assert "fenced off by 2.1" in text
        assert newest is None
    assert not list(run.checkpoints_dir.glob("step-*"))


def test_a_fenced_save_commits_nothing_and_is_raised_on_every_rank(tmp_path: Path) -> None:
    run, token = new_run(tmp_path)
    for text in run_ranks(2, save_when_fenced, str(run.path), token):
        assert "fenced off by 2.1" in text
    assert not list(run.checkpoints_dir.glob("step-*"))


def test_a_save_holds_the_state_of_its_step_and_retention_keeps_its_share(tmp_path: Path) -> None:
    run, token = new_run(tmp_path)
    run_ranks(1, save_often_and_change, str(run.path), token)
    assert committed_steps(run) == [13, 12, 10]  # the last two and every tenth
    for checkpoint in find_candidates(run).usable:
        state = {"model": {"w0": torch.zeros(50_000)}}
        torch.distributed.checkpoint.load(state, checkpoint_id=checkpoint.path, no_dist=True)
        assert torch.equal(state["model"]["w0"], torch.full((50_000,), float(checkpoint.step)))
        assert checkpoint.facts == {"note": "test"}


def test_what_a_device_has_still_to_train_is_no_cost_of_a_save(tmp_path: Path) -> None:
    run, token = new_run(tmp_path)
    [(took_s, counted_s)] = run_ranks(1, save_behind_a_queue, str(run.path), token)
    assert took_s >= 100
    assert counted_s == 0


def test_a_save_without_a_place_to_write_fails_on_every_rank(tmp_path: Path) -> None:
    run, token = new_run(tmp_path)
    first, second = run_ranks(2, save_without_a_place, str(run.path), token)
    assert first == second
    assert "NotADirectoryError" in first
