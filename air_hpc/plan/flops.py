"""Parameters and model FLOPs of a decoder, in closed form.

Two conventions, always by name: `causal` counts half of the attention matrix, `palm` all of it
(Chowdhery et al., arXiv 2204.02311, appendix B). Both count six FLOPs a token for each weight of a
matrix product: the output head is one (also where it is tied), the embedding look-up is none.
Recompute is never counted.
"""

from __future__ import annotations

from air_hpc.config.spec import ModelSpec
from air_hpc.plan.types import FlopsPerToken, ModelCounts


def block_matmul_parameters(model: ModelSpec) -> int:
    """Weights of one decoder block that multiply: q, k, v, o and the three of SwiGLU."""
    kv_width = model.kv_heads * model.head_width
    q_width = model.heads * model.head_width
    attention = 2 * model.dim * q_width + 2 * model.dim * kv_width
    return attention + 3 * model.dim * model.ffn_dim


def block_parameters(model: ModelSpec) -> int:
    """All weights of one decoder block: its matrices and its two norms."""
    return block_matmul_parameters(model) + 2 * model.dim


def count_parameters(model: ModelSpec) -> ModelCounts:
    """All parameters (a tied head counted once), and those that multiply."""
    embedding = model.vocab_size * model.dim
    head = 0 if model.tied_head else embedding
    blocks = model.layers * block_parameters(model)
    final_norm = model.dim
    return ModelCounts(
        parameters=embedding + blocks + final_norm + head,
        matmul_parameters=model.layers * block_matmul_parameters(model) + embedding,
    )


def flops_per_token(model: ModelSpec, sequence_length: int) -> FlopsPerToken:
    """Forward and backward FLOP of one token at a sequence length, in both conventions."""
    weights = 6.0 * count_parameters(model).matmul_parameters
    attention = 6.0 * model.layers * model.heads * model.head_width * sequence_length
    return FlopsPerToken(causal=weights + attention, palm=weights + 2.0 * attention)
