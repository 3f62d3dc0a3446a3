"""Parameters and model FLOPs of a decoder, in closed form: by module, by layer and as a whole.

Two conventions, always by name: `palm` counts the whole attention matrix (Chowdhery et al., arXiv
2204.02311, appendix B), `causal` the part of it that is attended to: half of it, and with a sliding
window only the band. Both count six FLOPs a token for each weight of a matrix product that the
token passes: the output head is one (also where it is tied), the embedding look-up is none, and of
a mixture of experts the router, the shared and the chosen ones are. Recompute is never counted.

Layers differ (windows, experts), so what a stage of a pipeline holds or computes is a sum over its
own layers: `block_parameters` and `block_flops` for one of them, the embedding's and the head's
beside them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

from air_hpc.config.spec import ModelSpec
from air_hpc.plan.types import FlopsPerToken, ModelCounts


@dataclass(frozen=True)
class BlockParameters:
    """Weights of one block, by module. `experts` are all of them, `active_experts` what of them one
    token passes; `attention` are the four projections, `norms` every norm's weights.
    """

    attention: int
    norms: int
    feed_forward: int = 0
    router: int = 0
    experts: int = 0
    active_experts: int = 0
    shared_experts: int = 0

    @property
    def dense(self) -> int:
        """All but the routed experts: what expert parallelism does not cut."""
        return self.attention + self.norms + self.feed_forward + self.router + self.shared_experts

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts

    @property
    def matmul(self) -> int:
        """Those of matrix products, all experts included."""
        return self.total - self.norms

    @property
    def active(self) -> int:
        """Those that one token uses."""
        return self.dense + self.active_experts

    @property
    def active_matmul(self) -> int:
        """Those of the matrix products that one token passes."""
        return self.active - self.norms


@dataclass(frozen=True)
class ModuleFlops:
    """Forward and backward FLOP of one token, by module.

    `projections` are q, k, v and the output, `scores` the products of queries with keys and of
    weights with values, `experts` those that a token passes.
    """

    projections: float = 0.0
    scores: FlopsPerToken = FlopsPerToken(0.0, 0.0)
    feed_forward: float = 0.0
    router: float = 0.0
    experts: float = 0.0
    shared_experts: float = 0.0
    head: float = 0.0

    @property
    def matmul(self) -> float:
        """All but the scores: 6 FLOP a weight."""
        experts = self.router + self.experts + self.shared_experts
        return self.projections + self.feed_forward + experts + self.head

    @property
    def total(self) -> FlopsPerToken:
        """The sum of all modules."""
        return FlopsPerToken(
            causal=self.matmul + self.scores.causal, palm=self.matmul + self.scores.palm
        )

    def __add__(self, other: ModuleFlops) -> ModuleFlops:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "scores"}
        sums = {name: value + getattr(other, name) for name, value in values.items()}
        mine, its = self.scores, other.scores
        return ModuleFlops(
            scores=FlopsPerToken(mine.causal + its.causal, mine.palm + its.palm), **sums
        )


@functools.cache
def block_parameters(model: ModelSpec, layer: int) -> BlockParameters:
    """The weights of block `layer`, from 0."""
    attention = 2 * model.dim * model.head_width * (model.heads + model.kv_heads)
    norms = (4 if model.post_norms else 2) * model.dim
    norms += 2 * model.head_width if model.qk_norm else 0
    moe = model.moe
    if moe is None or not model.is_moe(layer):
        return BlockParameters(attention, norms, feed_forward=3 * model.dim * model.ffn_dim)
    hidden_dim = model.ffn_dim if moe.expert_ffn_dim is None else moe.expert_ffn_dim
    one = 3 * model.dim * hidden_dim
    return BlockParameters(
        attention,
        norms,
        router=model.dim * moe.experts,
        experts=moe.experts * one,
        active_experts=moe.active_experts * one,
        shared_experts=moe.shared_experts * one,
    )


def embedding_parameters(model: ModelSpec) -> int:
    """The weights of the embedding; a head that is not tied has as many."""
    return model.vocab_size * model.dim


def count_parameters(model: ModelSpec) -> ModelCounts:
    """All parameters (a tied head counted once), those that multiply, and those a token uses."""
    blocks = [block_parameters(model, layer) for layer in range(model.layers)]
    embedding = embedding_parameters(model)
    ends = embedding * (1 if model.tied_head else 2) + model.dim
    return ModelCounts(
        parameters=sum(block.total for block in blocks) + ends,
        matmul_parameters=sum(block.matmul for block in blocks) + embedding,
        active_parameters=sum(block.active for block in blocks) + ends,
    )


def attended_tokens(sequence_length: int, window: int | None) -> float:
    """How many tokens a position attends to, in the mean over a sequence.

    The area under the mask by the sequence length: T/2, as the causal convention has it (half of T²
    where T (T + 1) / 2 pairs are computed), and w - w²/2T with a window of w < T.
    """
    if window is None or window >= sequence_length:
        return sequence_length / 2
    return window - window**2 / (2 * sequence_length)


@functools.cache
def block_flops(model: ModelSpec, layer: int, sequence_length: int) -> ModuleFlops:
    """The FLOPs of block `layer`, from 0, for one token of a sequence."""
    weights = block_parameters(model, layer)
    for_each_token = 12.0 * model.heads * model.head_width
    attended = attended_tokens(sequence_length, model.window(layer))
    return ModuleFlops(
        projections=6.0 * weights.attention,
        scores=FlopsPerToken(for_each_token * attended, for_each_token * sequence_length),
        feed_forward=6.0 * weights.feed_forward,
        router=6.0 * weights.router,
        experts=6.0 * weights.active_experts,
        shared_experts=6.0 * weights.shared_experts,
    )


def head_flops(model: ModelSpec) -> float:
    """Forward and backward FLOP of one token in the output head, tied or not."""
    return 6.0 * embedding_parameters(model)


def model_flops(model: ModelSpec, sequence_length: int) -> ModuleFlops:
    """The FLOPs of the whole model, by module, for one token of a sequence."""
    blocks = (block_flops(model, layer, sequence_length) for layer in range(model.layers))
    return sum(blocks, ModuleFlops(head=head_flops(model)))


def flops_per_token(model: ModelSpec, sequence_length: int) -> FlopsPerToken:
    """Forward and backward FLOP of one token at a sequence length, in both conventions."""
    return model_flops(model, sequence_length).total
