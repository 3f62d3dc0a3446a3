"""Blocks that are compiled train as those that are not, under everything else.

By a backend that traces and compiles nothing (aot_eager): what can go wrong is in the tracing.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from air_hpc.parallel.options import EngineOptions
from air_hpc.plan.types import Mesh
from tests.parallel.training import Case, curves, gap, train_cases
from tests.torch_ranks import run_ranks

pytestmark = pytest.mark.torch
BOUND, NOTICED = 2e-5, 2e-4
TRACED = EngineOptions(compile=True, compile_backend="aot_eager")

CURATED = {
    1: [
        Case(Mesh(), options=replace(TRACED, recompute=recompute)) for recompute in ("full", "ops")
    ],
    2: [Case(Mesh(dp_shard=2, ep=2), "mixtral", options=TRACED)],
    4: [Case(Mesh(dp_shard=2, tp=2), options=TRACED)],
}
ALL = {
    "two": [
        Case(
            mesh,
            model,
            options=replace(TRACED, recompute=recompute),
        )
        for mesh in (Mesh(dp_replicate=2), Mesh(dp_shard=2), Mesh(tp=2), Mesh(pp=2))
        for model in ("llama", "gemma")
        for recompute in ("none", "full", "ops", "budget")
    ],
    "experts": [
        Case(mesh, "mixtral", options=TRACED)
        for mesh in (Mesh(dp_shard=2), Mesh(dp_shard=2, ep=2), Mesh(tp=2))
    ],
    "context": [Case(Mesh(cp=2), "llama", options=TRACED)],
    "inductor": [Case(Mesh(dp_shard=2), options=EngineOptions(compile=True))],
}


@pytest.mark.parametrize("ranks", CURATED)
def test_compiled_blocks_train_as_others_do(ranks: int) -> None:
    check(CURATED[ranks])


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ALL)
def test_compiled_blocks_train_as_others_do_everywhere(name: str) -> None:
    check(ALL[name])


def check(cases: list[Case]) -> None:
    gaps = {c.name: gap(curve, c.model) for c, curve in zip(cases, curves(cases), strict=True)}
    assert {name: g for name, g in gaps.items() if not g <= BOUND} == {}


def test_an_embedding_that_is_still_under_way_loses_its_gradient_in_a_compiled_block() -> None:
    """torch 2.13, with FSDP outside in silence: why the engine hands on a settled copy. Should
    this fail with a newer torch, `parallel.tensor.settle_embedding` has had its time."""
    case = Case(Mesh(dp_shard=2, tp=2), options=TRACED, mutant="unsettled embedding")
    results = run_ranks(4, train_cases, [case])
    assert max(gap(curve, "llama") for [curve] in results) > NOTICED
