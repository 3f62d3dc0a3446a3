"""What happens between the projections of attention: scores, mask, softmax, values.

A core takes queries (batch, heads, tokens, head_dim) and keys and values (batch, kv_heads, tokens,
head_dim), `heads` a multiple of `kv_heads`, and returns what each position attends to, in the shape
of the queries. It has no parameters. `parallel.context` puts others in its place, which do the
same over tokens that lie on several ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from air_hpc.config.spec import ModelSpec


class CausalCore(nn.Module):
    """Position t attends to tokens max(0, t - window + 1)…t, to 0…t without a window.

    With a soft cap the scores are formed in memory, tokens × tokens a head: no fused kernel of
    torch's does it on every device.
    """

    def __init__(self, scale: float, window: int | None = None, softcap: float | None = None):
        super().__init__()
        self.scale = scale
        self.window = window
        self.softcap = softcap

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of `q` over `k` and `v`."""
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        tokens = q.shape[2]
        window = None if self.window is None or self.window >= tokens else self.window
        if self.softcap is not None:
            return self._capped(q, k, v, window)
        if window is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        mask = visible(tokens, window, q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)

    def _capped(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        assert self.softcap is not None
        scores = (q @ k.transpose(-2, -1)).float() * self.scale
        scores = soft_cap(scores, self.softcap)
        mask = visible(q.shape[2], window, q.device)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return weights.type_as(v) @ v


def core_of(model: ModelSpec, layer: int) -> CausalCore:
    """The core of `layer`, as the model wants it."""
    scale = model.head_width**-0.5 if model.attention_scale is None else model.attention_scale
    return CausalCore(scale, model.window(layer), model.attention_softcap)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """`x` (batch, kv_heads, tokens, head_dim) with each head repeated, up to `heads` of them."""
    repeats = heads // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


def visible(tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys (columns) each query (row) attends to, shape (tokens, tokens), bool."""
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(1 - window)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """c · tanh(x / c): close to x where that is small, never beyond ±c."""
    return torch.tanh(x / cap) * cap
