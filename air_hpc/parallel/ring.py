"""Ring attention: queries stay, keys and values go round (arXiv 2310.01889), with balanced load.

Of 2 · size pieces of the sequence, rank r holds pieces r and 2 · size - 1 - r (`Layout`). At step i
it has the keys and values of rank s = r - i (modulo size), and what the causal mask leaves is one
of three plain cases, the last two of equal cost:

    s = r   its own: the ordinary causal mask over both pieces
    s < r   all its queries see the whole of s's first piece and nothing of the second
    s > r   its second piece's queries see all of s, its first piece's nothing

So no block is computed to be masked away. Each block is the device's fused attention, which tells
the log-sum-exp of every row too; blocks are added up in float32 by it. The backward pass goes round
again with the keys and values, and their float32 gradients travel one rank behind, ending at home.
The next keys and values are on their way while a block is computed.

A rank sends, a layer: forward (size - 1) · |k, v|, backward (size - 1) · |k, v| in their type and
size · |k, v| in float32.

It is an operator of its own (`air_hpc::ring_attention`): torch.compile and fake tensors take it as
one, and a recompute policy by op can keep its result by name. It has no double backward. Every rank
of the group must enter it, in the same order.

The CUDA branch of `attend` is written from torch's operator schemas and was not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import P2POp, ProcessGroup, Work
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    GroupName,
    _resolve_process_group,
)

from air_hpc.models.attention import repeat_heads

aten = torch.ops.aten
_CPU = aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward
_CUDA = aten._scaled_dot_product_flash_attention
_CUDA_BACKWARD = aten._scaled_dot_product_flash_attention_backward
_EFFICIENT = aten._scaled_dot_product_efficient_attention
_EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward


class RingCore(nn.Module):
    """Causal attention over a sequence held by the ranks of `group`, as `Layout` lays it out."""

    def __init__(self, scale: float, group: ProcessGroup) -> None:
        super().__init__()
        self.scale = scale
        self.group_name: str = group.group_name

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of this rank's queries over the keys and values of all ranks."""
        attended: Tensor = torch.ops.air_hpc.ring_attention(q, k, v, self.scale, self.group_name)[0]
        return attended


# Not `torch.library.custom_op`, which loads the compiler at its first call (seconds).
torch.library.define(
    "air_hpc::ring_attention",
    "(Tensor q, Tensor k, Tensor v, float scale, str group_name) -> (Tensor out, Tensor lse)",
)
torch.library.define(
    "air_hpc::ring_attention_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float scale, "
    "str group_name) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)",
)


@torch.library.impl("air_hpc::ring_attention", "default")
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, group_name: str
) -> tuple[Tensor, Tensor]:
    """(what `q` attends to, like `q`; log-sum-exp of its scores (batch, heads, tokens))."""
    ring = _Ring(_resolve_process_group(GroupName(group_name)))
    out, lse = None, None
    for block, (key, value) in ring.blocks(torch.stack((k, v)), q.shape[2]):
        rows, row_lse = attend(q[:, :, block.q], key, value, scale, causal=block.causal)
        if out is None or lse is None:
            out = _tokens_first(q, torch.float32).copy_(rows)
            lse = row_lse.clone(memory_format=torch.contiguous_format)
        else:
            _merge(out[:, :, block.q], lse[:, :, block.q], rows, row_lse)
    assert out is not None
    assert lse is not None
    return out.to(q.dtype), lse


@torch.library.impl("air_hpc::ring_attention_backward", "default")
def ring_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    ring = _Ring(_resolve_process_group(GroupName(group_name)))
    kv = torch.stack((k, v))
    if grad.stride(-1) != 1:  # an expanded gradient, which the kernels do not read
        grad = grad.contiguous()
    grad_q = _tokens_first(q, torch.float32).zero_()
    grad_kv = torch.zeros(kv.shape, dtype=torch.float32, device=q.device)
    coming: _Coming | None = None
    for block, (key, value) in ring.blocks(kv, q.shape[2]):
        rows = block.q
        dq, dk, dv = attend_backward(
            grad[:, :, rows], q[:, :, rows], key, value, out[:, :, rows], lse[:, :, rows], scale,
            causal=block.causal,
        )  # fmt: skip
        grad_q[:, :, rows] += dq
        if coming is not None:
            grad_kv = coming.wait()
        grad_kv[0, :, :, block.kv] += dk
        grad_kv[1, :, :, block.kv] += dv
        coming = ring.send(grad_kv)
    assert coming is not None
    grad_k, grad_v = coming.wait()
    # Copies: an operator's results may not share their memory.
    return grad_q.to(q.dtype), grad_k.to(k.dtype, copy=True), grad_v.to(v.dtype, copy=True)


def _fake(q: Tensor, *_rest: object) -> tuple[Tensor, Tensor]:
    return _tokens_first(q, q.dtype), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    return _tokens_first(q, q.dtype), k.new_empty(k.shape), v.new_empty(v.shape)


torch.library.register_fake("air_hpc::ring_attention", _fake)
torch.library.register_fake("air_hpc::ring_attention_backward", _fake_backward)


def _tokens_first(q: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for what is shaped like `q`, as what follows attention wants it: tokens before heads."""
    batch, heads, tokens, head_dim = q.shape
    return q.new_empty(batch, tokens, heads, head_dim, dtype=dtype).transpose(1, 2)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, ctx.group_name = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, grad: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    grads = torch.ops.air_hpc.ring_attention_backward(
        grad, q, k, v, out, lse, ctx.scale, ctx.group_name
    )
    return *grads, None, None


torch.library.register_autograd("air_hpc::ring_attention", _backward, setup_context=_keep)


@dataclass(frozen=True)
class _Block:
    """Which of a rank's queries meet which of the keys that have come, and whether masked."""

    q: slice
    kv: slice
    causal: bool


@dataclass
class _Coming:
    """A tensor on its way from the previous rank, and the one that is leaving for the next."""

    tensor: Tensor
    leaving: Tensor
    works: list[Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.tensor


class _Ring:
    """Rank `rank` of `size`, which sends to the next and receives from the previous one."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.next = dist.get_global_rank(group, (self.rank + 1) % self.size)
        self.previous = dist.get_global_rank(group, (self.rank - 1) % self.size)

    def send(self, tensor: Tensor) -> _Coming:
        """Begin to pass a contiguous `tensor` on; the previous rank's arrives in its place."""
        received = torch.empty_like(tensor)
        works = dist.batch_isend_irecv(
            [
                P2POp(dist.isend, tensor, self.next, self.group),
                P2POp(dist.irecv, received, self.previous, self.group),
            ]
        )
        return _Coming(received, tensor, works)

    def blocks(self, kv: Tensor, tokens: int) -> Iterator[tuple[_Block, Tensor]]:
        """Each step's block and its keys and values, while those of the next step travel."""
        half = tokens // 2
        every, first, second = slice(None), slice(0, half), slice(half, None)
        for step in range(self.size):
            coming = self.send(kv) if step < self.size - 1 else None
            if step == 0:
                block = _Block(every, every, causal=True)
            elif step <= self.rank:
                block = _Block(every, first, causal=False)
            else:
                block = _Block(second, every, causal=False)
            yield block, kv[:, :, :, block.kv]
            if coming is not None:
                kv = coming.wait()


def _merge(out: Tensor, lse: Tensor, rows: Tensor, row_lse: Tensor) -> None:
    """Add a block of attention over other keys to `out` and `lse`, in place."""
    total = torch.logaddexp(lse, row_lse)
    out *= (lse - total).exp().unsqueeze(-1)
    out += rows.float() * (row_lse - total).exp().unsqueeze(-1)
    lse.copy_(total)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """(attention over one block, its log-sum-exp in float32, (batch, heads, tokens))."""
    if q.device.type == "cpu":
        out, lse = _CPU(q, k, v, 0.0, causal, scale=scale)
    elif _has_flash(q):
        out, lse, *_ = _CUDA(q, k, v, 0.0, causal, scale=scale)
    else:
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        out, lse, *_ = _EFFICIENT(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[:, :, : q.shape[2]]  # some kernels pad the rows


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    *, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One block's part of the gradients; `out` and `lse` are those over all blocks."""
    if q.device.type == "cpu":
        grads = _CPU_BACKWARD(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
        return grads[0], grads[1], grads[2]
    nothing = torch.empty(0, dtype=torch.int64, device=q.device)  # no dropout: no random state
    if _has_flash(q):
        grads = _CUDA_BACKWARD(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal,
            nothing, nothing, scale=scale,
        )  # fmt: skip
        return grads[0], grads[1], grads[2]
    kv_heads = k.shape[1]
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    padding = -q.shape[2] % 32  # the kernel reads rows of log-sum-exp in blocks of 32
    lse = torch.nn.functional.pad(lse, (0, padding)).contiguous()
    dq, dk, dv, _ = _EFFICIENT_BACKWARD(
        grad, q, k, v, None, out, lse, nothing, nothing, 0.0, [True, True, True, False], causal,
        scale=scale,
    )  # fmt: skip
    return dq, _sum_repeats(dk, kv_heads), _sum_repeats(dv, kv_heads)


def _has_flash(q: Tensor) -> bool:
    return q.dtype in (torch.float16, torch.bfloat16)


def _sum_repeats(grad: Tensor, kv_heads: int) -> Tensor:
    batch, heads, tokens, head_dim = grad.shape
    return grad.reshape(batch, kv_heads, heads // kv_heads, tokens, head_dim).sum(2)
