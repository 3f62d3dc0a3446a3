"""Run a function on several ranks, forked from one process that has imported torch once.

A fork server does the forking, so that it does not matter what this process has used autograd or
threads for. The function must be importable (a module's own, not a closure), its arguments and
result picklable. A rank that raises makes `run_ranks` raise with that rank's traceback.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from air_hpc.plan.types import Mesh

DEADLINE_S = 120.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.device_mesh",
        "tests.torch_ranks",
        "air_hpc.parallel.engine",
    ]
)


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S
) -> list[Any]:
    """`function(rank, rendezvous file, *args)` on each rank; the results in rank order."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        rendezvous = str(Path(folder) / "store")
        ends: list[Connection] = []
        processes = []
        for rank in range(world_size):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_one_rank, args=(theirs, function, rank, rendezvous, args), daemon=True
            )
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            return _collect(ends, deadline_s)
        finally:
            for process in processes:
                process.join(0.5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(ends: list[Connection], deadline_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[str] = []
    while len(results) < len(ends):
        open_ends = [end for i, end in enumerate(ends) if i not in results]
        ready = wait(open_ends, timeout=deadline_s if not failures else 5.0)
        if not ready:
            failures.append(f"no answer from {len(open_ends)} ranks")
            break
        for end in ready:
            rank = ends.index(end)  # type: ignore[arg-type]
            try:
                ok, value = end.recv()  # type: ignore[union-attr]
            except EOFError:
                ok, value = False, "the process died"
            if not ok:
                failures.append(f"rank {rank}: {value}")
            results[rank] = value
    if failures:
        raise AssertionError("\n".join(failures))
    return [results[rank] for rank in range(len(ends))]


def _one_rank(
    end: Connection, function: Callable[..., Any], rank: int, rendezvous: str, args: Any
) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        end.send((True, function(rank, rendezvous, *args)))
    except BaseException:
        end.send((False, traceback.format_exc()))
    finally:
        end.close()
        # Leave without the interpreter's teardown: a failed peer must not hold this one.
        os._exit(0)


def join_world(rank: int, rendezvous: str, degrees: Mesh) -> Any:
    """The `World` of a rank inside `run_ranks`."""
    import torch.distributed as dist

    from air_hpc.parallel.world import start_world

    size = degrees.world_size
    return start_world(
        degrees,
        rank=rank,
        local_rank=rank,
        world_size=size,
        kind="cpu",
        timeout_s=60,
        store=dist.FileStore(rendezvous, size),
    )
