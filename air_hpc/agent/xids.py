"""Xid errors of this node's devices, handed to the workers that they happened to.

They are evidence: a worker that dies of one says no more than `CUDA error`, and the report of its
end carries what the driver said meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from air_hpc.probes.devices import visible_names
from air_hpc.probes.xid import Xid, XidWatch


class HasXids(Protocol):
    """A worker of this node; they are in the order of their local ranks."""

    xids: list[Any]


def watch_xids(kind: str, environ: Mapping[str, str]) -> XidWatch | None:
    """A watch that has begun, or None where there is no device that has Xids."""
    if kind != "cuda":
        return None
    watch = XidWatch(visible_names(environ))
    watch.start()
    return watch


def hand_out(xids: Iterable[Xid], workers: Sequence[HasXids]) -> None:
    """Note each error with the worker whose device it is, or with all where that is not known."""
    for xid in xids:
        known = xid.local_rank is not None and xid.local_rank < len(workers)
        for worker in [workers[xid.local_rank or 0]] if known else workers:
            worker.xids.append(xid.to_json())
