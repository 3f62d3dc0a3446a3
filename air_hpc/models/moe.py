"""A mixture of experts in place of a block's feed-forward.

Promises: (batch, tokens, dim) in and out. Each token's router scores all experts; the token goes
to the `active_experts` best, whose outputs are added with the router's weights, and to the shared
experts, which all tokens pass. No token is dropped, whatever the load. Parameter names are those
of every checkpoint: `router.weight` (experts, dim), `experts.{w1,w3}` (experts, ffn, dim),
`experts.w2` (experts, dim, ffn), `shared.{w1,w2,w3}.weight`, and with `balance: bias` the buffer
`expert_bias` (experts,).

How: the rows of all (token, expert) pairs are sorted by expert, go through `dispatch` to the
experts and back, and are put where they came from. The default calls the experts at hand, one
grouped matrix product a weight; `parallel.expert` puts an exchange between ranks around the same
call. The order of rows never depends on timing, and nothing is added up by atomics.

Balance, by what the spec names:
- `loss`: the sequence-wise loss of DeepSeek-V3 (arXiv 2412.19437, eq. 17-20),
  alpha · sum over experts of f · P, with f the share of a sequence's choices that fell on an expert
  (times the number of experts) and P its mean share of the scores. It is a mean over sequences, so
  it is the same however a batch is split. It joins in the backward pass alone: what is returned,
  logged and handed from stage to stage of a pipeline never changes.
- `bias`: a bias that only the choice sees, moved against the load after each step
  (arXiv 2408.15664): `load` is counted in the backward pass, once for each token that is trained
  on, so that neither evaluation nor recompute counts.

What may go wrong: a caller that scales the loss (accumulation, a mean over ranks) has to say so in
`loss_scale`, since a gradient that begins here knows nothing of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from air_hpc.config.spec import ModelSpec, MoeSpec
from air_hpc.models.feed_forward import FeedForward, activate
from air_hpc.models.local import local_part

Dispatch = Callable[[Tensor, Tensor, "Experts"], Tensor]
"""Takes rows (choices, dim) sorted by expert, how many belong to each of all experts, and the
experts at hand; returns the experts' outputs for these rows, in their order."""


class Experts(nn.Module):
    """Several gated feed-forwards, their weights stacked; see `FeedForward` for what one computes.

    Under expert parallelism the parameters are cut over the first dimension and only the local
    part is used, so that `counts` has one entry for each local expert.
    """

    def __init__(self, experts: int, dim: int, hidden_dim: int, activation: str) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(experts, hidden_dim, dim))
        self.activation = activation

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Outputs (rows, dim): the first counts[0] rows by the first expert, and so on.

        Every weight takes part, so that an expert without a row has a gradient of zeros: the
        collectives of all ranks match.
        """
        dtype = _compute_dtype(rows)
        w1, w2, w3 = (local_part(weight).to(dtype) for weight in (self.w1, self.w2, self.w3))
        rows = rows.to(dtype)
        if groupable(w1) and groupable(w2) and has_values(rows):
            ends = counts.cumsum(0, dtype=torch.int32)
            gate = F.grouped_mm(rows, w1.transpose(-2, -1), offs=ends)
            up = F.grouped_mm(rows, w3.transpose(-2, -1), offs=ends)
            return F.grouped_mm(
                activate(gate, self.activation) * up, w2.transpose(-2, -1), offs=ends
            )
        parts = torch.split(rows, group_sizes(counts, len(rows)))
        gate = _each(parts, w1)
        up = _each(parts, w3)
        hidden = activate(gate, self.activation) * up
        return _each(torch.split(hidden, [len(part) for part in parts]), w2)


def _each(parts: Iterable[Tensor], weights: Tensor) -> Tensor:
    products = [part @ w.T for part, w in zip(parts, weights.unbind(), strict=True)]
    return torch.cat(products)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """What matrix products of `x` are computed in: autocast does not know the grouped one."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def groupable(weight: Tensor) -> bool:
    """Whether torch's grouped product takes this stack: bfloat16, rows from 16 bytes to 16 bytes.

    It takes float32 on some devices only, and there as a loop of its own.
    """
    aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape[-2:])
    return weight.dtype == torch.bfloat16 and aligned


def has_values(x: Tensor) -> bool:
    """Whether `x` has numbers: on meta and among fake tensors it has a shape alone."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def group_sizes(counts: Tensor, rows: int) -> list[int]:
    """`counts` as numbers; where there are no values, `rows` split as evenly as they go.

    A trace on shapes alone so sees the matrix products of a balanced load, each by itself.
    """
    if has_values(counts):
        sizes: list[int] = counts.tolist()
        return sizes
    each, more = divmod(rows, len(counts))
    return [each + (index < more) for index in range(len(counts))]


def run_here(rows: Tensor, counts: Tensor, experts: Experts) -> Tensor:
    """The dispatch of a process that holds all experts."""
    out: Tensor = experts(rows, counts)
    return out


class Router(nn.Linear):
    """Logits (…, experts) in float32, whatever the model computes in: what it decides is a sort."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__(dim, experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of `x` (…, dim)."""
        kind = x.device.type
        plain = contextlib.nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)
        with plain:
            return F.linear(x.float(), self.weight.float())


class MoeFeedForward(nn.Module):
    """What stands in place of a block's feed-forward where the spec has experts.

    An engine may replace `dispatch`, and sets `loss_scale` to what it multiplies the mean loss of
    one forward pass with before the backward pass. Where a sequence lies on several ranks,
    `sum_over_sequence` adds up a tensor of all of them.
    """

    expert_bias: Tensor | None
    load: Tensor

    def __init__(self, model: ModelSpec, moe: MoeSpec) -> None:
        super().__init__()
        hidden_dim = model.ffn_dim if moe.expert_ffn_dim is None else moe.expert_ffn_dim
        self.moe = moe
        self.router = Router(model.dim, moe.experts)
        self.experts = Experts(moe.experts, model.dim, hidden_dim, model.activation)
        shared_dim = moe.shared_experts * hidden_dim
        self.shared = (
            FeedForward(model.dim, shared_dim, model.activation) if moe.shared_experts else None
        )
        bias = torch.zeros(moe.experts) if moe.balance == "bias" else None
        self.register_buffer("expert_bias", bias)
        self.register_buffer("load", torch.zeros(moe.experts), persistent=False)
        self.dispatch: Dispatch = run_here
        self.sum_over_sequence: Callable[[Tensor], Tensor] = _as_it_is
        self.loss_scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """The same shape as `x` (batch, tokens, dim)."""
        out = self._routed(x)
        return out if self.shared is None else out + self.shared(x)

    def _routed(self, x: Tensor) -> Tensor:
        scores = self._scores(self.router(x))
        chosen, weights = self._choose(scores)
        # By comparison and not by scattering, which torch refuses to do deterministically on CUDA.
        numbers = torch.arange(self.moe.experts, device=chosen.device)
        counts = (chosen.flatten(1).unsqueeze(-1) == numbers).sum(1)
        out = self._computed(x, chosen, weights, counts.sum(0))
        if not torch.is_grad_enabled():
            return out
        loss = self._balance_loss(scores, counts) if self.moe.balance == "loss" else None
        balanced: Tensor = _Balanced.apply(  # type: ignore[no-untyped-call]
            out, loss, self.loss_scale, self.load, counts.sum(0)
        )
        return balanced

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.moe.score == "sigmoid" else logits.softmax(-1)

    def _choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen experts of each token (batch, tokens, active) and their weights."""
        seen = scores if self.expert_bias is None else scores + self.expert_bias
        chosen = seen.topk(self.moe.active_experts, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.moe.normalize:
            # Sigmoids may all be as good as zero.
            tiny = torch.finfo(weights.dtype).tiny
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(tiny)
        return chosen, weights

    def _computed(self, x: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        active = self.moe.active_experts
        order = chosen.flatten().argsort(stable=True)
        rows = x.flatten(0, 1)[order // active]
        answers = self.dispatch(rows, counts, self.experts)
        answers = answers[order.argsort()].view(*x.shape[:-1], active, x.shape[-1])
        return (answers * weights.unsqueeze(-1).type_as(answers)).sum(-2)

    def _balance_loss(self, scores: Tensor, counts: Tensor) -> Tensor:
        """The mean over the sequences of alpha · sum f · P; P over the tokens at hand."""
        totals = self.sum_over_sequence(counts.float())
        fractions = self.moe.experts * totals / totals.sum(-1, keepdim=True)
        shares = (scores / scores.sum(-1, keepdim=True)).mean(1)
        return self.moe.balance_loss_weight * (fractions * shares).sum(-1).mean()

    def update_expert_bias(self, load_totals: Tensor) -> None:
        """After a step: move the bias by the load of all ranks, and count from zero again.

        Without a bias (`balance` is not `bias`) only the count begins anew.
        """
        if self.expert_bias is not None:
            self.expert_bias += bias_step(load_totals, self.moe.balance_bias_rate)
        self.load.zero_()

    def reset_buffers(self) -> None:
        """Give the buffers their first values: they hold none after `to_empty`."""
        self.load.zero_()
        if self.expert_bias is not None:
            self.expert_bias.zero_()


def bias_step(load: Tensor, rate: float) -> Tensor:
    """What is added to each expert's bias: `rate` up below the mean load, down above it."""
    return rate * (load.mean() - load).sign()


def moe_layers(model: nn.Module) -> list[MoeFeedForward]:
    """The mixtures of `model`, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, MoeFeedForward)]


def _as_it_is(x: Tensor) -> Tensor:
    return x


class _Balanced(torch.autograd.Function):
    """The identity; backward gives `loss` a gradient of `scale` and adds `counts` to `load`."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, loss: Tensor | None, scale: float, load: Tensor, counts: Tensor
    ) -> Tensor:
        # Not among the saved tensors: another micro-batch's backward pass may change it meanwhile.
        ctx.load = load
        ctx.scale = scale
        ctx.save_for_backward(counts)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (counts,) = ctx.saved_tensors
        ctx.load.add_(counts)
        for_loss = None
        if ctx.needs_input_grad[1]:
            for_loss = torch.full((), ctx.scale, device=counts.device)
        return gradients[0], for_loss, None, None, None
