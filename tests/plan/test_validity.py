from __future__ import annotations

import pytest

from air_hpc.config.compose import Composer
from air_hpc.errors import Problem
from air_hpc.plan.make import make_plan

SHARED = Composer()


def problems_of(*overrides: str) -> list[Problem]:
    plan, problems = make_plan(SHARED.compose(overrides), local_cpu_count=2)
    assert (plan is None) == any(not p.warning for p in problems)
    return problems


def test_the_default_run_has_no_problem() -> None:
    assert problems_of() == []


def test_heads_of_a_width_of_their_own_need_not_divide_the_model() -> None:
    assert problems_of("model.dim=130", "model.head_dim=32") == []


def test_global_layers_among_layers_that_are_all_global_are_a_warning() -> None:
    (problem,) = problems_of("model.global_every=2")
    assert problem.warning
    assert problem.key == "model.global_every"


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (["model.dim=130"], "model.heads", "heads (4) does not divide model.dim (130)"),
        (["model.kv_heads=3"], "model.kv_heads", "kv_heads (3) does not divide model.heads (4)"),
        (["model.dim=20"], "model.heads", "a head of 5"),
        (["model.head_dim=15"], "model.head_dim", "an even head width"),
        (
            ["model=mixtral_tiny", "model.moe.active_experts=9"],
            "model.moe.active_experts",
            "1 to 8",
        ),
        (["model=mixtral_tiny", "model.moe.dense_layers=4"], "model.moe.dense_layers", "below 4"),
        (["launch.devices_per_node=3"], "train.global_batch_size", "Nearest that work: 15 or 18"),
        (["train.micro_batch_size=5"], "train.micro_batch_size", "Nearest that work: 4 or 8"),
        (["schedule.warmup_steps=200"], "schedule.warmup_steps", "train.steps (200)"),
        (
            ["schedule=wsd", "schedule.warmup_steps=100", "schedule.decay_ratio=0.9"],
            "schedule.decay_ratio",
            "at most 0.5",
        ),
        (["launch.time_limit_min=2", "launch.lead_s=120"], "launch.lead_s", "below 120"),
        (["tracking.uri=file:/tmp/x"], "tracking.uri", "sqlite:///tmp/x.db"),
        (["tracking.uri=mlruns"], "tracking.uri", "sqlite:///mlruns.db"),
        (["tracking.uri=htp://x"], "tracking.uri", "Did you mean http?"),
        (["tracking.uri=ftp://x"], "tracking.uri", "no store for ftp:"),
        (["launch.nodes=2"], "launch.nodes", "is one machine"),
        (["runs_dir=''"], "runs_dir", "is empty"),
        (["model.vocab_size=255"], "model.vocab_size", "at least 256"),
        (["runs_dir='/a?b'"], "runs_dir", "without ? and #"),
        (["recovery.lease_s=5"], "recovery.lease_s", "above 5"),
        (
            ["checkpoint.interval_steps=auto", "checkpoint.max_interval_s=30"],
            "checkpoint.min_interval_s",
            "at most 30",
        ),
        (["recovery.heartbeat_interval_s=5"], "recovery.heartbeat_timeout_s", "above 5"),
        (["recovery.hang.step_s=4"], "recovery.heartbeat_timeout_s", "below 4"),
        (["recovery.min_nodes=1"], "recovery.min_nodes", "set recovery.restart=elastic"),
        (["recovery.restart=elastic", "recovery.min_nodes=2"], "recovery.min_nodes", "1 to 1"),
        (["recovery.spare_nodes=1"], "recovery.spare_nodes", "set recovery.restart=spare"),
        (["recovery.restart=spare"], "recovery.spare_nodes", "at least 1"),
        (
            ["recovery.restart=spare", "recovery.spare_nodes=1"],
            "recovery.spare_nodes",
            "is one machine",
        ),
        (["cluster.container.kind=pyxis"], "cluster.container.image", "needs an image"),
        (["cluster.venv=/a", "cluster.conda_env=b"], "cluster.venv", "one of the two"),
        (["accelerator=t4", "train.precision=bf16"], "train.precision", "has no bf16"),
        (["accelerator=v100", "train.precision=bf16"], "train.precision", "allowed: fp32"),
        (["accelerator.peak_flops={bf61: 1}"], "accelerator.peak_flops.bf61", "mean bf16?"),
        (["accelerator.peak_flops={bf16: 0}"], "accelerator.peak_flops.bf16", "above 0"),
        (["accelerator.memory_bytes=0"], "accelerator.memory_bytes", "above 0"),
        (["accelerator.matmul_ceiling=80"], "accelerator.matmul_ceiling", "at most 1"),
    ],
)
def test_a_mistake_across_keys_is_one_problem(overrides: list[str], key: str, says: str) -> None:
    (problem,) = [p for p in problems_of(*overrides) if not p.warning]
    assert problem.key == key
    assert says in str(problem)


def test_what_is_wrong_with_restarts_is_told_in_one_pass() -> None:
    wrong = (
        "recovery.restart=requeue",
        "recovery.spare_nodes=2",
        "recovery.min_nodes=3",
        "recovery.heartbeat_interval_s=9",
        "recovery.lease_s=4",
        "recovery.hang.save_s=2",
    )
    assert [p.key for p in problems_of(*wrong)] == [
        "recovery.heartbeat_timeout_s",
        "recovery.lease_s",
        "recovery.heartbeat_timeout_s",
        "recovery.heartbeat_interval_s",
        "recovery.min_nodes",
        "recovery.min_nodes",
        "recovery.spare_nodes",
    ]


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (["tp=4", "+dev=4"], "parallelism.tp", "tp (4) does not divide model.kv_heads (2)"),
        (["tp=4", "+dev=4"], "parallelism.tp", "Nearest that work: 2"),
        (["pp=8", "+dev=8"], "parallelism.pp", "pp (8) is more stages than model.layers (4)"),
        (
            ["pp=4", "pp_schedule=zbv_zero_bubble", "+dev=4"],
            "parallelism.pp",
            "pp (4) × 2 stages on each rank of pp_schedule=zbv_zero_bubble is more than"
            " model.layers (4); allowed: at most 2",
        ),
        (["pp=2", "pp_stages_per_rank=2", "+dev=2"], "parallelism.pp_stages_per_rank", "auto or 1"),
        (
            ["pp=2", "pp_schedule=dual_pipe_v", "pp_stages_per_rank=1", "+dev=2"],
            "parallelism.pp_stages_per_rank",
            "auto or 2",
        ),
        (["cp=3", "+dev=3"], "parallelism.cp", "cp (3) does not divide data.sequence_length (128)"),
        (["cp=8", "+dev=8"], "parallelism.cp", "cp (8) does not divide model.heads (4)"),
        (
            ["cp=64", "cp_method=ring", "+dev=64", "+seq=64", "+batch=64"],
            "parallelism.cp",
            "2 · cp (128) pieces, which do not divide data.sequence_length (64)",
        ),
        (
            ["cp=2", "cp_method=ring", "+dev=2", "+softcap"],
            "parallelism.cp_method",
            "cannot do model.attention_softcap (50.0); allowed: ulysses",
        ),
        (
            ["cp=2", "cp_method=ring", "+dev=2", "+window"],
            "parallelism.cp_method",
            "model.sliding_window (64)",
        ),
        (["ep=2", "+dev=2", "dp_shard=2"], "parallelism.ep", "has no experts to spread"),
        (
            ["ep=3", "+dev=3", "dp_shard=3", "+moe", "+batch=15"],
            "parallelism.ep",
            "ep (3) does not divide model.moe.experts (8); allowed: a divisor of 8. Nearest that"
            " work: 2 or 4",
        ),
        (
            ["ep=4", "+dev=4", "dp_shard=2", "+moe"],
            "parallelism.ep",
            "ep (4) does not divide dp_shard × cp (2 × 1 = 2)",
        ),
        (
            ["ep=4", "+dev=4", "dp_shard=2", "+moe"],
            "parallelism.ep",
            "parallelism.dp_shard=4 parallelism.dp_replicate=1",
        ),
        (["recompute=budget"], "parallelism.recompute", "Or set train.compile=true"),
        (
            ["pp=2", "pp_schedule=zbv_zero_bubble", "recompute=ops", "+dev=2"],
            "parallelism.recompute",
            "allowed: none, full",
        ),
        (
            ["pp=2", "pp_schedule=interleaved_zero_bubble", "+compile", "+dev=2"],
            "train.compile",
            "Or parallelism.pp_schedule: gpipe, 1f1b, interleaved_1f1b, looped_bfs",
        ),
        (
            ["pp=4", "+dev=4", "+micro=8"],
            "train.micro_batch_size",
            "micro-batches of 8 make 2 of a rank's 16 sequences, which pp_schedule=1f1b does not"
            " take with pp 4; allowed: micro-batches at least pp (4). Nearest that work: 2 or 4",
        ),
        (
            ["pp=2", "pp_schedule=dual_pipe_v", "+dev=2", "+batch=3", "+steps"],
            "train.global_batch_size",
            "train.global_batch_size=4",
        ),
    ],
)
def test_a_degree_that_cuts_what_it_cannot_is_told_with_what_can(
    overrides: list[str], key: str, says: str
) -> None:
    short = {
        "+softcap": "model.attention_softcap=50.0",
        "+window": "model.sliding_window=64",
        "+moe": "model.moe={experts: 8, active_experts: 2}",
        "+compile": "train.compile=true",
        "+steps": "train.steps=200",
    }
    keys = {"dev": "launch.devices_per_node", "seq": "data.sequence_length"}
    keys |= {"batch": "train.global_batch_size", "micro": "train.micro_batch_size"}
    written = []
    for text in overrides:
        name, _, value = text.removeprefix("+").partition("=")
        plain = f"{keys[name]}={value}" if name in keys else f"parallelism.{text}"
        written.append(short.get(text, plain))
    found = [p for p in problems_of(*written) if not p.warning]
    assert {p.key for p in found} == {key}
    assert says in " | ".join(str(p) for p in found)


def test_a_group_across_nodes_is_a_warning() -> None:
    base = ("cluster=slurm", "launch.nodes=2", "tracking.uri=null", "parallelism.tp=2")
    (warning,) = problems_of(*base, "launch.devices_per_node=1")
    assert warning.warning
    assert "does not lie on one node (launch.devices_per_node 1)" in warning.message


def test_fp8_is_planned_where_there_is_any_and_not_trained_yet() -> None:
    base = ("cluster=slurm", "tracking.uri=null", "train.precision=fp8", "parallelism=fsdp")
    (refused,) = problems_of(*base, "accelerator=a100_sxm_80gb")
    assert "accelerator=a100_sxm_80gb has no fp8; allowed: fp32, bf16" in str(refused)
    assert "computes nothing in fp8" in str(problems_of(*base, "accelerator=cpu")[0])
    spec = SHARED.compose([*base, "accelerator=h100_sxm", "model=llama_1b"])
    plan, problems = make_plan(spec, to_run=False)
    assert plan is not None
    assert plan.peak_flops_per_device == 1.979e15
    assert [(p.key, p.warning) for p in problems] == [("train.precision", True)]
    assert make_plan(spec)[0] is None


def test_who_only_plans_another_place_is_not_told_of_this_one() -> None:
    spec = SHARED.compose(["parallelism=fsdp_tp", "launch.nodes=2", "launch.devices_per_node=2"])
    plan, problems = make_plan(spec, to_run=False)
    assert plan is not None
    assert problems == []
    assert make_plan(spec)[0] is None


def test_tensor_parallel_is_checked_against_every_width_it_splits() -> None:
    problems = problems_of("parallelism.tp=3", "launch.devices_per_node=3", "model=llama_8b")
    said = " ".join(p.message for p in problems)
    for name in ("model.heads (32)", "model.kv_heads (8)", "model.ffn_dim (14336)"):
        assert f"tp (3) does not divide {name}" in said


def test_pipeline_and_context_degrees_are_checked() -> None:
    said = " ".join(p.message for p in problems_of("parallelism.pp=8", "parallelism.cp=3"))
    assert "pp (8) is more stages than model.layers (4)" in said
    assert "cp (3) does not divide data.sequence_length (128)" in said


def test_a_password_in_the_address_is_refused_and_not_repeated() -> None:
    (problem,) = problems_of("tracking.uri='https://me:s3cret@mlflow.example'")
    assert "MLFLOW_TRACKING_PASSWORD" in problem.hint
    assert "s3cret" not in str(problem)


@pytest.mark.parametrize(
    "uri",
    [
        "null",
        "https://mlflow.example",
        "sqlite:///a/b.db",
        "'postgresql+psycopg2://db.example/mlflow'",
        "databricks",
    ],
)
def test_stores_that_mlflow_takes(uri: str) -> None:
    assert problems_of(f"tracking.uri={uri}") == []


def test_an_unknown_peak_is_a_warning_with_what_to_write() -> None:
    (warning,) = problems_of("accelerator=h100_sxm", "train.precision=fp32")
    assert warning.warning
    assert "accelerator/h100_sxm.yaml: peak_flops: {fp32: <FLOP/s>}" in warning.hint


def test_a_rank_that_needs_more_than_the_device_has_is_a_warning() -> None:
    overrides = ["model=llama_8b", "accelerator=h100_sxm", "train.precision=bf16"]
    (warning,) = problems_of(*overrides)
    assert warning.warning
    assert "GB, accelerator=h100_sxm has 80 GB" in warning.message
    assert problems_of("accelerator=h100_sxm", "train.precision=bf16") == []


def test_the_processor_is_measured_and_so_is_no_warning() -> None:
    assert problems_of("accelerator=cpu", "train.precision=bf16") == []


def test_all_mistakes_across_keys_are_found_in_one_pass() -> None:
    problems = problems_of(
        "model.kv_heads=3",
        "train.micro_batch_size=5",
        "schedule.warmup_steps=500",
        "tracking.uri=file:x",
        "recovery.lease_s=1",
        "cluster.container.kind=apptainer",
        "accelerator=v100",
        "train.precision=bf16",
        "parallelism.dp_shard=2",
        "parallelism.dp_replicate=2",
    )
    keys = {p.key for p in problems}
    assert {
        "model.kv_heads",
        "schedule.warmup_steps",
        "tracking.uri",
        "recovery.lease_s",
        "cluster.container.image",
        "train.precision",
        "parallelism",
    } <= keys


def test_checks_keep_silent_about_keys_that_have_a_problem_already() -> None:
    spec, problems = SHARED.try_compose(
        ["launch.devices_per_node=x", "parallelism.dp_replicate=8", "schedule.warmup_steps=900"]
    )
    plan, more = make_plan(spec, unsure={p.key for p in problems})
    assert plan is None
    assert [p.key for p in problems] == ["launch.devices_per_node"]
    assert [p.key for p in more] == ["schedule.warmup_steps"], "the mesh may be right"
