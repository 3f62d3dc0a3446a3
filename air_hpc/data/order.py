"""Which sample is trained on when: a pure function of (seed, global sample index).

Promises: sample g of a run is `sample_at(g)`, whatever the number of ranks, the size of a
micro-batch, or how often the run was stopped and resumed. Every epoch is a permutation of all
samples, a different one each time, and costs no memory: a keyed Feistel network permutes
[0, 4^h), and indices that fall outside [0, samples) are sent through it again until they fall
inside (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). It is a
shuffle, not cryptography.

A global batch takes the next `global_batch_size` samples of the order; data-parallel rank r of d
trains on the r-th of d equal, contiguous parts, in consecutive micro-batches. A batch may cross
the end of an epoch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

_ROUNDS = 6
_Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SampleOrder:
    """The order over `samples` samples that `seed` gives."""

    samples: int
    seed: int

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"an order needs at least one sample, not {self.samples}")

    def samples_at(self, indices: _Indices) -> _Indices:
        """The samples at global `indices` (any shape): each is in [0, samples)."""
        flat = np.asarray(indices, dtype=np.int64).ravel()
        result = np.empty_like(flat)
        epochs, positions = np.divmod(flat, self.samples)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = permute(positions[chosen], self.samples, self.seed, int(epoch))
        return result.reshape(np.shape(indices))


def rank_indices(
    step: int,
    global_batch_size: int,
    rank: int,
    ranks: int,
    accumulation_steps: int,
) -> _Indices:
    """Global sample indices of a data-parallel rank's part of step `step` (0 is the first).

    Shape (accumulation_steps, micro-batch size). Raises ValueError where the global batch does
    not divide into ranks × accumulation_steps equal parts.
    """
    parts = ranks * accumulation_steps
    if global_batch_size % parts:
        raise ValueError(
            f"global batch {global_batch_size} does not divide by "
            f"{ranks} ranks x {accumulation_steps} accumulation steps"
        )
    size = global_batch_size // ranks
    first = step * global_batch_size + rank * size
    return np.arange(first, first + size, dtype=np.int64).reshape(accumulation_steps, -1)


def permute(positions: _Indices, samples: int, seed: int, epoch: int) -> _Indices:
    """Where the permutation of (seed, epoch) over [0, samples) sends `positions`."""
    half_bits = max(1, (max(samples - 1, 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    values = _network(positions.astype(np.uint64), half_bits, keys)
    outside = values >= samples
    while outside.any():  # at most 4 in 1 is inside, so this ends after a few turns
        values[outside] = _network(values[outside], half_bits, keys)
        outside = values >= samples
    return values.astype(np.int64)


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    label = f"air_hpc sample order\x1f{seed}\x1f{epoch}".encode()
    digest = hashlib.blake2b(label, digest_size=8 * _ROUNDS).digest()
    return tuple(np.frombuffer(digest, dtype="<u8"))


def _network(
    values: npt.NDArray[np.uint64], half_bits: int, keys: tuple[np.uint64, ...]
) -> npt.NDArray[np.uint64]:
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014); wraps at 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
