"""One decoder for all model families: RMSNorm, rotary embeddings, grouped-query attention, a gated
feed-forward or a mixture of experts.

Promises: token ids (batch, tokens) in, logits (batch, tokens, vocabulary) out; position t sees
tokens 0…t only. Parameter names are stable, they are the keys of every checkpoint:
`tok_embeddings`, `layers.N.attention.{wq,wk,wv,wo}`, `layers.N.feed_forward.{w1,w2,w3}`,
`layers.N.{attention_norm,ffn_norm}`, `norm`, `output` (absent with a tied head), and where the
model has them `layers.N.attention.{q_norm,k_norm}`, `layers.N.{attention_post_norm,ffn_post_norm}`,
and `models.moe`'s in place of a feed-forward's.
The module may be built on the meta device; `models.initialize` gives it storage and values.

A `Decoder` may be a part of the whole, for a stage of a pipeline: some of the layers, under their
own numbers, with or without the two ends. A part that does not begin with the embedding takes the
residual stream (batch, tokens, dim), and one that does not end with the head returns it.

Sources: Llama (arXiv 2302.13971), RMSNorm (1910.07467), SwiGLU (2002.05202), GQA (2305.13245),
Qwen3 (2505.09388), Gemma 2 (2408.00118).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from air_hpc.config.spec import ModelSpec
from air_hpc.models.attention import core_of, soft_cap
from air_hpc.models.feed_forward import FeedForward
from air_hpc.models.moe import MoeFeedForward
from air_hpc.models.rope import rotate, rotation_table


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, in float32, returned in `x`'s dtype."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """The normalised `x`."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).type_as(x)


class Attention(nn.Module):
    """Causal self-attention; `heads` queries share `kv_heads` keys and values.

    The number of heads is taken from the projections' width, so that a slice of the heads works.
    `core` is what a context-parallel engine replaces.
    """

    def __init__(self, model: ModelSpec, layer: int) -> None:
        super().__init__()
        self.head_dim = model.head_width
        q_dim, kv_dim = model.heads * self.head_dim, model.kv_heads * self.head_dim
        self.wq = nn.Linear(model.dim, q_dim, bias=False)
        self.wk = nn.Linear(model.dim, kv_dim, bias=False)
        self.wv = nn.Linear(model.dim, kv_dim, bias=False)
        self.wo = nn.Linear(q_dim, model.dim, bias=False)
        self.q_norm = RMSNorm(self.head_dim, model.norm_eps) if model.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, model.norm_eps) if model.qk_norm else None
        self.core: nn.Module = core_of(model, layer)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Attention over `x` (batch, tokens, dim), turned by the rotation `table`."""
        batch, tokens, _ = x.shape
        q = self.wq(x).view(batch, tokens, -1, self.head_dim)
        k = self.wk(x).view(batch, tokens, -1, self.head_dim)
        v = self.wv(x).view(batch, tokens, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, table), rotate(k, table)
        attended = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        out: Tensor = self.wo(attended.transpose(1, 2).reshape(batch, tokens, -1))
        return out


def _feed_forward(model: ModelSpec, layer: int) -> nn.Module:
    if model.moe is not None and model.is_moe(layer):
        return MoeFeedForward(model, model.moe)
    return FeedForward(model.dim, model.ffn_dim, model.activation)


class Block(nn.Module):
    """One pre-norm decoder layer; dropout on each branch before it joins the residual."""

    def __init__(self, model: ModelSpec, layer: int) -> None:
        super().__init__()
        dim, eps = model.dim, model.norm_eps
        self.attention_norm = RMSNorm(dim, eps)
        self.attention = Attention(model, layer)
        self.attention_post_norm = RMSNorm(dim, eps) if model.post_norms else None
        self.ffn_norm = RMSNorm(dim, eps)
        self.feed_forward: nn.Module = _feed_forward(model, layer)
        self.ffn_post_norm = RMSNorm(dim, eps) if model.post_norms else None
        self.dropout = model.dropout

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """The residual stream after this layer."""
        branch = self.attention(self.attention_norm(x), table)
        x = x + self._joining(branch, self.attention_post_norm)
        return x + self._joining(self.feed_forward(self.ffn_norm(x)), self.ffn_post_norm)

    def _joining(self, branch: Tensor, norm: RMSNorm | None) -> Tensor:
        if norm is not None:
            branch = norm(branch)
        return F.dropout(branch, self.dropout, self.training) if self.dropout else branch


class Decoder(nn.Module):
    """The decoder, or a part of it, for sequences of at most `sequence_length` tokens.

    `layers` are the numbers of the blocks it has (all by default), `first` and `last` whether it
    begins with the embedding and ends with the head. A tied head multiplies by the embedding itself
    and has no parameter of its own, so that no wrapper or checkpoint has to know that two names are
    one tensor; a last part that is not the first holds a copy under the embedding's name.
    """

    table: Tensor

    def __init__(
        self,
        model: ModelSpec,
        sequence_length: int,
        layers: Iterable[int] | None = None,
        *,
        first: bool = True,
        last: bool = True,
    ) -> None:
        super().__init__()
        self.spec = model
        self.first, self.last = first, last
        needs_embedding = first or (last and model.tied_head)
        self.tok_embeddings = nn.Embedding(model.vocab_size, model.dim) if needs_embedding else None
        numbers = range(model.layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(number): Block(model, number) for number in numbers})
        self.norm = RMSNorm(model.dim, model.norm_eps) if last else None
        has_output = last and not model.tied_head
        self.output = nn.Linear(model.dim, model.vocab_size, bias=False) if has_output else None
        self._positions: Tensor | int = sequence_length
        device = next(self.parameters()).device
        table = rotation_table(model, sequence_length, device)
        self.register_buffer("table", table, persistent=False)

    def use_positions(self, positions: Tensor) -> None:
        """Rotate by these positions (a vector, one for each token that this rank holds)."""
        self._positions = positions
        self.reset_table()

    def reset_table(self) -> None:
        """Compute the rotation table again: it holds no values after `to_empty`."""
        self.table = rotation_table(self.spec, self._positions, self.table.device)

    def forward(self, x: Tensor) -> Tensor:
        """Logits for the token after each position of `x`, or what a part takes and returns."""
        if self.first:
            assert self.tok_embeddings is not None
            x = self.tok_embeddings(x)
            if self.spec.scale_embedding:
                x = x * self.spec.dim**0.5
        for layer in self.layers.values():
            x = layer(x, self.table)
        return self._logits(x) if self.last else x

    def _logits(self, x: Tensor) -> Tensor:
        assert self.norm is not None
        x = self.norm(x)
        if self.output is not None:
            logits: Tensor = self.output(x)
        else:
            assert self.tok_embeddings is not None
            logits = F.linear(x, self.tok_embeddings.weight)
        cap = self.spec.logit_softcap
        return logits if cap is None else soft_cap(logits.float(), cap)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats over all positions, computed in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
