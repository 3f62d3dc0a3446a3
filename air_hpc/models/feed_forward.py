"""The gated feed-forward of a block, and of a mixture's shared experts."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """A gated feed-forward: w2(act(w1 x) · w3 x), act SiLU (SwiGLU) or GELU by its tanh form."""

    def __init__(self, dim: int, hidden_dim: int, activation: str) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """The same shape as `x`."""
        out: Tensor = self.w2(activate(self.w1(x), self.activation) * self.w3(x))
        return out


def activate(x: Tensor, name: str) -> Tensor:
    """The activation that a model's spec names."""
    return F.gelu(x, approximate="tanh") if name == "gelu" else F.silu(x)
