"""What would fit after a device ran out of memory: by the plan's own estimate, cheapest first."""

from __future__ import annotations

from dataclasses import replace

from air_hpc.config.compose import Composer
from air_hpc.config.spec import RunSpec
from air_hpc.plan.fit import MARGIN, Fit, what_fits
from air_hpc.plan.make import make_plan

SHARED = Composer()


def spec_of(*overrides: str) -> RunSpec:
    base = ("cluster=slurm", "accelerator=h100_sxm", "train.precision=bf16", "parallelism=fsdp")
    return SHARED.compose([*base, "tracking.uri=null", *overrides])


def fit_of(spec: RunSpec) -> Fit:
    plan, problems = make_plan(spec, to_run=False)
    assert plan is not None, problems
    return what_fits(spec, plan)


LARGE = ("model=llama_8b", "data.sequence_length=4096", "launch.devices_per_node=8")


def test_a_smaller_micro_batch_is_named_first() -> None:
    fit = fit_of(spec_of(*LARGE, "train.micro_batch_size=4", "train.global_batch_size=32"))
    assert fit.overrides == ("train.micro_batch_size=1",)
    assert fit.overrides[0] in fit.sentence()


def test_what_is_named_fits_by_the_estimate_when_it_is_taken() -> None:
    spec = spec_of(*LARGE, "train.micro_batch_size=4", "train.global_batch_size=32")
    fit = fit_of(spec)
    changed, _ = make_plan(replace(spec, train=replace(spec.train, micro_batch_size=1)))
    assert changed is not None
    assert fit.device_bytes is not None
    assert changed.memory_per_rank.total_bytes == fit.needed_bytes
    assert changed.memory_per_rank.total_bytes <= (1 - MARGIN) * fit.device_bytes


def test_a_plan_that_seemed_to_fit_and_did_not_must_be_undercut() -> None:
    """The run is the better measure: what its own estimate says fits is not offered again."""
    spec = spec_of("model=llama_1b", "train.micro_batch_size=4", "train.global_batch_size=64",
                   "data.sequence_length=2048")  # fmt: skip
    fit = fit_of(spec)
    assert fit.device_bytes is not None
    assert fit.failed_bytes < fit.device_bytes
    assert fit.needed_bytes is not None
    assert fit.needed_bytes <= (1 - MARGIN) * fit.failed_bytes


def test_more_sharding_where_the_state_is_what_is_large() -> None:
    spec = spec_of("model=llama_8b", "parallelism=ddp", "launch.devices_per_node=8",
                   "train.micro_batch_size=1", "data.sequence_length=512")  # fmt: skip
    assert "parallelism.dp_shard=4" in fit_of(spec).overrides


def test_that_nothing_fits_is_said() -> None:
    fit = fit_of(spec_of("model=llama_405b", "train.micro_batch_size=1",
                         "data.sequence_length=131072"))  # fmt: skip
    assert fit.overrides == ()
    assert "no smaller micro-batch, sharding, recompute or offload fits" in fit.sentence()
