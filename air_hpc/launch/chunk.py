"""Divides a sweep into arrays that the site accepts: a pure function of shapes and limits.

Tasks of one array share one script, so tasks are first grouped by their resource shape, in the
order of the first of each. Each group is then cut by the limits: MaxArraySize caps the *index* (the
largest is MaxArraySize - 1), `max_array_tasks` the count, and the submit limits of QOS and
association how many jobs may be queued at all. Each chunk is based at index 0 again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ArrayLimits:
    """What a site allows. None: no limit. `max_queued` counts array elements (jobs) queued."""

    max_array_size: int = 1001
    max_array_tasks: int | None = None
    max_queued: int | None = None

    @property
    def tasks_per_chunk(self) -> int:
        """The most elements of one array based at index 0."""
        limits = [self.max_array_size, self.max_array_tasks, self.max_queued]
        return max(1, min(limit for limit in limits if limit is not None))


@dataclass(frozen=True)
class TaskGroup:
    """One array: the positions of its tasks in the sweep; the i-th has array index i."""

    shape: Hashable
    tasks: tuple[int, ...]


def chunk(shapes: Sequence[Hashable], limits: ArrayLimits) -> tuple[TaskGroup, ...]:
    """Every task of the sweep in exactly one chunk, in the order of the sweep within a shape."""
    groups: dict[Hashable, list[int]] = {}
    for position, shape in enumerate(shapes):
        groups.setdefault(shape, []).append(position)
    size = limits.tasks_per_chunk
    return tuple(
        TaskGroup(shape, tuple(tasks[start : start + size]))
        for shape, tasks in groups.items()
        for start in range(0, len(tasks), size)
    )
