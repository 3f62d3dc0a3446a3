"""From a token stream and a sample order to the arrays of one step.

Sample i is the window of sequence_length + 1 tokens that begins at i · sequence_length: inputs are
its first, targets its last sequence_length tokens, so each token but the first is a target once an
epoch. `step_batch` is a function of the step alone; there is no iterator state to save or lose.

A run that was rolled back steps over the batches that led it astray. Those ranges only move which
batch a step takes (`batch_of_step`); the order of what is left stays, and steps before the first
range keep their batches, so a checkpoint needs to know nothing of them.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def batch_of_step(step: int, skipped: Sequence[tuple[int, int]] = ()) -> int:
    """The batch of the run's order that `step` trains on (0 is the first of both).

    It is the `step`-th of the batches in none of the ranges `skipped` (first, last), which may
    overlap, touch, and come in any order.
    """
    batch = step
    passed = -1
    for first, last in sorted(skipped):
        if first > batch:
            break
        # What an earlier range passed over already is not passed over twice.
        first = max(first, passed + 1)
        if last >= first:
            batch += last - first + 1
            passed = last
    return batch


class Batches:
    """The batches of one data-parallel rank; those in a `skipped` range are stepped over."""

    def __init__(
        self,
        stream: TokenStream,
        shape: BatchShape,
        seed: int,
        skipped: Sequence[tuple[int, int]] = (),
    ) -> None:
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
        self.skipped = tuple(skipped)

    def batch_at(self, step: int) -> int:
        """Which batch of the run's order step `step` trains on (0 is the first of both)."""
        return batch_of_step(step, self.skipped)

    def step_batch(self, step: int) -> npt.NDArray[np.int64]:
        """Tokens of step `step`: (accumulation, micro-batch, sequence_length + 1)."""
        shape = self.shape
        batch = self.batch_at(step)
        indices = rank_indices(
            batch, shape.global_batch_size, shape.rank, shape.ranks, shape.accumulation_steps
        )
        samples = self.order.samples_at(indices)
        length = shape.sequence_length
        rows = [self.stream.read(int(i) * length, length + 1) for i in samples.ravel()]
        return np.stack(rows).reshape(*samples.shape, length + 1)

    def epoch_at(self, step: int) -> float:
        """How far in its passes over the data the run is before step `step` begins."""
        return self.batch_at(step) * self.shape.global_batch_size / self.order.samples
