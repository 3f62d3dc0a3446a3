"""The ranks that save and load together, and how they tell each other things."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """One rank among `world_size`, with a gloo `group` of all of them for objects and files.

    What is told goes through pickle, between the workers of one run. All methods are collective,
    and raise RuntimeError when a rank is lost or does not come within the group's timeout.
    """

    rank: int
    world_size: int
    device: torch.device
    group: ProcessGroup

    def apart(self, timeout_s: float) -> Ranks:
        """The same ranks with a group of their own, for use from another thread."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return Ranks(self.rank, self.world_size, self.device, group)

    def tell(self, value: Any) -> Any:
        """Rank 0's `value` on every rank; what the others give does not matter."""
        box: list[Any] = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def hear(self, value: T) -> list[T]:
        """Every rank's `value`, in rank order, on every rank."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values
