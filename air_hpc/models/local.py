"""What of a tensor lies on this rank."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its storage; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
