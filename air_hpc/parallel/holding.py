"""What a rank holds in memory over time, storage by storage, and its peak by what holds it.

    with Memory() as memory, Watch(memory):
        engine.step(tokens)
    memory.peak()

What may go wrong: a storage is seen when an operation returns it, so what is allocated and freed
inside one operation is not.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from air_hpc.models.local import local_part
from air_hpc.parallel.counting import in_backward

ACTIVATIONS, TEMPORARY = "activations", "temporary"
GRADIENTS, BUFFERS = "gradients", "buffers"


@dataclass(frozen=True)
class Peak:
    """The most bytes held at one moment, by what holds them."""

    total_bytes: int
    by_label: dict[str, int]


class Memory:
    """Bytes of live storages over time: an event whenever one comes, goes or changes its size.

    What a storage is may become known later than it comes, even after it has gone: `label` says so
    at any time. Until then it is an activation, or temporary where a backward pass made it.
    Whatever was there before is told by `label` too.
    """

    def __init__(self) -> None:
        self._events: list[tuple[int, int]] = []
        """(number of the storage, its change in bytes)"""
        self._labels: list[str] = []
        self._known: Any = WeakIdKeyDictionary(ref_type=weakref.ref)
        self._sizes: list[int] = []
        self._starts = [0]
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def __enter__(self) -> Self:
        original, memory = self._resize, self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            done = original(storage, size)
            if storage in memory._known:
                memory._note(memory._known[storage], storage.nbytes())
            return done

        # FSDP frees and refills its gathered weights so, which no dispatch mode sees.
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def segment(self) -> None:
        """Begin a new stretch of time."""
        self._starts.append(len(self._events))

    def saw(self, name: str, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> None:
        """Take in what an operation returned."""
        del func, kwargs
        default = TEMPORARY if in_backward() else ACTIVATIONS
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._number(leaf, default)
        if name == "c10d::_allgather_base_":
            self.label(BUFFERS, args[0])
        elif name == "c10d::_reduce_scatter_base_":
            self.label(BUFFERS, args[1])
        elif name == "fsdp::chunk_cat":
            self.label(GRADIENTS, *args[0])

    def label(self, label: str, *tensors: Tensor) -> None:
        """Say what the storages of `tensors` (local parts of DTensors) hold."""
        for tensor in tensors:
            local = local_part(tensor)
            self._labels[self._number(local, label)] = label

    @property
    def live_bytes(self) -> int:
        """What is held now."""
        return sum(change for _, change in self._events)

    def live_by_label(self) -> dict[str, int]:
        """The same by label."""
        return self._play(len(self._events))[1].by_label

    def peak(self, first: int = 0, last: int | None = None) -> Peak:
        """The peak of the segments from `first` up to and without `last`."""
        starts = [*self._starts, len(self._events)]
        until = starts[len(starts) - 1 if last is None else last]
        return self._play(until, starts[first])[0]

    def _play(self, until: int, since: int = 0) -> tuple[Peak, Peak]:
        """The peak between two events, and what is held at the second of them."""
        held: Counter[str] = Counter()
        total = 0
        best = Peak(-1, {})
        best_at = -1
        # Twice: the labels at the peak are looked up only once it is known.
        for index, (_, change) in enumerate(self._events[:until]):
            total += change
            if index + 1 >= since and total > best.total_bytes:
                best, best_at = Peak(total, {}), index
        if until == 0:
            return Peak(0, {}), Peak(0, {})
        at_peak: dict[str, int] = {}
        for index, (number, change) in enumerate(self._events[:until]):
            held[self._labels[number]] += change
            if index == best_at:
                at_peak = dict(held)
        return Peak(max(best.total_bytes, 0), at_peak), Peak(total, dict(held))

    def _number(self, tensor: Tensor, label: str) -> int:
        storage = tensor.untyped_storage()
        number: int | None = self._known.get(storage)
        if number is None:
            number = len(self._labels)
            self._labels.append(label)
            self._sizes.append(0)
            self._known[storage] = number
            weakref.finalize(storage, self._note, number, 0)
        self._note(number, storage.nbytes())
        return number

    def _note(self, number: int, size: int) -> None:
        change = size - self._sizes[number]
        if change:
            self._sizes[number] = size
            self._events.append((number, change))
