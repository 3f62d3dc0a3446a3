"""What a worker settles before its first step: threads, determinism, data."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from air_hpc.checkpoint.ranks import Ranks
from air_hpc.config.spec import RunSpec
from air_hpc.data.batches import Batches, BatchShape
from air_hpc.data.corpus import ensure_corpus
from air_hpc.data.shards import ShardIndex, TokenStream, read_index
from air_hpc.errors import AirHpcError, BadInput, EnvironmentFailure
from air_hpc.parallel.world import World
from air_hpc.plan.types import Plan
from air_hpc.rundir.layout import RunDir

TESTED_TORCH = "2.13"
"""The series of torch releases that the tests run on."""


def torch_warning(version: str) -> str | None:
    """What to say of a torch that is outside the tested range, or None."""
    if version.split("+")[0].startswith(f"{TESTED_TORCH}."):
        return None
    return f"torch {version} is outside the tested range ({TESTED_TORCH}.*)"


def set_determinism(wanted: bool, device: torch.device) -> None:
    """Make equal inputs give equal bits, or leave torch its freedom.

    https://docs.pytorch.org/docs/stable/notes/randomness.html; the workspace variable must be set
    before the first cuBLAS call.
    """
    torch.use_deterministic_algorithms(wanted)
    # Filling fresh memory finds reads of it; it costs time at every step and decides nothing here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = not wanted
        if wanted:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextlib.contextmanager
def attention_backends(deterministic: bool, device: torch.device) -> Iterator[None]:
    """On a GPU, keep to attention kernels whose backward pass is deterministic."""
    if deterministic and device.type == "cuda":
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            yield
    else:
        yield


def data_cache_dir(spec: RunSpec, run: RunDir) -> Path:
    """Where token shards are kept: as configured, else beside the runs, for all of them."""
    if spec.data.cache_dir is not None:
        return Path(spec.data.cache_dir).expanduser().absolute()
    return run.shared_dir / "data"


def open_batches(
    spec: RunSpec,
    plan: Plan,
    run: RunDir,
    world: World,
    ranks: Ranks,
    skipped: Sequence[tuple[int, int]] = (),
) -> tuple[Batches, str]:
    """This rank's batches and the digest of the data. Collective: rank 0 looks and builds.

    `skipped` are the ranges of batches that rollbacks stepped over.


    Raises EnvironmentFailure on all ranks where the data cannot be built, and where a rank does
    not see what rank 0 built; BadInput where the data does not fit the model.
    """
    told: tuple[Path, ShardIndex] | AirHpcError | None = None
    if world.rank == 0:
        try:
            told = ensure_corpus(data_cache_dir(spec, run))
        except AirHpcError as error:
            told = error
    told = ranks.tell(told)
    if isinstance(told, AirHpcError):
        raise told
    assert told is not None
    folder, index = told
    seen = read_index(folder) if world.rank else index
    absent = [rank for rank, found in enumerate(ranks.hear(seen == index)) if not found]
    if absent:
        raise EnvironmentFailure(
            f"ranks {', '.join(map(str, absent))} do not see the data that rank 0 built",
            tried=str(folder),
            next_step="set data.cache_dir to a folder that all nodes of the run share",
        )
    if index.vocab_size > spec.model.vocab_size:
        raise BadInput.single(
            "model.vocab_size",
            spec.model.vocab_size,
            f"the data has token ids up to {index.vocab_size - 1}",
            allowed=f"at least {index.vocab_size}",
        )
    shape = BatchShape(
        sequence_length=spec.data.sequence_length,
        global_batch_size=spec.train.global_batch_size,
        accumulation_steps=plan.accumulation_steps,
        rank=world.data_rank,
        ranks=world.data_ranks,
    )
    return Batches(TokenStream(folder, index), shape, spec.train.seed, skipped), index.digest
