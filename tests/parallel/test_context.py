"""Attention over a sequence that lies on several ranks equals attention in one process."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from air_hpc.config.spec import ModelSpec
from air_hpc.errors import BadInput
from air_hpc.models import Decoder, initialize
from air_hpc.models.attention import CausalCore
from air_hpc.models.decoder import next_token_loss
from air_hpc.parallel import ring
from air_hpc.parallel.context import Layout, context_core
from tests.torch_ranks import run_ranks

pytestmark = pytest.mark.torch

METHODS: tuple[Any, ...] = ("ulysses", "ring")
BATCH, TOKENS, HEAD_DIM = 2, 24, 8


@dataclass(frozen=True)
class Case:
    """One shape of attention, and how it is run."""

    method: Any
    heads: int
    kv_heads: int
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32
    mutant: str = ""
    how: str = "plain"

    @property
    def core(self) -> CausalCore:
        return CausalCore(HEAD_DIM**-0.5, self.window, self.softcap)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values, and the gradient of the result, tokens before heads in memory."""
        generator = torch.Generator().manual_seed(0)
        drawn = [
            torch.randn(BATCH, TOKENS, heads, HEAD_DIM, generator=generator).to(self.dtype)
            for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        ]
        q, k, v, grad = (x.transpose(1, 2) for x in drawn)
        return q, k, v, grad


def attention(core: nn.Module, case: Case, layout: Layout) -> list[Tensor]:
    """This rank's part of the result, and of the gradients of q, k and v."""
    *inputs, grad = (layout.shard(x, 2) for x in case.inputs())
    leaves = [x.detach().requires_grad_() for x in inputs]
    if case.how == "checkpointed":
        out = checkpoint(core, *leaves, use_reentrant=False)
    elif case.how == "compiled":
        out = torch.compile(core, backend="aot_eager", fullgraph=True)(*leaves)
    else:
        out = core(*leaves)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def on_ranks(
    rank: int, rendezvous: str, world_size: int, cases: list[Case]
) -> list[list[list[float]]]:
    """All cases one after the other, in a sub-group that lists the world's ranks backwards."""
    store = dist.FileStore(rendezvous, world_size)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
    group = dist.new_group(list(reversed(range(world_size))), sort_ranks=False)
    found = []
    for case in cases:
        ring_rule = ring._Ring.blocks
        if case.mutant == "whole":
            ring._Ring.blocks = _sees_the_future  # type: ignore[method-assign]
        layout = Layout.of(case.method, group)
        if case.mutant == "order":
            layout = replace(layout, method="ulysses")
        core = context_core(case.method, case.core, group)
        found.append([x.float().tolist() for x in attention(core, case, layout)])
        ring._Ring.blocks = ring_rule  # type: ignore[method-assign]
    return found


def _sees_the_future(self: Any, kv: Tensor, tokens: int) -> Any:
    del tokens
    for step in range(self.size):
        coming = self.send(kv) if step < self.size - 1 else None
        yield ring._Block(slice(None), slice(None), causal=step == 0), kv
        kv = coming.wait() if coming is not None else kv


def gap(world_size: int, cases: list[Case]) -> list[float]:
    """For each case, the largest difference from one process, of results and gradients."""
    by_rank = run_ranks(world_size, on_ranks, world_size, cases)
    gaps = []
    for index, case in enumerate(cases):
        exact = replace(case, dtype=torch.float32, how="plain")
        whole = attention(case.core, exact, Layout(case.method, 1, 0))
        largest = 0.0
        for rank in range(world_size):
            layout = Layout(case.method, world_size, world_size - 1 - rank)
            for part, expected in zip(by_rank[rank][index], whole, strict=True):
                difference = torch.tensor(part) - layout.shard(expected, 2)
                largest = max(largest, float(difference.abs().max()))
        gaps.append(largest)
    return gaps


EXACT = [
    *(Case(method, 4, kv) for method in METHODS for kv in (4, 2, 1)),
    Case("ring", 3, 1),
    Case("ulysses", 12, 6),
    Case("ulysses", 4, 2, window=5),
    Case("ulysses", 4, 2, window=7, softcap=3.0),
    *(Case(method, 4, 2, how="checkpointed") for method in METHODS),
]
COMPILED = [Case(method, 4, 2, how="compiled") for method in METHODS]
BF16 = [Case(method, 4, 2, dtype=torch.bfloat16) for method in METHODS]
WRONG = [Case("ring", 4, 2, mutant="whole"), Case("ring", 4, 2, mutant="order")]


@pytest.mark.parametrize("world_size", [2, 4])
def test_attention_over_ranks_equals_one_process(world_size: int) -> None:
    """Sums of up to 24 products of order one, in float32: rounding alone is some 1e-6."""
    gaps = gap(world_size, [*EXACT, *BF16, *WRONG])
    exact, bf16, wrong = gaps[: len(EXACT)], gaps[len(EXACT) : -len(WRONG)], gaps[-len(WRONG) :]
    assert max(exact) <= 3e-6, dict(zip(EXACT, exact, strict=True))
    # bf16 keeps 8 bits, so a value of 4 is off by 2^-7, and a few of them meet.
    assert 1e-3 < min(bf16) <= max(bf16) <= 6e-2
    assert min(wrong) > 0.1, "the comparison does not notice a wrong mask or order"


def test_both_methods_compile_as_one_graph() -> None:
    assert max(gap(2, COMPILED)) <= 3e-6


MODEL = ModelSpec(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=64, vocab_size=64)


def loss_and_gradients(
    rank: int, rendezvous: str, world_size: int
) -> list[tuple[float, list[list[float]]]]:
    """Of a whole decoder by each method: what the ranks add to the mean loss, added up."""
    store = dist.FileStore(rendezvous, world_size)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
    group = dist.group.WORLD
    found = []
    for method in METHODS:
        layout = Layout.of(method, group)
        model = Decoder(MODEL, TOKENS)
        initialize(model, MODEL, 0, torch.device("cpu"))
        model.use_positions(layout.positions(TOKENS))
        for layer in model.layers.values():
            layer.attention.core = context_core(method, layer.attention.core, group)
        data = torch.randint(64, (2, TOKENS + 1), generator=torch.Generator().manual_seed(1))
        inputs, targets = layout.shard(data[:, :-1], 1), layout.shard(data[:, 1:], 1)
        loss = next_token_loss(model(inputs), targets) / world_size
        loss.backward()
        total = loss.detach()
        dist.all_reduce(total)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        found.append((float(total), [p.grad.flatten().tolist() for p in model.parameters()]))
    return found


def test_a_decoder_over_ranks_has_the_loss_and_gradients_of_one_process() -> None:
    """Positions, targets and attention have to follow one and the same layout."""
    expected, whole = run_ranks(1, loss_and_gradients, 1)[0][0]
    for loss, gradients in run_ranks(2, loss_and_gradients, 2)[0]:
        assert loss == pytest.approx(expected, abs=1e-6)
        for got, wanted in zip(gradients, whole, strict=True):
            assert torch.allclose(torch.tensor(got), torch.tensor(wanted), atol=1e-6)


@pytest.mark.parametrize(("method", "size"), list(itertools.product(METHODS, (1, 2, 3, 4))))
def test_every_token_lies_on_one_rank_in_order(method: Any, size: int) -> None:
    positions = [Layout(method, size, rank).positions(24).tolist() for rank in range(size)]
    assert sorted(itertools.chain(*positions)) == list(range(24))
    assert all(held == sorted(held) for held in positions)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ring_ranks_see_equal_shares_of_the_causal_mask(size: int) -> None:
    seen = [int(Layout("ring", size, rank).positions(24).sum()) for rank in range(size)]
    assert len(set(seen)) == 1


def test_a_sequence_that_cannot_be_cut_is_refused_with_both_numbers() -> None:
    with pytest.raises(BadInput, match=r"sequence_length=20.*cp=4 ranks.*a multiple of 8"):
        Layout("ring", 4, 0).shard(torch.zeros(2, 20), 1)


def refusal(method: Any, core: CausalCore, heads: int) -> str:
    """What a core on two ranks says of `heads` heads."""
    group: Any = SimpleNamespace(size=lambda: 2, group_name="")
    with pytest.raises(BadInput) as refused:
        context_core(method, core, group)(*(torch.zeros(1, heads, 4, 8),) * 3)
    return str(refused.value)


def test_what_a_method_cannot_do_is_refused_at_once_with_the_other_method_named() -> None:
    ring_refused = refusal("ring", CausalCore(1.0, window=4, softcap=30.0), 4)
    heads_refused = refusal("ulysses", CausalCore(1.0), 3)
    assert "sliding_window=4" in ring_refused
    assert "attention_softcap=30.0" in ring_refused
    assert "cp_method=ulysses" in ring_refused
    assert "parallelism.cp=2" in heads_refused
    assert "a divisor of 3" in heads_refused
