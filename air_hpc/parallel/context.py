"""Context parallelism: attention over a sequence whose tokens lie on several ranks.

`Layout` says which tokens a rank holds, `context_core` gives the attention core that works on them
(`models.attention` says what a core is). All else in the model works token by token.

    ulysses   rank r holds the r-th of `size` equal pieces. Around the layer's own core, heads are
              exchanged for tokens, so each rank attends over the whole sequence with some of the
              heads: windows and soft caps work. Needs heads that the ranks divide.
    ring      keys and values are passed around; each rank keeps its queries. Any number of heads.
              The sequence is cut into 2 · size pieces, and rank r holds the r-th from the front
              and the r-th from the back: what the causal mask hides is then the same share on
              every rank, at every step. No windows, no soft caps.

`heads` are those of one rank of a tensor-parallel group. Both are exact, and either takes two or
more ranks. The planner says beforehand what cannot be done; this module refuses it again.

Sources: Ulysses (arXiv 2309.14509), ring attention (arXiv 2310.01889), the balance of pieces from
both ends (arXiv 2311.09431 and Llama 3, arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from air_hpc.errors import BadInput, Problem, raise_if_any
from air_hpc.models import Decoder
from air_hpc.models.attention import CausalCore
from air_hpc.parallel.ring import RingCore
from air_hpc.parallel.ulysses import UlyssesCore

Method = Literal["ulysses", "ring"]


@dataclass(frozen=True)
class Layout:
    """Which tokens of a sequence the `rank`-th of `size` ranks holds."""

    method: Method
    size: int
    rank: int

    @classmethod
    def of(cls, method: Method, group: ProcessGroup) -> Layout:
        """This process's layout in `group`."""
        return cls(method, group.size(), group.rank())

    @property
    def pieces(self) -> int:
        """Into how many equal pieces a sequence is cut: its length must be a multiple."""
        return 2 * self.size if self.method == "ring" else self.size

    @property
    def held(self) -> tuple[int, ...]:
        """Which of the pieces this rank holds, in the order of their tokens."""
        if self.method == "ring":
            return (self.rank, self.pieces - 1 - self.rank)
        return (self.rank,)

    def positions(self, sequence_length: int) -> Tensor:
        """The positions of this rank's tokens, increasing: for `Decoder.use_positions`."""
        return self.shard(torch.arange(sequence_length), 0)

    def shard(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of `whole` (inputs, targets, …) along its sequence dimension.

        Raises BadInput when the sequence is no multiple of `pieces`.
        """
        if self.size == 1:
            return whole
        length = whole.shape[dim]
        if length % self.pieces:
            raise BadInput.single(
                "data.sequence_length",
                length,
                f"{self.method} context parallelism on cp={self.size} ranks cuts a sequence "
                f"into {self.pieces} equal pieces",
                allowed=f"a multiple of {self.pieces}",
            )
        pieces = whole.chunk(self.pieces, dim)
        return torch.cat([pieces[index] for index in self.held], dim)


def context_core(method: Method, core: nn.Module, group: ProcessGroup) -> nn.Module:
    """What replaces `core` (a CausalCore) where the tokens lie on the ranks of `group`.

    Raises BadInput for what the method cannot do: all of it at once.
    """
    if group.size() == 1:
        return core
    if method == "ulysses":
        return UlyssesCore(core, group)
    assert isinstance(core, CausalCore)
    raise_if_any(_beyond_ring(core))
    return RingCore(core.scale, group)


def spread_sequence(
    part: Decoder, sequence_length: int, layout: Layout, group: ProcessGroup
) -> None:
    """Have `part` work on this rank's tokens: their positions, and a core that reaches the others.

    Raises BadInput as `context_core` does, and for a sequence that cannot be cut so.
    """
    part.use_positions(layout.positions(sequence_length))
    for layer in part.layers.values():
        attention = layer.get_submodule("attention")
        core = context_core(layout.method, attention.get_submodule("core"), group)
        attention.register_module("core", core)


def _beyond_ring(core: CausalCore) -> list[Problem]:
    """What of `core` ring attention has no way to do: its blocks come from a fused kernel."""
    asked = (
        ("model.sliding_window", core.window, "attends to a window of tokens"),
        ("model.attention_softcap", core.softcap, "caps its attention scores"),
    )
    return [
        Problem(
            key,
            str(value),
            f"ring attention cannot serve a model that {what}",
            allowed="none of it under parallelism.cp_method=ring",
            hint="Use parallelism.cp_method=ulysses",
        )
        for key, value, what in asked
        if value is not None
    ]
