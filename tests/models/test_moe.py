"""The mixture of experts against its formulas, written out token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from air_hpc.config.spec import ModelSpec, MoeSpec
from air_hpc.models import initialize, moe, on_meta
from air_hpc.models.feed_forward import activate
from air_hpc.models.moe import Experts, MoeFeedForward, bias_step, moe_layers

CPU = torch.device("cpu")
MIXED = MoeSpec(experts=4, active_experts=2, expert_ffn_dim=24, balance="none")
SMALL = ModelSpec(dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=32, vocab_size=64, moe=MIXED)


def build(spec: MoeSpec = MIXED, seed: int = 0) -> MoeFeedForward:
    """A mixture whose parts all matter."""
    mixture = MoeFeedForward(replace(SMALL, moe=spec), spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
    return mixture


def stream(batch: int = 2, tokens: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, tokens, 16, generator=generator)


def one_by_one(mixture: MoeFeedForward, x: Tensor) -> Tensor:
    """What `mixture` should answer, one token and one expert after the other."""
    spec, experts = mixture.moe, mixture.experts
    answers = []
    for token in x.flatten(0, 1):
        logits = mixture.router.weight @ token
        scores = logits.sigmoid() if spec.score == "sigmoid" else logits.softmax(0)
        best = sorted(range(spec.experts), key=lambda i: float(scores[i].detach()), reverse=True)
        chosen = best[: spec.active_experts]
        total = sum(scores[i] for i in chosen) if spec.normalize else 1.0
        answer = torch.zeros(16) if mixture.shared is None else mixture.shared(token)
        for i in chosen:
            hidden = activate(experts.w1[i] @ token, "silu") * (experts.w3[i] @ token)
            answer = answer + scores[i] / total * (experts.w2[i] @ hidden)
        answers.append(answer)
    return torch.stack(answers).view(x.shape)


@pytest.mark.parametrize(
    "spec",
    [
        MIXED,
        replace(MIXED, normalize=False),
        replace(MIXED, score="sigmoid", shared_experts=2),
        replace(MIXED, score="sigmoid", normalize=False, active_experts=1),
        replace(MIXED, active_experts=4),
    ],
    ids=["mixtral", "unnormalized", "sigmoid-shared", "switch", "all"],
)
def test_each_token_gets_the_weighted_answers_of_its_experts(spec: MoeSpec) -> None:
    mixture, weights = build(spec), torch.linspace(-1, 1, 16)
    answers, gradients = [], []
    for compute in (mixture, lambda x: one_by_one(mixture, x)):
        x = stream().requires_grad_()
        mixture.zero_grad()
        answer = compute(x)
        (answer * weights).sum().backward()
        answers.append(answer)
        gradients.append([x.grad, *(p.grad for p in mixture.parameters())])
    torch.testing.assert_close(*answers)
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted)


def test_the_grouped_product_and_the_loop_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = Experts(4, 16, 24, "silu").to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.normal_(generator=generator)
    counts = torch.tensor([3, 0, 7, 2])
    results = []
    grouped = []
    for usual in (True, False):
        monkeypatch.setattr(moe, "groupable", lambda w, usual=usual: usual and w.shape[0] == 4)
        monkeypatch.setattr(
            moe.F, "grouped_mm", _counting(torch.nn.functional.grouped_mm, grouped), raising=True
        )
        rows = stream(1, 12)[0].to(torch.bfloat16).requires_grad_()
        experts.zero_grad()
        out = experts(rows, counts)
        out.backward(torch.ones_like(out))
        monkeypatch.undo()
        results.append([out, rows.grad, *(w.grad for w in experts.parameters())])
        assert len(grouped) == 3, "the first pass alone calls it, once for each weight"
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=1e-2)
    assert not results[0][2][1].any(), "an expert without a row has a gradient, of zeros"


def _counting(function, calls):  # type: ignore[no-untyped-def]
    def call(*args, **kwargs):  # type: ignore[no-untyped-def]
        calls.append(1)
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_row_at_all_still_gives_every_weight_a_gradient(dtype: torch.dtype) -> None:
    experts = Experts(4, 16, 24, "silu").to(dtype)
    out = experts(torch.zeros(0, 16, dtype=dtype), torch.zeros(4, dtype=torch.long))
    out.backward(torch.ones_like(out))
    assert all(w.grad is not None and not w.grad.any() for w in experts.parameters())


def balance_loss(mixture: MoeFeedForward, x: Tensor) -> Tensor:
    """DeepSeek-V3, eq. 17-20, in the mean over sequences."""
    spec, losses = mixture.moe, []
    for sequence in x:
        logits = sequence @ mixture.router.weight.T
        scores = logits.sigmoid() if spec.score == "sigmoid" else logits.softmax(-1)
        scores = scores / scores.sum(-1, keepdim=True)
        loss = torch.zeros(())
        for i in range(spec.experts):
            best = scores.detach().argsort(-1, descending=True)[:, : spec.active_experts]
            f = spec.experts / (spec.active_experts * len(x[0])) * (best == i).sum()
            loss = loss + f * scores[:, i].mean()
        losses.append(spec.balance_loss_weight * loss)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_balance_loss_joins_the_gradient_and_not_the_output(score: str) -> None:
    spec = replace(MIXED, score=score, balance_loss_weight=0.5)
    plain, balanced = build(spec), build(replace(spec, balance="loss"))
    balanced.loss_scale = 0.25
    x = stream()
    out = plain(x)
    assert torch.equal(out, balanced(x))
    out.sum().backward()
    (0.25 * balance_loss(plain, x)).backward()
    balanced(x).sum().backward()
    assert plain.router.weight.grad is not None
    torch.testing.assert_close(balanced.router.weight.grad, plain.router.weight.grad)
    alone = build(spec)
    alone(x).sum().backward()
    assert not torch.allclose(alone.router.weight.grad, plain.router.weight.grad)


def test_the_balance_loss_is_the_same_however_a_batch_is_split() -> None:
    spec = replace(MIXED, balance="loss", balance_loss_weight=0.5)
    whole, split = build(spec), build(spec)
    whole(stream(4)).sum().backward()
    split.loss_scale = 1 / 2
    for part in stream(4).chunk(2):
        split(part).sum().backward()
    torch.testing.assert_close(split.router.weight.grad, whole.router.weight.grad)


def test_a_sequence_in_two_pieces_has_the_balance_loss_of_the_whole() -> None:
    """Each rank of context parallelism sees a piece; their mean gradient is that of the whole."""
    spec = replace(MIXED, balance="loss", balance_loss_weight=0.5)
    whole, pieces, alone = build(spec), build(spec), build(spec)
    x = stream()
    (whole(x).mean() * 0).backward()
    seen: list[Tensor] = []
    pieces.sum_over_sequence = lambda counts: seen.append(counts) or counts
    halves = x.chunk(2, dim=1)
    for half in halves:
        pieces(half)
    totals = seen[0] + seen[1]
    pieces.sum_over_sequence = lambda counts: totals
    pieces.loss_scale = alone.loss_scale = 1 / 2
    for half in halves:
        (pieces(half).mean() * 0).backward()
        (alone(half).mean() * 0).backward()
    torch.testing.assert_close(pieces.router.weight.grad, whole.router.weight.grad)
    assert not torch.allclose(alone.router.weight.grad, whole.router.weight.grad)


def test_the_bias_moves_the_choice_and_leaves_the_weights() -> None:
    mixture = build(replace(MIXED, balance="bias", active_experts=1))
    with torch.no_grad():
        mixture.expert_bias[2] = 10.0
    scores = mixture.router(stream()).softmax(-1)
    chosen, weights = mixture._choose(scores)
    assert bool((chosen == 2).all())
    assert torch.equal(weights, torch.ones_like(weights))
    mixture.moe = replace(mixture.moe, normalize=False)
    assert torch.equal(mixture._choose(scores)[1], scores[..., 2:3])


def test_the_bias_falls_with_too_much_load_and_rises_with_too_little() -> None:
    step = bias_step(torch.tensor([9.0, 4.0, 1.0, 2.0]), 0.001)
    torch.testing.assert_close(step, torch.tensor([-0.001, 0.0, 0.001, 0.001]))


def test_steps_of_the_bias_even_out_the_load() -> None:
    mixture = build(replace(MIXED, balance="bias", balance_bias_rate=0.005))
    x = 0.3 * stream(8, 32) + 0.5
    spreads = []
    for _ in range(100):
        mixture(x).sum().backward()
        spreads.append(float(mixture.load.max() / mixture.load.mean()))
        mixture.update_expert_bias(mixture.load)
    assert spreads[0] > 1.5
    assert max(spreads[-10:]) < 1.1


def test_the_load_counts_each_trained_token_once() -> None:
    mixture = build(replace(MIXED, balance="bias"))
    x = stream().requires_grad_()
    with torch.no_grad():
        mixture(x)
    first, second = mixture(x), mixture(x)
    first.sum().backward()
    second.sum().backward()
    again = checkpoint(mixture, x, use_reentrant=False)
    again.sum().backward()
    assert float(mixture.load.sum()) == 3 * 12 * 2
    mixture.update_expert_bias(mixture.load)
    assert not mixture.load.any()


def test_the_router_computes_in_float32_whatever_the_rest_does() -> None:
    mixture = build()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = mixture.router(stream().to(torch.bfloat16))
        out = mixture(stream())
    exact = mixture.router(stream().to(torch.bfloat16).float())
    assert logits.dtype == torch.float32
    assert torch.equal(logits, exact)
    assert out.dtype == torch.bfloat16


def test_a_mixture_is_a_drop_in_for_the_feed_forward_of_the_layers_that_have_experts() -> None:
    spec = replace(SMALL, moe=replace(MIXED, dense_layers=1, shared_experts=1, balance="bias"))
    model = on_meta(spec, 8)
    initialize(model, spec, 0, CPU)
    here = "layers.1.feed_forward"
    names = {name for name in model.state_dict() if name.startswith("layers.1.feed_forward")}
    weights = {"router.weight", *(f"shared.w{n}.weight" for n in (1, 2, 3))}
    weights |= {"experts.w1", "experts.w2", "experts.w3", "expert_bias"}
    assert names == {f"{here}.{name}" for name in weights}
    assert "layers.0.feed_forward.w1.weight" in model.state_dict()
    assert len(moe_layers(model)) == 1


def test_first_weights_of_experts_are_scaled_as_those_of_a_feed_forward() -> None:
    spec = replace(SMALL, dim=64, moe=replace(MIXED, shared_experts=1, balance="bias"))
    model = on_meta(spec, 8)
    initialize(model, spec, 0, CPU)
    mixture = moe_layers(model)[0]
    residual = spec.init_std / (2 * spec.layers) ** 0.5
    assert mixture.shared is not None
    for weight, std in (
        (mixture.experts.w1, spec.init_std),
        (mixture.experts.w2, residual),
        (mixture.shared.w2.weight, residual),
        (mixture.router.weight, spec.init_std),
    ):
        assert float(weight.detach().std()) == pytest.approx(std, rel=0.1)
    assert not torch.equal(mixture.experts.w1[0], mixture.experts.w1[1])
    assert not mixture.load.any()
    assert mixture.expert_bias is not None
    assert not mixture.expert_bias.any()


@pytest.mark.full
def test_a_compiled_block_computes_the_same_with_one_graph() -> None:
    spec = replace(SMALL, moe=replace(MIXED, balance="loss", balance_loss_weight=0.5))
    eager, compiled = on_meta(spec, 8), on_meta(spec, 8)
    tokens = torch.arange(16).view(2, 8)
    for model in (eager, compiled):
        initialize(model, spec, 0, CPU)
    for block in compiled.layers.values():
        block.compile(fullgraph=True, backend="aot_eager")
    for model in (eager, compiled):
        model(tokens).square().sum().backward()
    for one, other in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for one, other in zip(moe_layers(eager), moe_layers(compiled), strict=True):
        assert torch.equal(one.load, other.load)
