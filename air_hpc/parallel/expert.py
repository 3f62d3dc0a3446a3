"""Expert parallelism: each rank of a group holds some of a mixture's experts, and tokens travel.

Promises: outputs and gradients equal those of one process that holds all experts. Every rank must
call the dispatch the same number of times, in the same order, forward and backward; how many rows
a rank sends or receives does not matter, none is fine.

How: rows come sorted by expert, and rank r of n holds the r-th of n equal parts of the experts, so
what goes to a rank lies in one piece. The ranks exchange how many rows go to each expert, then
the rows; what arrived (sorted by sender) is sorted by expert, runs through the experts at hand,
and goes the same way back. The numbers are read on the host once a dispatch: sizes of an exchange
have to be known there.

What may go wrong: gradients of the experts have seen the tokens of all ranks in the group, those of
all other weights only their own. Whoever averages over data-parallel ranks divides both by the
*whole* data-parallel size (FSDP2: `set_gradient_divide_factor`).

Source: GShard (arXiv 2006.16668), without its capacity limit: no token is dropped.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
    wait_tensor,
)

from air_hpc.models.moe import Experts, group_sizes, has_values


class ExpertParallelDispatch:
    """A `models.moe.Dispatch` over the ranks of `group`, whose size divides the experts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, rows: Tensor, counts: Tensor, experts: Experts) -> Tensor:
        """The outputs for this rank's `rows`, from whichever rank holds the expert."""
        ranks = self.group.size()
        with torch.no_grad():
            arrivals = _arrived(all_to_all_single(counts, None, None, self.group))
            leaving, coming = counts.view(ranks, -1).sum(1), arrivals.view(ranks, -1).sum(1)
            send, receive = _on_host(leaving, coming, len(rows))
        order = _by_expert(arrivals, ranks, sum(receive))
        mine = self._exchange(rows, receive, send)[order]
        outputs = experts(mine, arrivals.view(ranks, -1).sum(0))
        return self._exchange(outputs[order.argsort()], send, receive)

    def _exchange(self, rows: Tensor, receive: list[int], send: list[int]) -> Tensor:
        return _arrived(all_to_all_single_autograd(rows, receive, send, self.group))


def _arrived(x: Tensor) -> Tensor:
    done: Tensor = wait_tensor(x)  # type: ignore[no-untyped-call]
    return done


def _on_host(leaving: Tensor, coming: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """How many rows go to each rank and how many come from it, read at once."""
    if not has_values(leaving):
        even = group_sizes(leaving, rows)
        return even, even
    send, receive = torch.stack((leaving, coming)).tolist()
    return send, receive


def _by_expert(arrivals: Tensor, ranks: int, rows: int) -> Tensor:
    """The order that sorts rows by expert, for rows that lie by sender and then by expert."""
    here = len(arrivals) // ranks
    expert = torch.arange(here, device=arrivals.device).repeat(ranks)
    # With the size given, nothing is read back from the device.
    return expert.repeat_interleave(arrivals, output_size=rows).argsort(stable=True)
