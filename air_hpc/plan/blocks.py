"""The parameters of a block by how a mesh spreads them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from air_hpc.config.spec import ModelSpec
from air_hpc.plan.flops import block_parameters


@dataclass(frozen=True)
class Parameters:
    """Counts of parameters. `matrices` are cut over tp, `replicated` (norms, the router) are whole
    on each of its ranks, `experts` are spread over ep and cut over tp."""

    matrices: int = 0
    replicated: int = 0
    experts: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(
            self.matrices + other.matrices,
            self.replicated + other.replicated,
            self.experts + other.experts,
        )

    @property
    def total(self) -> int:
        """All of them."""
        return self.matrices + self.replicated + self.experts


@cache
def block_parts(model: ModelSpec, layer: int) -> Parameters:
    """The parameters of block `layer` (from 0)."""
    block = block_parameters(model, layer)
    matrices = block.attention + block.feed_forward + block.shared_experts
    return Parameters(matrices, block.norms + block.router, block.experts)
