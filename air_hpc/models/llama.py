"""A Llama-family decoder: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU.

Promises: token ids (batch, tokens) in, logits (batch, tokens, vocabulary) out; position t sees
tokens 0…t only. Parameter names are stable, they are the keys of every checkpoint:
`tok_embeddings`, `layers.N.attention.{wq,wk,wv,wo}`, `layers.N.feed_forward.{w1,w2,w3}`,
`layers.N.{attention_norm,ffn_norm}`, `norm`, `output` (absent with a tied head). The module may
be built on the meta device; `models.initialize` gives it storage and values.

Sources: Llama (arXiv 2302.13971), RMSNorm (1910.07467), SwiGLU (2002.05202), GQA (2305.13245).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from air_hpc.config.spec import ModelSpec
from air_hpc.models.rope import rotate, rotation_table


class RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in float32 and returned in `x`'s dtype."""

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
    """

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        kv_dim = model.kv_heads * model.head_dim
        self.wq = nn.Linear(model.dim, model.dim, bias=False)
        self.wk = nn.Linear(model.dim, kv_dim, bias=False)
        self.wv = nn.Linear(model.dim, kv_dim, bias=False)
        self.wo = nn.Linear(model.dim, model.dim, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Attention over `x` (batch, tokens, dim), turned by the rotation `table`."""
        batch, tokens, _ = x.shape
        q = self.wq(x).view(batch, tokens, -1, self.head_dim)
        k = self.wk(x).view(batch, tokens, -1, self.head_dim)
        v = self.wv(x).view(batch, tokens, -1, self.head_dim)
        q, k = rotate(q, table), rotate(k, table)
        repeats = q.shape[2] // k.shape[2]
        if repeats > 1:
            k = k.repeat_interleave(repeats, dim=2)
            v = v.repeat_interleave(repeats, dim=2)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        out: Tensor = self.wo(attended.transpose(1, 2).reshape(batch, tokens, -1))
        return out


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) · w3 x)."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.w1 = nn.Linear(model.dim, model.ffn_dim, bias=False)
        self.w2 = nn.Linear(model.ffn_dim, model.dim, bias=False)
        self.w3 = nn.Linear(model.dim, model.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape as `x`."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """One pre-norm decoder layer; dropout on each branch before it joins the residual."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.dim, model.norm_eps)
        self.attention = Attention(model)
        self.ffn_norm = RMSNorm(model.dim, model.norm_eps)
        self.feed_forward = FeedForward(model)
        self.dropout = model.dropout

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """The residual stream after this layer."""
        x = x + self._drop(self.attention(self.attention_norm(x), table))
        return x + self._drop(self.feed_forward(self.ffn_norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Llama(nn.Module):
    """The whole decoder for sequences of at most `sequence_length` tokens.

    A tied head multiplies by the embedding itself and has no parameter of its own, so that no
    wrapper or checkpoint has to know that two names are one tensor.
    """

    table: Tensor

    def __init__(self, model: ModelSpec, sequence_length: int) -> None:
        super().__init__()
        self.spec = model
        self.sequence_length = sequence_length
        self.tok_embeddings = nn.Embedding(model.vocab_size, model.dim)
        self.layers = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = RMSNorm(model.dim, model.norm_eps)
        self.output = (
            None if model.tied_head else nn.Linear(model.dim, model.vocab_size, bias=False)
        )
        device = self.tok_embeddings.weight.device
        table = rotation_table(model, sequence_length, device)
        self.register_buffer("table", table, persistent=False)

    def reset_table(self) -> None:
        """Compute the rotation table again: it holds no values after `to_empty`."""
        self.table = rotation_table(self.spec, self.sequence_length, self.table.device)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the token after each position of `tokens` (batch, tokens)."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.table)
        x = self.norm(x)
        if self.output is None:
            return F.linear(x, self.tok_embeddings.weight)
        logits: Tensor = self.output(x)
        return logits


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats over all positions, computed in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
