"""What a block keeps of its forward pass, and how it is compiled.

    none     all that autograd wants
    full     its input; the rest is computed again in the backward pass (arXiv 1604.06174)
    ops      its input, every second matrix product, attention and what came over the network
             (selective checkpointing, arXiv 2205.05198, by operation instead of by module)
    budget   what torch.compile's partitioner keeps under a share of the memory of `none`

The block itself stays the module it was, under the same parameter names: only its `forward` is
another. Compiling is by block: one graph serves all of them, and FSDP's hooks stay outside of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from air_hpc.errors import BadInput
from air_hpc.models.moe import moe_layers
from air_hpc.parallel.options import EngineOptions

_ATEN = torch.ops.aten
_KEPT = frozenset(
    {
        _ATEN.mm.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_to_all_single.default,
    }
)
# FSDP's hooks around the experts inside a block mark where they begin and end, and do so at other
# places in a repetition: marks are no part of what is repeated.
SAC_IGNORED_OPS.update(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)


def prepare_blocks(part: nn.Module, options: EngineOptions, *, exchanges: bool = False) -> None:
    """Give each block of `part` its recomputation, and compile it.

    `exchanges`: experts lie on several ranks. FSDP gathers them apart, inside their blocks, which
    then are no one graph.

    Raises BadInput for `budget` without compiling: it is the compiler that keeps to it.
    """
    if options.recompute == "budget":
        if not options.compile:
            raise BadInput.single(
                "parallelism.recompute",
                "budget",
                "it is torch.compile that keeps to a budget, and train.compile is false",
                allowed="none, full, ops",
                hint="Set train.compile=true",
            )
        torch._functorch.config.activation_memory_budget = options.recompute_budget
    for block in part.get_submodule("layers").children():
        if options.recompute in ("full", "ops"):
            _recompute(block, selective=options.recompute == "ops")
        if options.compile:
            whole = not (exchanges and moe_layers(block))
            block.compile(fullgraph=whole, backend=options.compile_backend)


def _recompute(block: nn.Module, *, selective: bool) -> None:
    kept: dict[str, Any] = {}
    if selective:
        kept["context_fn"] = _selection
    random = bool(getattr(block, "dropout", 0.0))
    whole = block.forward

    # A frame of our own: torch.compile begins no graph in one of torch's.
    def forward(*inputs: Any) -> Any:
        return checkpoint(whole, *inputs, use_reentrant=False, preserve_rng_state=random, **kept)

    block.forward = forward


def _selection() -> Any:
    """The contexts of one forward pass and of its repetition, which counts products anew."""
    products = {True: 0, False: 0}

    def policy(
        context: SelectiveCheckpointContext, operation: Any, *_args: Any, **_options: Any
    ) -> CheckpointPolicy:
        again = context.is_recompute
        if operation is _ATEN.mm.default:
            products[again] += 1
            if products[again] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        kept = operation in _KEPT
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
