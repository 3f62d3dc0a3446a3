"""Every way of spreading trains the same model as one process does.

SGD, since AdamW hardly notices a gradient of the wrong scale; the gradient norm is compared too.
Cases of one number of ranks run in one set of processes: starting them is most of what they cost.
"""

from __future__ import annotations

import pytest
import torch

from air_hpc.errors import BadInput
from air_hpc.parallel.engine import Engine
from air_hpc.parallel.options import EngineOptions
from air_hpc.plan.schedule import SCHEDULES, SINGLE_STAGE
from air_hpc.plan.types import Mesh
from tests.parallel.training import (
    MODELS,
    TOKENS,
    Case,
    curves,
    gap,
    on_mesh,
    single,
    train_cases,
)
from tests.torch_ranks import join_world, run_ranks

pytestmark = pytest.mark.torch
BOUND = 2e-5
BF16_BOUND = 4e-3
"""Of losses and gradient norms over 5 steps of SGD; a bf16 number has 8 bits (3.9e-3)."""
NOTICED = 2e-4

Options = EngineOptions
LOOPED = [s for s in SCHEDULES if s not in SINGLE_STAGE]

CURATED = {
    "data": [
        Case(Mesh(dp_replicate=2), micro_batches=1),
        Case(Mesh(dp_replicate=2), "mixtral"),
        Case(Mesh(dp_shard=2)),
        Case(Mesh(dp_shard=2), "uneven"),
        Case(Mesh(dp_shard=2), "qwen", options=Options(reshard_after_forward=False, prefetch=0)),
        Case(Mesh(dp_shard=2), "gemma", options=Options(recompute="ops", prefetch=2)),
        Case(Mesh(dp_shard=2), options=Options(cpu_offload=True, recompute="full")),
    ],
    "tensor": [
        Case(Mesh(tp=2)),
        Case(Mesh(tp=2), "gemma", options=Options(recompute="full")),
        Case(Mesh(tp=2), "qwen", 1, Options(loss_parallel=False)),
        Case(Mesh(tp=2), "biased"),
    ],
    "pipeline": [
        *(Case(Mesh(pp=2), "llama", 4, Options(pp_schedule=s)) for s in SCHEDULES),
        Case(Mesh(pp=2), "gemma", 2),
        Case(Mesh(pp=2), "qwen", 4, Options(pp_schedule="zbv_zero_bubble")),
        Case(Mesh(pp=2), "mixtral", 4, Options(pp_schedule="zbv_zero_bubble")),
        Case(Mesh(pp=2), "llama", 1, Options(pp_schedule="gpipe")),
        Case(Mesh(pp=2), "llama", 2, Options(recompute="full")),
    ],
    "context": [
        Case(Mesh(cp=2), "gemma"),
        Case(Mesh(cp=2), "llama", options=Options(cp_method="ring")),
        Case(Mesh(cp=2, ep=2), "mixtral"),
    ],
    "expert": [
        Case(Mesh(dp_shard=2, ep=2), "mixtral", options=Options(recompute="ops")),
        Case(Mesh(dp_shard=2, ep=2), "biased"),
    ],
    "two-axes": [
        Case(Mesh(dp_replicate=2, dp_shard=2)),
        Case(Mesh(dp_shard=2, tp=2), "qwen"),
        Case(Mesh(pp=2, dp_shard=2), "llama", 4, Options(pp_schedule="zbv_zero_bubble")),
        Case(Mesh(pp=2, tp=2), "gemma"),
        Case(Mesh(dp_shard=2, cp=2)),
        Case(Mesh(cp=2, tp=2), options=Options(cp_method="ring")),
        Case(Mesh(dp_shard=4, ep=2), "mixtral"),
    ],
    "three-axes": [Case(Mesh(pp=2, dp_shard=2, tp=2))],
}
"""Run in CI."""

_FOUR = [
    Mesh(dp_replicate=2, dp_shard=2),
    Mesh(dp_replicate=2, tp=2),
    Mesh(dp_replicate=2, cp=2),
    Mesh(dp_shard=2, tp=2),
    Mesh(dp_shard=2, cp=2),
    Mesh(cp=2, tp=2),
    Mesh(pp=2, dp_replicate=2),
    Mesh(pp=2, dp_shard=2),
    Mesh(pp=2, tp=2),
    Mesh(pp=2, cp=2),
]
_FOUR_EXPERT = [
    Mesh(dp_shard=4, ep=2),
    Mesh(dp_shard=4, ep=4),
    Mesh(dp_replicate=2, dp_shard=2, ep=2),
    Mesh(dp_shard=2, tp=2, ep=2),
    Mesh(cp=2, tp=2, ep=2),
    Mesh(dp_shard=2, cp=2, ep=4),
    Mesh(pp=2, dp_shard=2, ep=2),
]
ALL = {
    **{f"four-{model}": [Case(mesh, model) for mesh in _FOUR] for model in MODELS},
    **{
        f"experts-{model}": [Case(mesh, model) for mesh in _FOUR_EXPERT]
        for model in ("mixtral", "biased")
    },
    **{
        f"schedules-{model}": [
            Case(mesh, model, 4, Options(pp_schedule=schedule))
            for mesh in (Mesh(pp=2, dp_shard=2), Mesh(pp=2, tp=2))
            for schedule in LOOPED
        ]
        for model in ("llama", "gemma", "biased")
    },
    "deep": [
        Case(Mesh(pp=4), "llama", 4, Options(pp_schedule=schedule)) for schedule in SINGLE_STAGE
    ],
    "ring": [
        Case(mesh, model, options=Options(cp_method="ring"))
        for mesh in (Mesh(cp=4), Mesh(dp_shard=2, cp=2), Mesh(pp=2, cp=2))
        for model in ("llama", "qwen")
    ],
    "eight": [
        Case(Mesh(pp=2, dp_shard=2, tp=2), "gemma"),
        Case(Mesh(pp=2, dp_shard=2, tp=2), "llama", 4, Options(pp_schedule="interleaved_1f1b")),
        Case(Mesh(pp=2, cp=2, tp=2), "qwen"),
        Case(Mesh(dp_replicate=2, dp_shard=2, tp=2), "llama"),
        Case(Mesh(pp=2, dp_shard=2, tp=2, ep=2), "biased"),
    ],
}
"""Run by tools/test --full, beside the curated ones."""


def uneven_heads(case: Case) -> bool:
    """A vocabulary of 65 is cut by FSDP alone."""
    return case.model == "uneven" and (case.degrees.tp > 1 or case.degrees.pp > 1)


@pytest.mark.parametrize("name", CURATED)
def test_a_spread_model_trains_as_one_process_does(name: str) -> None:
    check(CURATED[name])


@pytest.mark.full
@pytest.mark.parametrize("name", ALL)
def test_every_combination_trains_as_one_process_does(name: str) -> None:
    check([case for case in ALL[name] if not uneven_heads(case)])


def check(cases: list[Case], bound: float = BOUND) -> None:
    gaps = {c.name: gap(curve, c.model) for c, curve in zip(cases, curves(cases), strict=True)}
    assert {name: g for name, g in gaps.items() if not g <= bound} == {}


def test_one_process_learns_and_repeats_itself_exactly() -> None:
    [again] = run_ranks(1, train_cases, [Case(Mesh(), "llama", 1)])[0]
    assert again == single()["llama"]
    assert again[-1] != again[0]
    [accumulated] = run_ranks(1, train_cases, [Case(Mesh(), "llama", 4)])[0]
    assert gap(accumulated, "llama") <= BOUND


@pytest.mark.parametrize(
    "cases",
    [
        [Case(Mesh(), options=Options(precision="bf16"))],
        [
            Case(Mesh(dp_shard=2), options=Options(precision="bf16")),
            Case(Mesh(tp=2), options=Options(precision="bf16")),
            Case(Mesh(pp=2), options=Options(precision="bf16")),
            Case(Mesh(dp_shard=2, ep=2), "mixtral", options=Options(precision="bf16")),
        ],
    ],
    ids=["single", "spread"],
)
def test_bf16_stays_near_fp32(cases: list[Case]) -> None:
    for case, curve in zip(cases, curves(cases), strict=True):
        assert 0 < gap(curve, case.model) <= BF16_BOUND, case.name


MUTANTS = [
    Case(Mesh(dp_shard=2), mutant="doubled gradient"),
    Case(Mesh(dp_replicate=2), mutant="dropped reduction"),
    Case(Mesh(dp_shard=2), mutant="repeated data"),
    Case(Mesh(tp=2), "qwen", mutant="doubled gradient"),
    Case(Mesh(tp=2), "gemma", mutant="terms not added"),
    Case(Mesh(pp=2), "llama", mutant="doubled gradient"),
    Case(Mesh(pp=2), "qwen", mutant="copies apart"),
    Case(Mesh(dp_shard=2, ep=2), "mixtral", mutant="repeated data"),
    Case(Mesh(dp_shard=2, ep=2), "mixtral", mutant="experts averaged among themselves"),
]


def test_the_comparison_notices_every_mutant() -> None:
    unseen = []
    for case, *results in zip(MUTANTS, *run_ranks(2, train_cases, MUTANTS), strict=True):
        if max(gap(curve, case.model) for curve in results) <= NOTICED:
            unseen.append(case.name)
    assert unseen == []


def refuse(rank: int, rendezvous: str) -> list[str]:
    """What is said of configurations that cannot be."""
    whole = join_world(rank, rendezvous, Mesh(pp=2))
    asked = [
        (Mesh(pp=2), Options(pp_schedule="1f1b"), 1),
        (Mesh(pp=2), Options(pp_stages_per_rank=2), 2),
        (Mesh(pp=2), Options(pp_schedule="zbv_zero_bubble", recompute="ops"), 2),
        (Mesh(pp=2), Options(pp_schedule="zbv_zero_bubble", compile=True), 2),
        (Mesh(dp_shard=2), Options(recompute="budget"), 1),
        (Mesh(dp_shard=2, ep=2), Options(), 1),
    ]
    said = []
    for degrees, options, micro_batches in asked:
        with pytest.raises(BadInput) as caught:
            Engine(MODELS["llama"], TOKENS, 0, on_mesh(whole, degrees), options, micro_batches, 1)
        said.append(caught.value.problems[0].key)
    return said


def test_what_cannot_be_is_refused_by_its_key() -> None:
    first, second = run_ranks(2, refuse)
    assert first == second
    assert first == [
        "parallelism.pp_schedule",
        "parallelism.pp_stages_per_rank",
        "parallelism.recompute",
        "train.compile",
        "parallelism.recompute",
        "parallelism.ep",
    ]


def table_in_a_block(rank: int, rendezvous: str, degrees: Mesh) -> tuple[torch.dtype, float]:
    """The type and the sum of the rotation table as rank's first block gets it.

    Rank 1 has a table of its own, all zeros.
    """
    world = join_world(rank, rendezvous, degrees)
    engine = Engine(MODELS["llama"], TOKENS, 0, world, Options(precision="bf16"), 1, 1)
    seen: list[torch.Tensor] = []
    [model] = engine.parts
    first = model.layers["0"].get_submodule("attention")
    first.register_forward_pre_hook(lambda _, given: seen.append(given[1].clone()))
    if rank == 1:
        model.table.zero_()
    engine.step(torch.zeros(1, 1, TOKENS + 1, dtype=torch.long))
    return seen[0].dtype, float(seen[0].abs().sum())


def test_angles_stay_float32_under_bf16_fsdp() -> None:
    """A cast of a block's inputs would round every cosine and sine to eight bits."""
    tables = run_ranks(2, table_in_a_block, Mesh(dp_shard=2))
    assert [dtype for dtype, _ in tables] == [torch.float32] * 2


def test_a_step_broadcasts_no_table() -> None:
    """DDP sends every buffer before each forward pass unless it is told not to."""
    (_, first), (_, second) = run_ranks(2, table_in_a_block, Mesh(dp_replicate=2))
    assert first > 0
    assert second == 0
