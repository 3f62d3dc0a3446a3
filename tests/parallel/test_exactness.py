"""Every way of spreading trains the same model as one process does.

SGD, since AdamW hardly notices a gradient of the wrong scale; the gradient norm is compared too.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from air_hpc.parallel.wrap import WrapOptions, build_spread

from air_hpc.config.spec import ModelSpec, OptimizerSpec
from air_hpc.models.decoder import next_token_loss
from air_hpc.parallel.reduce import clip_gradients, mean_over_data_ranks
from air_hpc.plan.types import Mesh
from air_hpc.train.optimizer import build_optimizer
from tests.torch_ranks import join_world, run_ranks

pytestmark = pytest.mark.torch

MODEL = ModelSpec(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=64, vocab_size=65)  # cut unevenly
TOKENS, GLOBAL_BATCH, STEPS = 16, 8, 4


def train(
    rank: int,
    rendezvous: str,
    degrees: Mesh,
    accumulation: int = 1,
    precision: str = "fp32",
    mutant: str = "",
    model: ModelSpec = MODEL,
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    world = join_world(rank, rendezvous, degrees)
    spread = build_spread(model, TOKENS, 0, world, WrapOptions(precision=precision))
    optimizer = build_optimizer(
        spread.module.parameters(), OptimizerSpec(name="sgd", lr=0.3), world.device
    )
    data = torch.randint(
        model.vocab_size,
        (STEPS, GLOBAL_BATCH, TOKENS + 1),
        generator=torch.Generator().manual_seed(1),
    )
    spread.settle(data[0, :1, :-1])
    seen = []
    for step in range(STEPS):
        mine = data[step].chunk(world.data_ranks)[world.data_rank]
        total = torch.zeros(())
        for micro, part in enumerate(mine.chunk(accumulation)):
            last = micro == accumulation - 1
            with spread.micro_batch(last=last or mutant == "sync"):
                with spread.autocast():
                    loss = next_token_loss(spread.module(part[:, :-1]), part[:, 1:])
                (loss / (1 if mutant == "scale" else accumulation)).backward()
            total += loss.detach() / accumulation
        norm = clip_gradients(spread.module.parameters(), 1.0)
        if not (mutant == "skip" and rank == 1):
            optimizer.step()
        optimizer.zero_grad()
        seen.append((float(mean_over_data_ranks(total, world)), float(norm)))
    return seen


@functools.cache
def single(precision: str = "fp32", model: ModelSpec = MODEL) -> list[tuple[float, float]]:
    result: list[Any] = run_ranks(1, train, Mesh(), 1, precision, "", model)
    return result[0]  # type: ignore[no-any-return]


def difference(got: list[tuple[float, float]], model: ModelSpec = MODEL) -> float:
    want = single("fp32", model)
    pairs = zip(got, want, strict=True)
    return max(abs(a - b) for g, w in pairs for a, b in zip(g, w, strict=True))


def test_one_process_learns_and_repeats_itself_exactly() -> None:
    again = run_ranks(1, train, Mesh())[0]
    assert again == single()
    assert single()[-1] != single()[0]


@pytest.mark.parametrize(
    ("degrees", "accumulation"),
    [
        (Mesh(dp_replicate=2), 1),
        (Mesh(dp_replicate=2), 2),
        (Mesh(dp_shard=2), 2),
        (Mesh(dp_replicate=2, dp_shard=2), 2),
        (Mesh(), 4),
    ],
    ids=["ddp2", "ddp2-accumulated", "fsdp2-accumulated", "hsdp2x2-accumulated", "accumulated"],
)
def test_a_spread_model_trains_as_one_process_does(degrees: Mesh, accumulation: int) -> None:
    results = run_ranks(degrees.world_size, train, degrees, accumulation)
    assert all(result == results[0] for result in results)
    assert difference(results[0]) <= 2e-5


def test_a_tied_head_is_exact_under_fsdp() -> None:
    tied = ModelSpec(
        dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=64, vocab_size=64, tied_head=True
    )
    results = run_ranks(2, train, Mesh(dp_shard=2), 1, "fp32", "", tied)
    assert difference(results[0], tied) <= 2e-5


def table_in_a_block(rank: int, rendezvous: str, degrees: Mesh) -> tuple[torch.dtype, float]:
    """The type and the sum of the rotation table as rank's first block gets it.

    Rank 1 has a table of its own, all zeros.
    """
    world = join_world(rank, rendezvous, degrees)
    spread = build_spread(MODEL, TOKENS, 0, world, WrapOptions(precision="bf16"))
    seen: list[torch.Tensor] = []
    model = getattr(spread.module, "module", spread.module)
    model.layers["0"].attention.register_forward_pre_hook(lambda _, given: seen.append(given[1]))
    if rank == 1:
        model.table.zero_()
    with spread.autocast():
        spread.module(torch.zeros(1, TOKENS, dtype=torch.long))
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


@pytest.mark.parametrize("degrees", [Mesh(), Mesh(dp_shard=2)], ids=["single", "fsdp2"])
def test_bf16_stays_near_fp32(degrees: Mesh) -> None:
    losses = [loss for loss, _ in run_ranks(degrees.world_size, train, degrees, 1, "bf16")[0]]
    wanted = [loss for loss, _ in single()]
    gap = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    assert 0 < gap <= 1e-2


@pytest.mark.parametrize(
    ("degrees", "accumulation", "mutant"),
    [(Mesh(dp_shard=2), 2, "scale"), (Mesh(dp_replicate=2), 1, "skip")],
)
def test_the_comparison_notices_a_wrong_gradient(
    degrees: Mesh, accumulation: int, mutant: str
) -> None:
    results = run_ranks(degrees.world_size, train, degrees, accumulation, "fp32", mutant)
    assert difference(results[0]) > 2e-4
