"""Bytes that a forward pass leaves for the backward pass, by what each operation of the decoder
saves (`models.decoder`), for one token of a micro-batch on one rank.

Notation: d model width, q and k the widths of all heads and of all key-value heads, f the
feed-forward's width, c bytes in compute precision, t the tensor-parallel degree (with sequence
parallelism).

A norm keeps its input in float32, 4·w, and on a CPU, where torch has no fused kernel, the
normalised input as well, 4·w more. In a block without recompute:

    norms        2 norms of d/t (4 with post_norms), with qk_norm one of (q + k)/t
    inputs       the normed stream, gathered over tp, before attention and before the feed-forward:
                 2·c·d, not divided by t
    attention    q, out, and keys and values repeated for every head: 4·c·q/t, and 4 bytes a head
                 for the softmax's sums. With a soft cap scores exist as matrices: for each head and
                 token attended to 8 + 3·c. Ulysses has the output twice, as it was computed and as
                 it came back; ring repeats no keys: c·(2·q + 2·k)/t
    dense        w1 x, act(w1 x), w3 x and their product: 4·c·f/t
    experts      router input in float32 and scores, 4·d + 8·experts; then for each of the active
                 experts its row in and out and four hidden values, c·(2·d + 4·f/t)

`full` keeps the block's input, c·d/t, and one block's all while it is computed again. `ops` keeps
beside that input every second product (wq, wv, w1, w2), attention's output, and what came over the
network. `budget` is taken as that share of the way from `full` to `none`.

Sources: Korthikanti et al. (arXiv 2205.05198) for the method; each term checked against torch's
FSDPMemTracker.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from air_hpc.config.spec import ModelSpec, RunSpec
from air_hpc.plan.layout import COMPUTE_BYTES
from air_hpc.plan.types import Mesh


@dataclass(frozen=True)
class Shape:
    """What of a run decides the bytes of a token."""

    model: ModelSpec
    sequence_length: int
    compute_bytes: int
    tp: int
    ep: int
    fused_norms: bool
    cp_method: str | None
    recompute: str
    recompute_budget: float
    loss_parallel: bool

    @classmethod
    def of(cls, spec: RunSpec, mesh: Mesh) -> Shape:
        """From a run and its mesh."""
        return cls(
            spec.model,
            spec.data.sequence_length,
            COMPUTE_BYTES[spec.train.precision],
            mesh.tp,
            mesh.ep,
            spec.accelerator.kind != "cpu",
            spec.parallelism.cp_method if mesh.cp > 1 else None,
            spec.parallelism.recompute,
            spec.parallelism.recompute_budget,
            spec.parallelism.loss_parallel,
        )

    def norm(self, width: int) -> float:
        """What a norm over `width` keeps, its output not counted."""
        return (4 if self.fused_norms else 8) * width

    @property
    def vocabulary(self) -> float:
        """Of the logits on a rank."""
        cut = self.tp if self.loss_parallel else 1
        return self.model.vocab_size / cut


@lru_cache(maxsize=4096)
def block_whole(shape: Shape, *, moe: bool) -> float:
    """Of a block of which nothing is computed again."""
    model, c, t = shape.model, shape.compute_bytes, shape.tp
    q, k = model.heads * model.head_width, model.kv_heads * model.head_width
    total = shape.norm((4 if model.post_norms else 2) * model.dim) / t
    if model.qk_norm:
        total += shape.norm(q + k) / t
    total += 2 * c * model.dim
    total += _attention(shape)
    return total + (experts_whole(shape) if moe else 4 * c * model.ffn_dim / t)


def _attention(shape: Shape) -> float:
    model, c = shape.model, shape.compute_bytes
    q, k = model.heads * model.head_width, model.kv_heads * model.head_width
    if shape.cp_method == "ring":
        return (c * (2 * q + 2 * k) + 4 * model.heads) / shape.tp
    kept = (5 if shape.cp_method == "ulysses" else 4) * c * q
    if model.attention_softcap is None:
        return (kept + 4 * model.heads) / shape.tp
    return (kept + (8 + 3 * c) * model.heads * shape.sequence_length) / shape.tp


def experts_whole(shape: Shape) -> float:
    """Of a mixture of experts, of which nothing is computed again."""
    model, c, moe = shape.model, shape.compute_bytes, shape.model.moe
    assert moe is not None
    width = (moe.expert_ffn_dim or model.ffn_dim) / shape.tp
    rows = moe.active_experts * c * (2 * model.dim + 4 * width)
    return 4 * model.dim + 8 * moe.experts + rows + 4 * c * moe.shared_experts * width


@lru_cache(maxsize=4096)
def block_kept(shape: Shape, *, moe: bool) -> float:
    """Of a block from its forward to its backward pass, under the shape's recompute policy."""
    model, c, t = shape.model, shape.compute_bytes, shape.tp
    if shape.recompute == "none":
        return block_whole(shape, moe=moe)
    enters = c * model.dim / t
    if shape.recompute == "full":
        return enters
    if shape.recompute == "budget":
        whole = block_whole(shape, moe=moe)
        return enters + shape.recompute_budget * (whole - enters)
    q, k = model.heads * model.head_width, model.kv_heads * model.head_width
    products = q + k + (0 if moe else model.ffn_dim)
    out = model.dim * t  # w2's product before it is scattered
    attention = c * q + 4 * model.heads
    scattered = 2 * c * model.dim if t > 1 else 0
    return enters + (c * (products + out) + attention + scattered) / t


@lru_cache(maxsize=4096)
def block_again(shape: Shape, *, moe: bool) -> float:
    """More than is kept, while a block's backward pass runs: what it computed again."""
    return max(0.0, block_whole(shape, moe=moe) - block_kept(shape, moe=moe))


@lru_cache(maxsize=4096)
def block_at_work(shape: Shape, *, moe: bool) -> float:
    """Gradients of activations that a block's backward pass has at once."""
    model, c, t = shape.model, shape.compute_bytes, shape.tp
    return c * (2 * model.dim + 2 * model.ffn_dim / t)


@lru_cache(maxsize=1024)
def head_kept(shape: Shape) -> float:
    """Of the last norm and the head's input; logits are apart."""
    return shape.norm(shape.model.dim) / shape.tp + shape.compute_bytes * shape.model.dim


@lru_cache(maxsize=1024)
def logits_kept(shape: Shape) -> float:
    """Of the loss: the float32 log-softmax, and a soft cap's output before it."""
    return (8 if shape.model.logit_softcap is not None else 4) * shape.vocabulary


@lru_cache(maxsize=1024)
def logits_peak(shape: Shape) -> float:
    """More than is kept, where the loss' backward pass begins: float32 gradients of the logits, two
    of them, and a third where they are cut over the vocabulary (`loss_parallel`)."""
    cut = shape.loss_parallel and shape.tp > 1
    return (12 if cut else 8) * shape.vocabulary
