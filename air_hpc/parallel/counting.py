"""What a rank computes and sends, counted operation by operation as it runs.

    with Watch(Flops(), Traffic()) as watch:
        engine.step(tokens)

What it holds is another observer's (`holding`).

A `Watch` sees each operation on local tensors, after DTensor has turned its own into these, and
none of those by which DTensor only works out shapes. Everything counts on real tensors and on fake
ones alike. `segment` begins a new count, so that micro-batches and what comes once a step can be
told apart.

What may go wrong: an operation that torch's table of FLOPs does not have counts as none; none of
those is a matrix product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    GroupName,
    ProcessGroup,
    _resolve_process_group,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import air_hpc.parallel.ring  # noqa: F401  (its operators are looked up by name below)

_RING, _RING_BACKWARD = "air_hpc::ring_attention", "air_hpc::ring_attention_backward"


class Observer(Protocol):
    """What a `Watch` tells about each operation."""

    def saw(self, name: str, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> None:
        """`func`, named `name` (`aten::mm`), was called and returned `out`."""

    def segment(self) -> None:
        """A new count begins."""


class Watch(TorchDispatchMode):
    """Tells its observers about every operation on plain tensors inside the context."""

    def __init__(self, *observers: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observers = observers
        self._fake_mode: Any = None
        self.shut = 0
        """How many have asked that nothing be told."""

    def __enter__(self) -> Self:
        self._fake_mode = active_fake_mode()
        self._lock = ShardingPropagator._fake_mode_lock
        ShardingPropagator._fake_mode_lock = _Unobserved(self)  # type: ignore[assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        ShardingPropagator._fake_mode_lock = self._lock

    def segment(self) -> None:
        """Begin a new count in every observer."""
        for observer in self._observers:
            observer.segment()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Modes come before subclasses: let these unwrap themselves, and see what they call.
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if self._fake_mode is not None and func is torch.ops._c10d_functional.wait_tensor.default:
            out = args[0]  # a fake one returns a new tensor, a real one what it waited for
        else:
            out = func(*args, **kwargs)
        if not self.shut and active_fake_mode() is self._fake_mode:
            name = func._schema.name
            for observer in self._observers:
                observer.saw(name, func, args, kwargs, out)
        return out


class _Unobserved(AbstractContextManager[None]):
    """What DTensor enters while it runs an operation on global shapes, to find out others: the
    place that it has for a lock. Such a run is no part of the computation."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._watch.shut += 1

    def __exit__(self, *_error: object) -> None:
        self._watch.shut -= 1


def in_backward() -> bool:
    """Whether autograd is running a backward pass, what it computes again included."""
    return torch._C._current_graph_task_id() != -1


class Flops:
    """FLOPs by segment: `forward` and `backward`, the latter with what is computed again.

    Two for a multiply and add. Attention counts as if nothing were masked and as twice its forward
    pass in the backward pass (the palm convention of `plan.flops`), whatever the kernel does.
    """

    def __init__(self) -> None:
        self.segments: list[Counter[str]] = [Counter()]

    def segment(self) -> None:
        """Begin a new count."""
        self.segments.append(Counter())

    def saw(self, name: str, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> None:
        """Count one operation."""
        count = _flops_of(name, func, args, kwargs, out)
        if count:
            self.segments[-1]["backward" if in_backward() else "forward"] += count


def _flops_of(name: str, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> int:
    if name == _RING:
        q, k = args[0], args[1]
        return _attention(q, k) * _group(args[4]).size()
    if name == _RING_BACKWARD:
        return 2 * _attention(args[1], args[2]) * _group(args[7]).size()
    if name.startswith("aten::_scaled_dot_product"):
        if name.endswith("_backward"):
            return 2 * _attention(args[1], args[2])
        return _attention(args[0], args[1])
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _attention(q: Tensor, k: Tensor) -> int:
    """Scores and values of all queries over all keys, of equal widths."""
    batch, heads, tokens, width = q.shape
    return 4 * batch * heads * tokens * k.shape[2] * width


@dataclass(frozen=True)
class Moved:
    """Calls of one collective over one axis: how many, and their tensors' bytes in all.

    The bytes of a call are those of the collective's whole tensor on this rank: gathered, to be
    scattered, to be reduced, sent (the convention of `plan.communication`).
    """

    axis: str
    collective: str
    ranks: int
    calls: int
    tensor_bytes: int


_KINDS = (
    ("reduce_scatter", "reduce_scatter"),
    ("gather", "all_gather"),
    ("to_all", "all_to_all"),
    ("toall", "all_to_all"),
    ("reduce", "all_reduce"),
    ("broadcast", "broadcast"),
    ("send", "send"),
)
"""A piece of an operator's name, and the collective that it is. Receiving is the other side's."""
_SPACES = ("c10d", "_c10d_functional", "_dtensor")
_AXES = {"fsdp": "dp_shard", "efsdp": "dp_shard", "default_pg": "world", "undefined": "other"}
"""Groups whose bytes belong to the axis of another name."""
_OF_TOKENS = {"all_to_all": ("ep", "cp"), "send": ("pp", "cp")}
"""Collectives that only these axes have: two axes may be one and the same group."""


class Traffic:
    """Collectives by segment, axis and kind.

    `axes` names the axes of each group (by the group's name). A group that is not in it goes by
    what torch says that it is for: an axis that spans all ranks is torch's default group, and so
    `world`.
    """

    def __init__(self, axes: Mapping[str, Sequence[str]] | None = None) -> None:
        self._axes = axes or {}
        self._segments: list[Counter[tuple[str, str, int, str]]] = [Counter()]

    def segment(self) -> None:
        """Begin a new count."""
        self._segments.append(Counter())

    def saw(self, name: str, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> None:
        """Count one operation."""
        del func
        space, _, operator = name.partition("::")
        if name in (_RING, _RING_BACKWARD):
            self._ring(name, args)
            return
        if space not in _SPACES:
            return
        kind = next((kind for piece, kind in _KINDS if piece in operator), None)
        group = _group_of((*args, *kwargs.values()))
        if kind is None or group is None:
            return
        self.add(group, kind, 1, max(map(_bytes_of, (*args, out))))

    def add(self, group: ProcessGroup, collective: str, calls: int, tensor_bytes: int) -> None:
        """Count calls that no operation shows; `tensor_bytes` is of all of them."""
        key = (self._axis(group, collective), collective, group.size())
        self._segments[-1][*key, "calls"] += calls
        self._segments[-1][*key, "bytes"] += tensor_bytes

    def of(self, index: int) -> dict[tuple[str, str, int], tuple[int, int]]:
        """(calls, bytes) of a segment, by (axis, collective, ranks)."""
        counts = self._segments[index]
        keys = {key[:3] for key in counts}
        return {key: (counts[*key, "calls"], counts[*key, "bytes"]) for key in sorted(keys)}

    def total(self, times: Iterable[int] | None = None) -> tuple[Moved, ...]:
        """All segments added up, each as often as `times` says (once by default)."""
        often = [1] * len(self._segments) if times is None else list(times)
        calls: Counter[tuple[str, str, int]] = Counter()
        moved: Counter[tuple[str, str, int]] = Counter()
        for index, factor in enumerate(often):
            for key, (number, size) in self.of(index).items():
                calls[key] += factor * number
                moved[key] += factor * size
        return tuple(Moved(*key, calls[key], moved[key]) for key in sorted(calls) if calls[key])

    def _axis(self, group: ProcessGroup, collective: str) -> str:
        named = self._axes.get(group.group_name, ())
        of_tokens = ("ep", "cp", "pp")
        wanted = _OF_TOKENS.get(collective) or [axis for axis in named if axis not in of_tokens]
        fitting = [axis for axis in wanted if axis in named]
        described = str(group.group_desc).removeprefix("mesh_")
        axis = next(iter((*fitting, *named, described)))
        return _AXES.get(axis, axis)

    def _ring(self, name: str, args: tuple[Any, ...]) -> None:
        backward = name == _RING_BACKWARD
        group = _group(args[7] if backward else args[4])
        k, v = args[2:4] if backward else args[1:3]
        hops, passed = group.size() - 1, _bytes_of((k, v))
        self.add(group, "send", hops, hops * passed)
        if backward:  # their float32 gradients, all the way home
            self.add(group, "send", hops + 1, (hops + 1) * 4 * (k.numel() + v.numel()))


def _group(name: str) -> ProcessGroup:
    return _resolve_process_group(GroupName(name))


def _group_of(args: Iterable[Any]) -> ProcessGroup | None:
    for arg in args:
        if isinstance(arg, str):
            try:
                return _group(arg)
            except (RuntimeError, ValueError):  # the name of a reduction
                continue
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
    return None


def _bytes_of(tree: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(tree) if isinstance(x, Tensor))
