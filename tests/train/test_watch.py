"""A loss that goes wrong in a real run: on every rank the same end, and a run that goes on."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from air_hpc.config.spec import CheckpointSpec, GuardSpec, RunSpec
from air_hpc.data.batches import Batches
from air_hpc.plan.types import Mesh
from air_hpc.rundir.commit import committed_steps, find_candidates, verify_fully
from air_hpc.rundir.fence import Token
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.spool import effective_samples
from air_hpc.session.page import Word
from air_hpc.session.session import Session
from tests.torch_ranks import join_world, run_ranks
from tests.train.runs import make_run, next_token, plan_for, small_spec, train_ranks

pytestmark = pytest.mark.torch
NAN = float("nan")
Ranges = tuple[tuple[int, int], ...]


def poison(patch: pytest.MonkeyPatch, bad: dict[int, float], rank: int) -> None:
    """Multiply the last rank's loss of the batches `bad`: NaN, or a factor."""
    from air_hpc.parallel import tensor

    now = {"batch": -1}
    whole, read = tensor.next_token_loss, Batches.step_batch

    def step_batch(self: Batches, step: int) -> Any:
        now["batch"] = self.batch_at(step)
        return read(self, step)

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        value = whole(logits, targets)
        factor = bad.get(now["batch"], 1.0) if rank == 1 else 1.0
        return value * factor if factor != 1.0 else value

    patch.setattr(Batches, "step_batch", step_batch)
    patch.setattr(tensor, "next_token_loss", loss)


def train_poisoned(
    rank: int,
    rendezvous: str,
    run_path: str,
    token: str,
    spec: RunSpec,
    bad: dict[int, float],
    resume_steps: tuple[int, ...] = (),
    skipped: Ranges = (),
    stop_after: int | None = None,
    on_gpu: bool = False,
) -> tuple[str, Any, list[tuple[Any, ...]]]:
    """How the loop ended, with which facts, and what the agent was told of alarms."""
    from air_hpc.train.guard import LossDiverged
    from air_hpc.train.loop import train

    plan = plan_for(spec, Mesh(dp_replicate=2))
    world = join_world(rank, rendezvous, plan.mesh)
    session = Session.standalone(
        RunDir(Path(run_path)),
        rank=rank,
        world_size=2,
        token=Token.parse(token),
        resume_steps=resume_steps,
    )
    session.env = replace(session.env, skipped_batches=skipped)
    told: list[tuple[Any, ...]] = []

    def note(kind: str, **facts: Any) -> None:
        if kind in ("loss_alarm", "batch_skipped"):
            told.append((str(kind), facts["step"], facts.get("action")))

    session.note = note  # type: ignore[method-assign]
    if stop_after is not None:
        session._page.write(Word.TARGET_STEP, stop_after)
        session._page.write(Word.STOP_FLAG, 1)
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, bad, rank)
        if on_gpu:
            as_on_a_gpu(patch)
        try:
            ended = train(session, spec, plan, world, 1e12)
        except LossDiverged as error:
            return "diverged", error.facts, told
    return "ended", (ended.step, ended.saved), told


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Numbers are looked at as late as on a GPU."""
    from air_hpc.train import loop

    class LateTrainer(loop.Trainer):
        def _numbers_are_at_hand(self) -> bool:
            return False

    patch.setattr(loop, "Trainer", LateTrainer)


def train_all(
    run: RunDir, spec: RunSpec, bad: dict[int, float], *more: Any
) -> tuple[str, Any, list[tuple[Any, ...]]]:
    """The end that all ranks came to, and what rank 0 told."""
    results = run_ranks(2, train_poisoned, str(run.path), next_token(run), spec, bad, *more)
    assert results[0][:2] == results[1][:2]
    assert results[1][2] == []
    first: tuple[str, Any, list[tuple[Any, ...]]] = results[0]
    return first


def guarded(steps: int = 9, log_interval: int = 1, **guard: Any) -> RunSpec:
    spec = small_spec(steps)
    train = replace(spec.train, guard=GuardSpec(**guard), log_interval_steps=log_interval)
    return replace(spec, train=train)


def losses(run: RunDir) -> dict[int, float]:
    return {s: sample.metrics["train/loss"] for s, sample in effective_samples(run).items()}


def all_finite(run: RunDir) -> Sequence[int]:
    """The committed steps; every one of them verifies and holds finite numbers only."""
    for checkpoint in find_candidates(run).usable:
        verify_fully(checkpoint)
    return committed_steps(run)


def test_a_rollback_goes_on_from_the_newest_checkpoint_past_the_batches_since(
    tmp_path: Path,
) -> None:
    spec = guarded(nonfinite="rollback")
    run, clean = make_run(tmp_path, "run"), make_run(tmp_path, "clean")
    how, facts, told = train_all(run, spec, {4: NAN})
    assert how == "diverged"
    assert facts == {
        "action": "rollback",
        "reason": "the loss is nan and the gradient's norm is nan",
        "bad_step": 5,
        "from_step": 3,
        "first_batch": 3,
        "last_batch": 4,
    }
    assert told == [("loss_alarm", 5, "rollback")]
    assert all_finite(run) == [3]
    skipped = ((facts["first_batch"], facts["last_batch"]),)
    assert train_all(run, spec, {4: NAN}, (3,), skipped) == ("ended", (9, True), [])
    # The run that never saw those batches from step 4 on.
    train_all(clean, spec, {}, (), skipped)
    assert losses(run) == losses(clean)
    assert list(losses(run)) == list(range(1, 10))


def test_a_late_look_finds_a_nan_before_the_next_save(tmp_path: Path) -> None:
    """As on a GPU, whose queue is not waited for; the loss is logged at the last step only."""
    spec = guarded(nonfinite="rollback", log_interval=100)
    run = make_run(tmp_path)
    how, facts, _ = train_all(run, spec, {5: NAN}, (), (), None, True)  # step 6 is saved
    assert (how, facts["bad_step"], facts["from_step"]) == ("diverged", 6, 3)
    assert "gradient" in facts["reason"]
    assert all_finite(run) == [3]
    how, facts, _ = train_all(run, spec, {6: NAN}, (3,), (), None, True)  # found in the step after
    assert (how, facts["bad_step"], facts["from_step"]) == ("diverged", 7, 6)
    how, facts, _ = train_all(run, spec, {7: NAN}, (6,), (), 8, True)  # a stop comes first
    assert (how, facts["bad_step"], facts["last_batch"]) == ("diverged", 8, 7)
    assert all_finite(run) == [6, 3]


def test_a_skipped_batch_leaves_the_weights_and_counts_its_step(tmp_path: Path) -> None:
    spec = guarded(nonfinite="skip", max_skips=2)
    run = make_run(tmp_path)
    how, end, told = train_all(run, spec, {2: NAN, 4: NAN})
    assert (how, end) == ("ended", (9, True))
    assert told == [
        ("loss_alarm", 3, "skip"),
        ("batch_skipped", 3, None),
        ("loss_alarm", 5, "skip"),
        ("batch_skipped", 5, None),
    ]
    assert all_finite(run) == [9, 6, 3]
    # The count comes with the checkpoint: one was skipped before step 3, one after.
    how, facts, _ = train_all(run, spec, {5: NAN, 7: NAN}, (3,))
    assert (how, facts["action"], facts["bad_step"]) == ("diverged", "stop", 8)


def test_a_run_that_only_logs_keeps_its_good_checkpoints_and_ends_without_the_others(
    tmp_path: Path,
) -> None:
    """Its states after the NaN were once saved, and retention took the good ones for them."""
    spec = guarded(12, nonfinite="log")
    spec = replace(spec, checkpoint=CheckpointSpec(interval_steps=3, keep_last=1))
    run = make_run(tmp_path)
    how, facts, told = train_all(run, spec, {4: NAN})
    assert (how, facts["action"], facts["from_step"]) == ("diverged", "stop", 3)
    assert told[:2] == [("loss_alarm", 5, "log"), ("loss_alarm", 6, "log")]
    assert all_finite(run) == [3]
    how, end, _ = train_all(run, spec, {4: NAN}, (3,), (), 7)  # stopped in between
    assert (how, end) == ("ended", (7, False))
    assert all_finite(run) == [3]


def test_a_spike_is_found_on_every_rank_although_one_saw_it(tmp_path: Path) -> None:
    spec = guarded(12, spike="rollback", spike_mads=5.0, window=8, max_rollbacks=1)
    run = make_run(tmp_path)
    how, facts, _ = train_all(run, spec, {7: 8.0})
    assert (how, facts["action"], facts["bad_step"]) == ("diverged", "rollback", 8)
    assert "deviations above the median" in facts["reason"]
    how, facts, _ = train_all(run, spec, {7: 8.0}, (6,))
    assert (how, facts["bad_step"]) == ("diverged", 8), "the losses came with the checkpoint"
    how, facts, _ = train_all(run, spec, {9: 8.0}, (6,), ((6, 7),))
    assert (how, facts["action"]) == ("diverged", "stop")
    assert "1 rollbacks were made (train.guard.max_rollbacks)" in facts["reason"]


def train_where_nothing_can_be_saved(
    rank: int, rendezvous: str, run_path: str, token: str, stop_after: int | None
) -> tuple[str, str]:
    from air_hpc.train import loop

    spec = small_spec(14)  # four saves fail before the last
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16384, limits[1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "LAST_PAUSE_S", 0.001)
        try:
            plan = plan_for(spec, Mesh(dp_replicate=2))
            ended = train_ranks(rank, rendezvous, run_path, token, spec, plan, (), stop_after)
        except Exception as error:
            return type(error).__name__, str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "ended", f"{ended.step} {ended.saved}"


def test_a_run_that_cannot_save_trains_to_its_end_and_only_there_it_fails(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    first, second = run_ranks(
        2, train_where_nothing_can_be_saved, str(run.path), next_token(run), None
    )
    assert first == second
    assert first[0] == "SavesFail"
    assert "after the last step 14 could not be saved in 5 tries" in first[1]
    stopped = run_ranks(2, train_where_nothing_can_be_saved, str(run.path), next_token(run), 7)
    assert stopped == [("ended", "7 False")] * 2
    assert committed_steps(run) == []
