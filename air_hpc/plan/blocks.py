"""One block of a decoder in numbers: its FLOPs, and its parameters by how a mesh spreads them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from air_hpc.config.spec import ModelSpec


@dataclass(frozen=True)
class Parameters:
    """Counts of parameters. `matrices` are cut over tp, `replicated` (norms, the router) are whole
    on each of its ranks, `experts` are spread over ep and cut over tp."""

    matrices: int = 0
    replicated: int = 0
    experts: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(
            self.matrices + other.matrices,
            self.replicated + other.replicated,
            self.experts + other.experts,
        )

    @property
    def total(self) -> int:
        """All of them."""
        return self.matrices + self.replicated + self.experts


@lru_cache(maxsize=4096)
def block_parts(model: ModelSpec, layer: int) -> Parameters:
    """The parameters of block `layer` (from 0)."""
    head = model.head_width
    attention = 2 * model.dim * head * (model.heads + model.kv_heads)
    norms = (4 if model.post_norms else 2) * model.dim + (2 * head if model.qk_norm else 0)
    moe = model.moe
    if moe is None or not model.is_moe(layer):
        return Parameters(attention + 3 * model.dim * model.ffn_dim, norms)
    expert = 3 * model.dim * (moe.expert_ffn_dim or model.ffn_dim)
    return Parameters(
        attention + moe.shared_experts * expert,
        norms + model.dim * moe.experts,
        moe.experts * expert,
    )


def embedding_parameters(model: ModelSpec) -> int:
    """Of the embedding, and as many again of a head that is not tied to it."""
    return model.vocab_size * model.dim


def block_flops(model: ModelSpec, layer: int, sequence_length: int) -> float:
    """Forward and backward FLOPs of a token in block `layer`, `causal` convention."""
    moe = model.moe
    parts = block_parts(model, layer)
    weights = parts.matrices
    if moe is not None and model.is_moe(layer):
        active = parts.experts // moe.experts * moe.active_experts
        weights += active + model.dim * moe.experts
    window = model.window(layer)
    attended = sequence_length / 2
    if window is not None and window < sequence_length:
        attended = window - window * window / (2 * sequence_length)
    return 6.0 * weights + 12.0 * model.heads * model.head_width * attended


def head_flops(model: ModelSpec) -> float:
    """Forward and backward FLOPs of a token in the output head."""
    return 6.0 * embedding_parameters(model)
