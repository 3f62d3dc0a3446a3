"""Tensor parallelism with sequence parallelism throughout, as a plan over DTensor.

Between the blocks each rank of the group holds a piece of the sequence (batch, tokens / tp, dim).
A branch gathers it, computes with its share of the heads or of the hidden width, and scatters the
sum (Megatron-LM, arXiv 1909.08053; the sequence's part, 2205.05198). Norms work on the pieces, so
their weights are replicated DTensors and every parameter of a part is a DTensor: gradients of the
copies are added by DTensor, and a norm or a clip never meets two kinds.

Mixtures of experts are cut by `parallel.mixture`, in the same way.

The head and the embedding are cut over the vocabulary. With `loss_parallel` the logits stay cut,
and the loss is computed across the ranks without ever holding a row of them whole.

A compiled block loses the gradient of an embedding whose output is still under way (torch 2.13: an
AsyncCollectiveTensor that enters a graph); `settle_embedding` hands it a settled copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from air_hpc.models.decoder import Decoder, next_token_loss
from air_hpc.models.moe import MoeFeedForward

LossFunction = Callable[[Tensor, Tensor], Tensor]


def split(part: Decoder, mesh: DeviceMesh, *, keep_logits_cut: bool) -> None:
    """Cut `part` over the tensor-parallel `mesh`. It takes and returns plain local tensors.

    A part's logits are this rank's piece of the vocabulary with `keep_logits_cut`, else whole.
    """
    logits = Shard(-1) if keep_logits_cut else Replicate()
    plan: dict[str, ParallelStyle] = {}
    if part.tok_embeddings is not None:
        plan["tok_embeddings"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if part.norm is not None:
        plan["norm"] = SequenceParallel()
    if part.output is not None:
        plan["output"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=logits)
    for layer in part.layers.values():
        parallelize_module(layer, mesh, _block_plan(layer))
    parallelize_module(part, mesh, plan)
    if part.last and part.output is None:
        _split_tied_head(part, mesh, logits)


def settle_embedding(part: Decoder) -> None:
    """Have the embedding return a copy that no collective is still filling."""
    if part.tok_embeddings is not None and part.first:
        part.tok_embeddings.register_forward_hook(lambda _module, _inputs, out: out.clone())


def loss_over(mesh: DeviceMesh | None) -> LossFunction:
    """`next_token_loss` of logits that are cut over the vocabulary on `mesh`, or whole."""
    if mesh is None:
        return next_token_loss

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        cut = DTensor.from_local(logits, mesh, [Shard(logits.dim() - 1)], run_check=False)
        mean = next_token_loss(cut, targets)
        # A copy, since a view could not be detached in place, as pipelines do with what they used.
        return mean.to_local().clone() if isinstance(mean, DTensor) else mean

    return loss


def loss_context(mesh: DeviceMesh | None) -> AbstractContextManager[object]:
    """What forward and backward passes run in for `loss_over` the same mesh."""
    return contextlib.nullcontext() if mesh is None else loss_parallel()


def _block_plan(layer: nn.Module) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    }
    if not isinstance(layer.get_submodule("feed_forward"), MoeFeedForward):
        plan |= {
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
    for name in ("attention_norm", "ffn_norm", "attention_post_norm", "ffn_post_norm"):
        if getattr(layer, name) is not None:
            plan[name] = SequenceParallel(use_local_output=name.endswith("post_norm"))
    for name in ("q_norm", "k_norm"):
        # Over the width of a head, of which each rank holds some: the heads are its "sequence".
        if getattr(layer.get_submodule("attention"), name) is not None:
            plan[f"attention.{name}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return plan


def _split_tied_head(part: Decoder, mesh: DeviceMesh, logits: Shard | Replicate) -> None:
    """The head is the embedding's own weight, which no module of its own calls: what goes in is
    gathered after the last norm, what comes out is made local after the part."""

    def gather(_module: nn.Module, _inputs: object, out: Tensor) -> Tensor:
        assert isinstance(out, DTensor)
        return out.redistribute(placements=[Replicate()])

    def localize(_module: nn.Module, _inputs: object, out: Tensor) -> Tensor:
        assert isinstance(out, DTensor)
        local: Tensor = out.redistribute(placements=[logits]).to_local()
        return local

    assert part.norm is not None
    part.norm.register_forward_hook(gather)
    part.register_forward_hook(localize)


def settle_gradients(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Lay each gradient out as its parameter is.

    DTensor leaves the embedding's whole on every rank, and those of the norms as one term on each,
    which are added here, all in one go. FSDP does it for its own parameters; without it every use
    of a gradient would do it anew.
    """
    terms: list[tuple[nn.Parameter, Tensor]] = []
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements == parameter.placements:
            continue
        if any(isinstance(placement, Partial) for placement in gradient.placements):
            terms.append((parameter, gradient.to_local()))
        else:
            parameter.grad = gradient.redistribute(placements=parameter.placements)
    if not terms:
        return
    sums = torch.cat([term.flatten() for _, term in terms])
    dist.all_reduce(sums, group=mesh.get_group())
    begin = 0
    for parameter, term in terms:
        assert isinstance(parameter, DTensor)
        total = sums[begin : begin + term.numel()].view(term.shape)
        begin += term.numel()
        parameter.grad = DTensor.from_local(total, mesh, parameter.placements, run_check=False)
