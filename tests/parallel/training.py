"""Trains tiny models for a few steps on any mesh, and compares with a single process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from air_hpc.config.spec import ModelSpec, MoeSpec, OptimizerSpec
from air_hpc.parallel.engine import Engine
from air_hpc.parallel.options import EngineOptions
from air_hpc.parallel.pipeline import TiedCopies
from air_hpc.parallel.reduce import clip_gradients, sum_over_ranks
from air_hpc.parallel.world import World, build_expert_mesh, build_mesh
from air_hpc.plan.types import Mesh
from air_hpc.train.optimizer import build_optimizer
from tests.torch_ranks import DEADLINE_S, join_world, run_ranks

TOKENS, GLOBAL_BATCH, STEPS = 16, 8, 5
Curve = list[tuple[float, float]]
"""(loss, gradient norm) of each step."""

_SMALL: dict[str, Any] = {
    "dim": 32,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "ffn_dim": 64,
    "vocab_size": 64,
}
MODELS = {
    "llama": ModelSpec(**_SMALL),
    "uneven": ModelSpec(**{**_SMALL, "layers": 2, "vocab_size": 65}),
    "qwen": ModelSpec(**_SMALL, qk_norm=True, head_dim=16, tied_head=True),
    "gemma": ModelSpec(
        **_SMALL,
        tied_head=True,
        post_norms=True,
        activation="gelu",
        scale_embedding=True,
        attention_softcap=5.0,
        logit_softcap=3.0,
        sliding_window=6,
        global_every=2,
    ),
    "mixtral": ModelSpec(
        **_SMALL, moe=MoeSpec(experts=4, dense_layers=1, balance_loss_weight=0.05)
    ),
    "biased": ModelSpec(
        **_SMALL,
        moe=MoeSpec(
            experts=4, shared_experts=1, score="sigmoid", balance="bias", balance_bias_rate=0.01
        ),
    ),
}
"""A twin of each family, smaller than those of conf/model."""


CASE_S = 20.0
"""What one case may take beside the start of its ranks; a compiler takes its time."""


@dataclass(frozen=True)
class Case:
    """One way of training. `mutant` breaks it."""

    degrees: Mesh
    model: str = "llama"
    micro_batches: int = 2
    options: EngineOptions = field(default_factory=EngineOptions)
    mutant: str = ""

    @property
    def name(self) -> str:
        axes = {a: n for a, n in dataclasses.asdict(self.degrees).items() if n > 1}
        default = dataclasses.asdict(EngineOptions())
        given = dataclasses.asdict(self.options)
        options = [f"{k}={v}" for k, v in given.items() if v != default[k]]
        parts = [self.model, *(f"{a}{n}" for a, n in axes.items()), f"m{self.micro_batches}"]
        return "-".join([*parts, *options, *([self.mutant] if self.mutant else [])])


def train_cases(rank: int, rendezvous: str, cases: Sequence[Case]) -> list[Curve]:
    """All cases one after another in one set of ranks, each on a mesh of its own."""
    whole = join_world(rank, rendezvous, cases[0].degrees)
    return [train(on_mesh(whole, case.degrees), case) for case in cases]


def on_mesh(world: World, degrees: Mesh) -> World:
    """The same ranks in another mesh."""
    timeout = timedelta(seconds=world.timeout_s)
    return dataclasses.replace(
        world,
        degrees=degrees,
        mesh=build_mesh(degrees, "cpu", timeout),
        expert_mesh=build_expert_mesh(degrees, "cpu", timeout) if degrees.ep > 1 else None,
    )


def batches(model: ModelSpec, steps: int = STEPS) -> torch.Tensor:
    """Tokens of the global batch of each step."""
    return torch.randint(
        model.vocab_size,
        (steps, GLOBAL_BATCH, TOKENS + 1),
        generator=torch.Generator().manual_seed(1),
    )


def train(world: World, case: Case) -> Curve:
    """The losses and gradient norms that this rank sees."""
    with mutated(case.mutant):
        model = MODELS[case.model]
        data = batches(model)
        size = GLOBAL_BATCH // world.data_ranks // case.micro_batches
        engine = Engine(model, TOKENS, 0, world, case.options, case.micro_batches, size)
        optimizer = build_optimizer(
            engine.parameters(), OptimizerSpec(name="sgd", lr=0.3, weight_decay=0), world.device
        )
        engine.settle(data[0, :1, :-1])
        return [step(engine, optimizer, batch, case.mutant) for batch in data]


def step(
    engine: Engine, optimizer: torch.optim.Optimizer, batch: torch.Tensor, mutant: str = ""
) -> tuple[float, float]:
    """One step on this rank's part of a global batch; the global loss and gradient norm."""
    world, held = engine.world, engine.held()
    place = 0 if mutant == "repeated data" else world.data_rank
    mine = batch.chunk(world.data_ranks)[place]
    loss = engine.step(mine.view(engine.micro_batches, -1, TOKENS + 1))
    if mutant == "doubled gradient" and world.rank == world.world_size - 1:
        gradients = [local(one.parameter.grad) for one in held if one.parameter.grad is not None]
        max(gradients, key=lambda gradient: float(gradient.norm())).mul_(2.0)
    norm = clip_gradients(held, 1.0)
    optimizer.step()
    engine.finish_step()
    optimizer.zero_grad()
    return float(sum_over_ranks(loss)), float(norm)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def mutated(mutant: str) -> Iterator[None]:
    """The engine without one of its parts."""
    with pytest.MonkeyPatch.context() as patch:
        if mutant == "dropped reduction":
            whole = Engine._micro_batch
            patch.setattr(Engine, "_micro_batch", lambda self, last: whole(self, last=False))
        elif mutant == "terms not added":
            patch.setattr("air_hpc.parallel.engine.settle_gradients", lambda *_: None)
        elif mutant == "copies apart":
            patch.setattr(TiedCopies, "add_gradients", lambda _: None)
        elif mutant == "experts averaged among themselves":
            patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda *_: None)
        elif mutant == "unsettled embedding":
            patch.setattr("air_hpc.parallel.engine.settle_embedding", lambda _: None)
        yield


@functools.cache
def single() -> dict[str, Curve]:
    """What one process makes of each model."""
    cases = [Case(Mesh(), model, 1) for model in MODELS]
    return dict(zip(MODELS, run_ranks(1, train_cases, cases)[0], strict=True))


def curves(cases: Sequence[Case]) -> list[Curve]:
    """Of cases of one world size; every rank must have seen the same."""
    [size] = {case.degrees.world_size for case in cases}
    results = run_ranks(size, train_cases, cases, deadline_s=DEADLINE_S + CASE_S * len(cases))
    assert all(result == results[0] for result in results)
    found: list[Curve] = results[0]
    return found


def gap(curve: Curve, model: str) -> float:
    """The largest difference of a loss or a norm from the single process's; relative above 1."""
    pairs = zip(curve, single()[model], strict=True)
    return max(
        abs(a - b) / max(1.0, abs(b)) for got, want in pairs for a, b in zip(got, want, strict=True)
    )
