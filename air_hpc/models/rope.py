"""Rotary position embeddings (arXiv 2104.09864), with Llama 3.1's frequency scaling.

Pairs are neighbouring elements of a head, (0, 1), (2, 3), …, as in Meta's own weights: a
checkpoint whose pairs are the two halves of a head needs wq and wk permuted on the way in.
Everything here is float32 whatever the model's precision: at long contexts the angle of a low
frequency does not survive bfloat16's 8 bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from air_hpc.config.spec import ModelSpec, RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians a position for each pair, shape (head_dim / 2,), on the CPU.

    With `scaling`, wavelengths longer than original_context / low_freq_factor are stretched by
    `factor`, those shorter than original_context / high_freq_factor are kept, and what lies
    between is interpolated (arXiv 2407.21783, section 3.4, and its reference code).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if high <= low:
        kept = wavelengths <= scaling.original_context_tokens / low
        return torch.where(kept, frequencies, frequencies / scaling.factor)
    smooth = (scaling.original_context_tokens / wavelengths - low) / (high - low)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def rotation_table(model: ModelSpec, positions: Tensor | int, device: torch.device) -> Tensor:
    """Cosines and sines, shape (2, positions, head_dim / 2), float32.

    `positions` is a vector of them, or how many from 0 on. Computed on the CPU and then moved, so
    that every device kind rotates by the same angles.
    """
    count = positions if isinstance(positions, int) else len(positions)
    if device.type == "meta":
        return torch.empty(2, count, model.head_width // 2, device=device)
    frequencies = inverse_frequencies(model.head_width, model.rope_theta, model.rope_scaling)
    if isinstance(positions, int):
        positions = torch.arange(positions, device="cpu")
    angles = torch.outer(positions.to("cpu", torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin())).to(device)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """`x` (batch, tokens, heads, head_dim) turned by its positions, in `x`'s own dtype."""
    cos, sin = table[:, : x.shape[1]].unsqueeze(2)
    pairs = x.float().view(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).type_as(x)
