"""parallelism=auto: nothing that was tried and fits is faster, and what was given stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from air_hpc.config.compose import Composer
from air_hpc.config.spec import RunSpec
from air_hpc.plan.candidate import TIE, Found
from air_hpc.plan.make import make_plan
from air_hpc.plan.search import decided, given_keys, resolve_auto, search
from air_hpc.plan.step_time import StepTime, step_time

SHARED = Composer()
H100 = (
    "cluster=slurm",
    "parallelism=auto",
    "accelerator=h100_sxm",
    "launch.devices_per_node=8",
    "train.precision=bf16",
    "data.sequence_length=8192",
)
EIGHT_B = (*H100, "model=llama_8b", "train.global_batch_size=64")


def spec_of(*overrides: str) -> RunSpec:
    return SHARED.compose(list(overrides))


def found_of(*overrides: str) -> tuple[RunSpec, Found]:
    spec = spec_of(*overrides)
    return spec, search(spec, given_keys(spec, overrides))


def test_the_winner_is_valid_fits_and_is_what_the_plan_says() -> None:
    words = EIGHT_B
    spec = spec_of(*words)
    chosen, found, problems = resolve_auto(spec, words)
    assert problems == []
    assert found is not None
    assert found.best is not None
    plan, problems = make_plan(chosen, to_run=False)
    assert plan is not None, problems
    assert plan.mesh == found.best.mesh
    assert plan.micro_batch_size == found.best.micro_batch_size
    assert plan.memory_per_rank.total_bytes == found.best.memory_bytes <= 80e9
    assert plan.step_time_s == pytest.approx(found.best.step_s)


def test_no_layout_by_hand_that_fits_is_faster() -> None:
    spec, found = found_of(*EIGHT_B)
    assert found.best is not None
    assert found.best.step_s is not None
    tried = 0
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4):
            for policy in ("none", "ops", "full"):
                for micro in (1, 2):
                    if 8 % (tp * pp):
                        continue
                    parts = replace(
                        spec.parallelism, tp=tp, pp=pp, recompute=policy, dp_shard="auto",
                        dp_replicate=1,
                    )  # fmt: skip
                    train = replace(spec.train, micro_batch_size=micro)
                    plan, _ = make_plan(replace(spec, parallelism=parts, train=train), to_run=False)
                    if plan is None or plan.memory_per_rank.total_bytes > 80e9:
                        continue
                    tried += 1
                    assert plan.step_time_s is not None
                    assert plan.step_time_s >= found.best.step_s * (1 - TIE)
    assert tried > 10


def test_the_next_two_are_no_faster_but_for_a_tie() -> None:
    _, found = found_of(*EIGHT_B)
    times = [one.step_s or 0.0 for one in found.ranked]
    assert len(times) == 3
    assert times[0] <= times[1] * (1 + TIE)
    assert times[1] <= times[2]
    assert len({one.overrides() for one in found.ranked}) == 3


@pytest.mark.parametrize(
    "given",
    [
        "parallelism.tp=4",
        "parallelism.pp=2",
        "parallelism.recompute=full",
        "parallelism.dp_shard=2",
        "parallelism.reshard_after_forward=true",
        "train.micro_batch_size=1",
    ],
)
def test_a_key_that_is_given_stays(given: str) -> None:
    _, found = found_of(*EIGHT_B, "train.compile=true", given)
    assert found.ranked
    for one in found.ranked:
        assert given in (*one.overrides(), "parallelism.reshard_after_forward=true")


def test_a_key_from_a_file_stays_though_no_word_of_the_command_line_has_it() -> None:
    spec = spec_of(*EIGHT_B, "parallelism.tp=2")
    assert "parallelism.tp" in given_keys(spec)
    assert given_keys(spec_of(*EIGHT_B)) == frozenset()


def test_another_parallelism_is_left_alone() -> None:
    spec = spec_of("parallelism=fsdp")
    assert resolve_auto(spec) == (spec, None, [])


def test_what_cannot_fit_says_the_least_that_would() -> None:
    words = (*H100, "model=llama_405b", "train.global_batch_size=64")
    _, found, problems = resolve_auto(spec_of(*words), words)
    (problem,) = problems
    assert found is not None
    assert found.best is None
    assert "none of" in problem.message
    assert "has 80 GB" in problem.message
    assert found.least_bytes is not None
    assert found.least_bytes > 80e9


def test_what_has_no_mesh_is_told_apart() -> None:
    words = (*EIGHT_B, "parallelism.tp=3")
    _, _, problems = resolve_auto(spec_of(*words), words)
    assert "no mesh of 8 devices is valid" in problems[0].message


def test_a_device_without_figures_is_ranked_by_idle_compute_and_bytes() -> None:
    words = ("parallelism=auto", "launch.devices_per_node=4", "train.global_batch_size=16")
    _, found = found_of(*words)
    assert not found.by_time
    assert "peak_flops.fp32" in found.reason
    assert found.best is not None
    assert (found.best.mesh.pp, found.best.mesh.dp_replicate) == (1, 4)
    assert found.best.parallelism.recompute == "none"
    assert [one.idle for one in found.ranked] == sorted(one.idle for one in found.ranked)


def test_a_model_that_needs_all_its_memory_gets_recompute_or_more_shards() -> None:
    words = (*EIGHT_B, "train.compile=true")
    _, roomy = found_of(*words, "launch.nodes=2", "data.sequence_length=2048")
    _, tight = found_of(*words, "data.sequence_length=32768", "train.global_batch_size=8")
    assert roomy.best is not None
    assert tight.best is not None
    assert roomy.best.parallelism.recompute == "none"
    assert tight.best.parallelism.recompute != "none" or tight.best.mesh.cp > 1


def test_experts_are_spread_where_there_are_any() -> None:
    words = (*H100, "model=mixtral_8x7b", "launch.nodes=2", "train.global_batch_size=16")
    words = (*words, "train.compile=true")
    spec, found = found_of(*words)
    assert found.best is not None
    assert 8 % found.best.mesh.ep == 0
    alone = (*words, "parallelism.ep=1")
    _, dense = found_of(*alone)
    assert dense.best is not None
    assert dense.best.mesh.ep == 1
    chosen = decided(spec, found.best)
    made = step_time(chosen, found.best.mesh, found.best.micro_batch_size)
    assert isinstance(made, StepTime)


def test_a_link_that_only_some_layouts_need_leaves_all_of_them_without_times() -> None:
    words = (*EIGHT_B, "launch.nodes=2", "accelerator.scale_out_bytes_per_s=null")
    _, found = found_of(*words)
    assert not found.by_time
    assert "scale_out_bytes_per_s" in found.reason
    assert all(one.step_s is None for one in found.ranked)
    assert found.best is not None
    assert found.best.memory_bytes <= 80e9
