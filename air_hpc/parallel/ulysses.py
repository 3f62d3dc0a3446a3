"""Attention that exchanges heads for tokens with the other ranks, and back (arXiv 2309.14509).

Rank r comes with all heads of the r-th piece of the sequence. One all-to-all brings it the r-th
part of the heads of every piece; the layer's own core attends; a second one undoes the first.
Queries, keys and values travel in one message. A rank sends, a layer and direction,
(size - 1) / size of its q, k, v and output.

Where the ranks do not divide the key-value heads, these are repeated before they travel, no more
often than needed: up to the least common multiple of both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

from air_hpc.errors import BadInput
from air_hpc.models.attention import repeat_heads


class UlyssesCore(nn.Module):
    """`core` over the whole sequence, of which each rank of `group` holds one contiguous piece."""

    def __init__(self, core: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self.core = core
        self.group = group
        self.size = group.size()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of this rank's queries over the keys and values of all ranks.

        Raises BadInput when the ranks do not divide the heads.
        """
        heads = q.shape[1]
        if heads % self.size:
            raise BadInput.single(
                "parallelism.cp",
                self.size,
                f"Ulysses gives each rank a part of the {heads} heads that a rank has after "
                "tensor parallelism",
                allowed=f"a divisor of {heads}",
                hint="parallelism.cp_method=ring does not depend on the heads",
            )
        kv_heads = math.lcm(k.shape[1], self.size)
        k, v = repeat_heads(k, kv_heads), repeat_heads(v, kv_heads)
        # One part for each destination holds its heads of q, k and v.
        batch, _, tokens, head_dim = q.shape
        parts = [x.view(batch, self.size, -1, tokens, head_dim).movedim(1, 0) for x in (q, k, v)]
        here = self._exchange(torch.cat(parts, dim=2))
        # (source, batch, heads, tokens, head_dim): sources are pieces of the sequence, in order.
        whole = here.permute(1, 2, 0, 3, 4).flatten(2, 3)
        q, k, v = torch.split(whole, [part.shape[2] for part in parts], dim=1)
        attended = self.core(q, k, v).view(batch, -1, self.size, tokens, head_dim)
        # Sources are now parts of the heads.
        return self._exchange(attended.movedim(2, 0)).movedim(0, 1).flatten(1, 2)

    def _exchange(self, parts: Tensor) -> Tensor:
        """`parts` (destination, …), to (source, …)."""
        # The collective takes memory as it lies: a view in another order would arrive scrambled.
        sent: Tensor = all_to_all_single_autograd(parts.contiguous(), None, None, self.group)
        arrived: Tensor = wait_tensor(sent)  # type: ignore[no-untyped-call]
        return arrived
