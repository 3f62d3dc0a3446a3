"""From a token stream and a sample order to the arrays of one step.

Sample i is the window of sequence_length + 1 tokens that begins at i · sequence_length: inputs are
its first, targets its last sequence_length tokens, so each token but the first is a target once an
epoch. `step_batch` is a function of the step alone; there is no iterator state to save or lose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from air_hpc.data.order import SampleOrder, rank_indices
from air_hpc.data.shards import TokenStream
from air_hpc.errors import BadInput


@dataclass(frozen=True)
class BatchShape:
    """How a global batch is divided."""

    sequence_length: int
    global_batch_size: int
    accumulation_steps: int
    rank: int
    ranks: int


class Batches:
    """The batches of one data-parallel rank."""

    def __init__(self, stream: TokenStream, shape: BatchShape, seed: int) -> None:
        samples = (stream.tokens - 1) // shape.sequence_length
        if samples < 1:
            raise BadInput.single(
                "data.sequence_length",
                shape.sequence_length,
                f"the data has only {stream.tokens} tokens",
                allowed=f"at most {stream.tokens - 1}",
            )
        self.stream = stream
        self.shape = shape
        self.order = SampleOrder(samples, seed)

    def step_batch(self, step: int) -> npt.NDArray[np.int64]:
        """Tokens of step `step`: (accumulation, micro-batch, sequence_length + 1)."""
        shape = self.shape
        indices = rank_indices(
            step, shape.global_batch_size, shape.rank, shape.ranks, shape.accumulation_steps
        )
        samples = self.order.samples_at(indices)
        length = shape.sequence_length
        rows = [self.stream.read(int(i) * length, length + 1) for i in samples.ravel()]
        return np.stack(rows).reshape(*samples.shape, length + 1)

    def epoch_at(self, step: int) -> float:
        """How many passes over the data are done before step `step` begins."""
        return step * self.shape.global_batch_size / self.order.samples
