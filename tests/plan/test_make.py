from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_hpc.config.compose import Composer
from air_hpc.config.spec import LaunchSpec, RunSpec, TrainSpec
from air_hpc.plan.make import make_plan
from air_hpc.plan.report import plan_json
from air_hpc.plan.types import Plan

SHARED = Composer()


def plan_of(*overrides: str, local_cpu_count: int = 4) -> Plan:
    plan, problems = make_plan(SHARED.compose(overrides), local_cpu_count=local_cpu_count)
    assert plan is not None, problems
    return plan


@given(st.integers(1, 16), st.integers(1, 64), st.one_of(st.just("auto"), st.integers(1, 16)))
def test_micro_batches_make_up_the_global_batch(devices: int, batch: int, micro: object) -> None:
    spec = RunSpec(
        launch=LaunchSpec(devices_per_node=devices),
        train=TrainSpec(global_batch_size=batch, micro_batch_size=micro),  # type: ignore[arg-type]
    )
    plan, problems = make_plan(spec, local_cpu_count=1)
    if plan is None:
        assert batch % devices or (isinstance(micro, int) and (batch // devices) % micro)
        assert problems
        return
    ranks = plan.mesh.data_parallel_size
    assert plan.micro_batch_size * plan.accumulation_steps * ranks == batch
    assert plan.tokens_per_step == batch * spec.data.sequence_length
    assert micro in ("auto", plan.micro_batch_size)
    assert micro != "auto" or plan.micro_batch_size <= 8


def test_the_lead_is_the_wait_and_the_grace_and_the_write() -> None:
    plan = plan_of("cluster.grace_s=10")
    assert plan.lead_s == pytest.approx(60 + 10 + 853_120 * 12 / 1e9)
    assert plan_of("launch.lead_s=7").lead_s == 7


def test_the_lead_never_takes_more_than_half_of_the_limit() -> None:
    assert plan_of("launch.time_limit_min=1").lead_s == 30
    assert plan_of("launch.time_limit_min=600").lead_s < 120


def test_threads_of_a_worker() -> None:
    assert plan_of().threads_per_worker == 4
    assert plan_of("launch.devices_per_node=2").threads_per_worker == 2
    assert plan_of("launch.devices_per_node=8").threads_per_worker == 1
    assert plan_of("launch.cpus_per_device=6").threads_per_worker == 6
    assert plan_of("train.threads_per_worker=3").threads_per_worker == 3
    assert plan_of("cluster=slurm").threads_per_worker == 1


def test_the_default_store_is_a_file_here_and_the_spool_on_a_cluster(tmp_path: Path) -> None:
    here = plan_of(f"runs_dir={tmp_path}/runs").tracking_uri
    assert here == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert plan_of("cluster=slurm").tracking_uri is None
    assert plan_of("cluster=allocation").tracking_uri is None
    assert plan_of("cluster=slurm", "tracking.uri=https://a.example").tracking_uri is not None
    assert plan_of("tracking=spool").tracking_uri is None


def test_a_relative_runs_folder_gives_an_absolute_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan_of().tracking_uri == f"sqlite:///{tmp_path}/runs/mlflow.db"


def test_an_automatic_micro_batch_fits_into_the_device_where_any_does() -> None:
    """Eight sequences of 8,192 tokens, 436 GB of activations, once were planned for 80 GB."""
    base = ["model=llama_8b", "cluster=slurm", "accelerator=h100_sxm", "parallelism=fsdp"]
    base += ["launch.nodes=16", "launch.devices_per_node=8", "train.precision=bf16"]
    base += ["train.global_batch_size=1024", "data.sequence_length=2048"]
    fits = plan_of(*base)
    assert 1 < fits.micro_batch_size < 8
    assert fits.memory_per_rank.total_bytes <= 80e9
    twice = plan_of(*base, f"train.micro_batch_size={2 * fits.micro_batch_size}")
    assert twice.memory_per_rank.total_bytes > 80e9
    assert plan_of(*base, "data.sequence_length=65536").micro_batch_size == 1
    assert plan_of("train.global_batch_size=64").micro_batch_size == 8  # a CPU's is not known


def test_plan_json_has_the_fields_of_the_design_and_null_for_the_unknown() -> None:
    spec = SHARED.compose(
        [
            "model=llama_8b",
            "parallelism=hsdp",
            "accelerator=h100_sxm",
            "cluster=slurm",
            "launch.nodes=2",
            "launch.devices_per_node=8",
            "data.sequence_length=8192",
            "train.precision=bf16",
        ]
    )
    plan, problems = make_plan(spec)
    assert [p.key for p in problems if not p.warning] == []
    assert plan is not None
    told = plan_json(plan, spec)
    json.dumps(told, allow_nan=False)
    assert told["flops_per_token"]["causal"] == pytest.approx(51.47e9, rel=1e-3)
    assert told["flops_per_token"]["palm"] == pytest.approx(57.91e9, rel=1e-3)
    assert told["memory_per_rank_bytes"] == plan.memory_per_rank.total_bytes
    assert told["step_time_s"] == plan.step_time_s > 0
    assert 0.2 < told["mfu"]["causal"] < told["mfu"]["palm"] < 0.6
    unknown = SHARED.compose(["accelerator=gb200", "train.precision=bf16"])
    other, _ = make_plan(unknown, local_cpu_count=1)
    assert other is not None
    assert plan_json(other, unknown)["step_time_s"] is None
    assert plan_json(other, unknown)["mfu"] == {"causal": None, "palm": None}
    assert "matmul_ceiling" in plan_json(other, unknown)["step_time_unknown"]
    assert told["mesh"] == {
        "pp": 1,
        "dp_replicate": 2,
        "dp_shard": 8,
        "cp": 1,
        "tp": 1,
        "ep": 1,
    }
    timed = dataclasses.replace(plan, step_time_s=1.0)
    palm = plan_json(timed, spec)["mfu"]["palm"]
    assert palm == pytest.approx(57.91e9 * 16 * 8192 / 16 / 989e12, rel=1e-3)
