"""A run that was stopped and resumed is the run that was not, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from air_hpc.config.spec import CheckpointSpec, ModelSpec, OptimizerSpec, RunSpec
from air_hpc.plan.types import Mesh, Plan
from air_hpc.rundir.commit import committed_steps, find_candidates, inheritable
from air_hpc.rundir.fence import Token, claim, record_inherited
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.spool import effective_samples
from air_hpc.train.loop import Ended
from tests.torch_ranks import run_ranks
from tests.train.runs import make_run, next_token, plan_for, small_spec, train_ranks

pytestmark = pytest.mark.torch
STEPS = 9


def attempt(
    run: RunDir,
    spec: RunSpec,
    plan: Plan,
    resume_steps: tuple[int, ...] = (),
    stop_after: int | None = None,
) -> Ended:
    token = next_token(run)
    results = run_ranks(
        plan.world_size,
        train_ranks,
        str(run.path),
        token,
        spec,
        plan,
        resume_steps,
        stop_after,
    )
    assert all(ended == results[0] for ended in results)
    ended: Ended = results[0]
    return ended


def curve(run: RunDir) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step that counts."""
    return {
        step: (sample.metrics["train/loss"], sample.metrics["train/grad_norm"])
        for step, sample in effective_samples(run).items()
    }


def digests(run: RunDir, step: int) -> list[str]:
    """The digests of the shards of a checkpoint."""
    [checkpoint] = [c for c in find_candidates(run).usable if c.step == step]
    return [r.sha256 for name, r in sorted(checkpoint.files.items()) if name != ".metadata"]


@pytest.mark.parametrize(
    ("mesh", "batch"),
    [
        (Mesh(), 8),
        (Mesh(dp_replicate=3), 12),
        (Mesh(dp_shard=2), 8),
        pytest.param(Mesh(tp=2), 8, marks=pytest.mark.full),
        (Mesh(pp=2), 8),
    ],
    ids=["single", "ddp3", "fsdp2", "tp2", "pp2"],
)
def test_a_stopped_and_resumed_run_equals_the_undisturbed_one_bit_for_bit(
    tmp_path: Path, mesh: Mesh, batch: int
) -> None:
    spec = small_spec(STEPS)
    spec = replace(spec, train=replace(spec.train, global_batch_size=batch))
    plan = plan_for(spec, mesh)
    whole, parted = make_run(tmp_path, "whole"), make_run(tmp_path, "parted")
    assert attempt(whole, spec, plan) == Ended(STEPS, finished=True, saved=True)
    # Stopped inside the first epoch, resumed across its end.
    assert attempt(parted, spec, plan, stop_after=4) == Ended(4, finished=False, saved=True)
    assert attempt(parted, spec, plan, resume_steps=(4, 3)).finished
    assert curve(parted) == curve(whole)
    assert list(curve(whole)) == list(range(1, STEPS + 1))
    assert digests(parted, STEPS) == digests(whole, STEPS)


def test_a_corrupt_newest_checkpoint_is_passed_over_for_the_next_older(tmp_path: Path) -> None:
    spec = small_spec(STEPS)
    plan = plan_for(spec, Mesh(dp_replicate=2))
    whole, hurt = make_run(tmp_path, "whole"), make_run(tmp_path, "hurt")
    attempt(whole, spec, plan)
    attempt(hurt, spec, plan, stop_after=7)
    flip_a_byte(hurt.checkpoints_dir / "step-7" / "__1_0.distcp")
    assert committed_steps(hurt) == [7, 6, 3]
    assert attempt(hurt, spec, plan, resume_steps=(7, 6, 3)).finished
    assert curve(hurt) == curve(whole)
    assert digests(hurt, STEPS) == digests(whole, STEPS)


def test_a_restart_in_the_same_attempt_passes_over_what_was_truncated_corrupted_and_lost(
    tmp_path: Path,
) -> None:
    """The harm comes after the coordinator looked: each is found by who reads it."""
    spec = small_spec(13)
    plan = plan_for(spec, Mesh(dp_replicate=2))
    whole, hurt = make_run(tmp_path, "whole"), make_run(tmp_path, "hurt")
    attempt(whole, spec, plan)
    attempt(hurt, spec, plan, stop_after=12)
    second = Token(1, 2)
    claim(hurt, second)
    usable = find_candidates(hurt).usable
    record_inherited(hurt, second, inheritable(usable))
    steps = tuple(checkpoint.step for checkpoint in usable)
    assert steps == (12, 9, 6, 3)
    shard = hurt.checkpoints_dir / "step-12" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-100])
    flip_a_byte(hurt.checkpoints_dir / "step-9" / "__1_0.distcp")
    (hurt.checkpoints_dir / "step-6" / "__1_0.distcp").unlink()
    ranks = run_ranks(2, train_ranks, str(hurt.path), str(second), spec, plan, steps)
    assert all(ended.finished for ended in ranks)
    assert curve(hurt) == curve(whole)
    assert digests(hurt, 13) == digests(whole, 13)


def test_a_run_whose_checkpoints_are_all_bad_does_not_begin_again(tmp_path: Path) -> None:
    spec = small_spec(3)
    plan = plan_for(spec, Mesh())
    run = make_run(tmp_path)
    attempt(run, spec, plan)
    flip_a_byte(run.checkpoints_dir / "step-3" / "__0_0.distcp")
    with pytest.raises(AssertionError, match=r"NoUsableCheckpoint.*step-3.*does not match"):
        attempt(run, spec, plan, resume_steps=(3,))


def test_a_checkpoint_that_cannot_be_read_now_is_not_passed_over(tmp_path: Path) -> None:
    spec = small_spec(3)
    plan = plan_for(spec, Mesh(dp_replicate=2))
    run = make_run(tmp_path)
    attempt(run, spec, plan)
    manifest = run.checkpoints_dir / "step-3" / "manifest.json"
    manifest.unlink()
    manifest.symlink_to(manifest)  # ELOOP, as EIO and ESTALE: it is there and cannot be read
    with pytest.raises(AssertionError, match=r"CheckpointUnreadable.*step-3"):
        attempt(run, spec, plan, resume_steps=(3,))


def test_other_data_is_refused(tmp_path: Path) -> None:
    spec = small_spec(3)
    run = make_run(tmp_path)
    attempt(run, spec, plan_for(spec, Mesh()))
    other = replace(spec, train=replace(spec.train, seed=1, steps=4))
    with pytest.raises(AssertionError, match=r"train\.seed=1: step-3 was trained with another"):
        attempt(run, other, plan_for(other, Mesh()), resume_steps=(3,))


def test_a_checkpoint_loads_on_another_mesh(tmp_path: Path) -> None:
    model = ModelSpec(dim=16, layers=2, heads=2, kv_heads=2, ffn_dim=32, vocab_size=256)
    sgd = OptimizerSpec(name="sgd", lr=0.1)
    spec = small_spec(STEPS, model=model, optimizer=sgd)
    whole, moved = make_run(tmp_path, "whole"), make_run(tmp_path, "moved")
    attempt(whole, spec, plan_for(spec, Mesh()))
    attempt(moved, spec, plan_for(spec, Mesh(dp_shard=2)), stop_after=4)
    attempt(moved, spec, plan_for(spec, Mesh(dp_replicate=2, dp_shard=2), 1), (4,), stop_after=6)
    attempt(moved, spec, plan_for(spec, Mesh(pp=2), 2), (6,), stop_after=8)
    attempt(moved, spec, plan_for(spec, Mesh(), 4), (8,))
    for step, (loss, norm) in curve(whole).items():
        assert curve(moved)[step] == pytest.approx((loss, norm), abs=2e-5), step


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_a_run_goes_on_with_fewer_and_more_ranks_with_its_whole_state(
    tmp_path: Path, axis: str
) -> None:
    """4, then 2, then 3 ranks, the global batch kept by accumulation; the optimizer is AdamW,
    whose moments would tell. Sums over ranks are rounded in another order: 2e-4 of the loss."""
    model = ModelSpec(dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=32, vocab_size=256)
    spec = small_spec(STEPS, model=model)
    spec = replace(spec, train=replace(spec.train, global_batch_size=12))
    whole, moved = make_run(tmp_path, "whole"), make_run(tmp_path, "moved")
    attempt(whole, spec, plan_for(spec, Mesh(), 4))
    attempt(moved, spec, plan_for(spec, Mesh(**{axis: 4}), 1), stop_after=3)
    attempt(moved, spec, plan_for(spec, Mesh(**{axis: 2}), 2), (3,), stop_after=6)
    attempt(moved, spec, plan_for(spec, Mesh(**{axis: 3}), 2), (6,))
    assert list(curve(moved)) == list(range(1, STEPS + 1))
    for step, (loss, norm) in curve(whole).items():
        assert curve(moved)[step] == pytest.approx((loss, norm), rel=2e-4), step


@pytest.mark.parametrize("mesh", [Mesh(dp_replicate=2), Mesh(pp=2)], ids=["ddp2", "pp2"])
def test_an_automatic_interval_saves_at_one_step_on_all_ranks(tmp_path: Path, mesh: Mesh) -> None:
    """Every step lasts longer than the interval, so each log step is one to save at; the ranks
    would wait for each other for ever if they did not agree."""
    spec = small_spec(STEPS)
    often = CheckpointSpec(
        interval_steps="auto", min_interval_s=1e-6, max_interval_s=1e-6, keep_last=100
    )
    spec = replace(spec, checkpoint=often, train=replace(spec.train, log_interval_steps=2))
    plan = plan_for(spec, mesh)
    auto, fixed = make_run(tmp_path, "auto"), make_run(tmp_path, "fixed")
    attempt(auto, spec, plan)
    attempt(fixed, replace(spec, checkpoint=CheckpointSpec(interval_steps=100)), plan)
    assert committed_steps(auto) == [9, 8, 6, 4, 2]
    assert curve(auto) == curve(fixed)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
