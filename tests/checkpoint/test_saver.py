"""Saves that fail, saves that are fenced off, and training that goes on meanwhile."""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from air_hpc.checkpoint.ranks import Ranks
from air_hpc.checkpoint.saver import Saver, SavesFail
from air_hpc.config.spec import CheckpointSpec
from air_hpc.plan.types import Mesh
from air_hpc.rundir.commit import committed_steps, find_candidates
from air_hpc.rundir.fence import Fenced, Token, claim_next_attempt, record_inherited
from air_hpc.rundir.layout import RunDir, create_run_dir
from air_hpc.session.session import Session
from tests.torch_ranks import join_world, run_ranks

pytestmark = pytest.mark.torch
SPEC = CheckpointSpec(keep_last=2, keep_every_steps=10)


def saver_of(rank: int, rendezvous: str, run_path: str, size: int, token: str) -> Saver:
    world = join_world(rank, rendezvous, Mesh(dp_replicate=size))
    session = Session.standalone(
        RunDir(Path(run_path)), rank=rank, world_size=size, token=Token.parse(token)
    )
    ranks = Ranks(rank, size, world.device, world.control)
    return Saver(session, ranks, SPEC, {"note": "test"})


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


def fail_always(rank: int, rendezvous: str, run_path: str, token: str) -> tuple[int, str]:
    saver = saver_of(rank, rendezvous, run_path, 2, token)
    step = 0
    with CannotWrite(rank == 1):
        try:
            while step < 9:
                step += 1
                saver.save(step, state_of(rank))
        except SavesFail as error:
            return step, str(error)
    raise AssertionError("no save failed")


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


def test_the_third_failure_in_a_row_ends_every_rank_at_the_same_step(tmp_path: Path) -> None:
    run, token = new_run(tmp_path)
    first, second = run_ranks(2, fail_always, str(run.path), token)
    assert first == second
    assert first[0] == 4  # the third outcome is looked at where the fourth save begins
    assert "3 saves in a row failed, the last at step 3: rank 1" in first[1]
    assert committed_steps(run) == []


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
    assert run_ranks(1, save_behind_a_queue, str(run.path), token) == [(100.0, 0.0)]


def test_a_save_without_a_place_to_write_fails_on_every_rank(tmp_path: Path) -> None:
    run, token = new_run(tmp_path)
    first, second = run_ranks(2, save_without_a_place, str(run.path), token)
    assert first == second
    assert "NotADirectoryError" in first
