"""The planner against its own engine: `plan --trace` over some layouts, as a table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .tables import table

ROOT = Path(__file__).resolve().parents[2]
BASE = (
    "cluster=slurm",
    "accelerator=h100_sxm",
    "train.precision=bf16",
    "launch.devices_per_node=8",
    "model=llama_8b",
    "model.layers=4",
    "data.sequence_length=4096",
    "train.global_batch_size=32",
    "train.micro_batch_size=1",
)
LAYOUTS = (
    ("dp_shard 8", ("parallelism=fsdp",)),
    ("dp_shard 8, recompute full", ("parallelism=fsdp", "parallelism.recompute=full")),
    ("dp_replicate 8", ("parallelism=ddp",)),
    ("2 nodes, dp_replicate 2 × dp_shard 8", ("parallelism=hsdp", "launch.nodes=2")),
    ("dp_shard 4 × tp 2, recompute ops", (
        "parallelism=fsdp", "parallelism.tp=2", "parallelism.recompute=ops")),
    ("tp 8", ("parallelism=fsdp", "parallelism.tp=8")),
    ("dp_shard 2 × cp 4, ulysses", ("parallelism=fsdp", "parallelism.cp=4")),
    ("dp_shard 4 × cp 2, ring", (
        "parallelism=fsdp", "parallelism.cp=2", "parallelism.cp_method=ring")),
    ("pp 2 × dp_shard 4, 1f1b", ("parallelism=fsdp", "parallelism.pp=2")),
    ("pp 2 × dp_shard 2 × tp 2, interleaved", (
        "parallelism=fsdp", "parallelism.pp=2", "parallelism.tp=2",
        "parallelism.pp_schedule=interleaved_1f1b")),
    ("mixtral, dp_shard 8, ep 4", (
        "parallelism=fsdp", "model=mixtral_8x7b", "model.layers=2", "parallelism.ep=4")),
    ("llama_70b on 128 nodes: pp 8 × dp_shard 16 × tp 8, recompute full", (
        "parallelism=fsdp", "model=llama_70b", "model.layers=80", "launch.nodes=128",
        "parallelism.pp=8", "parallelism.tp=8", "parallelism.recompute=full",
        "train.global_batch_size=256")),
)  # fmt: skip


def trace_table() -> str:
    """A line for each layout: how far the plan is from what the engine's rank 0 counts."""
    rows = [_row(name, words) for name, words in LAYOUTS]
    head = ("layout", "tensors, planned", "counted", "memory", "FLOP", "bytes moved")
    return table(head, rows) + (
        "\nllama_8b of 4 layers on one node and sequences of 4,096 where nothing else is said; rank"
        " 0; planned over counted, less one; bytes of all axes together.\n"
    )


def _row(name: str, words: tuple[str, ...]) -> tuple[str, ...]:
    command = [sys.executable, "-m", "air_hpc", "plan", *BASE, *words, "--trace", "--json"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stdout or done.stderr}")
    trace = json.loads(done.stdout)["trace"]
    memory = trace["memory_bytes"]
    flops = _sum([trace["forward_flops"], trace["backward_flops"]])
    moved = _sum(trace["bytes"].values())
    return (
        name,
        f"{memory['planned'] / 1e9:.2f} GB",
        f"{memory['counted'] / 1e9:.2f} GB",
        _apart(memory),
        _apart(flops),
        _apart(moved),
    )


def _sum(parts: Any) -> dict[str, float]:
    kept = list(parts)
    return {way: sum(part[way] for part in kept) for way in ("planned", "counted")}


def _apart(both: dict[str, float]) -> str:
    return f"{100 * (both['planned'] / both['counted'] - 1):+.1f} %" if both["counted"] else "-"


def sections() -> Iterator[tuple[str, str]]:
    """What `tools/plan-published --trace` makes."""
    yield "trace", trace_table()
