"""Runs `python -m air_hpc` as a user does: a process of its own, in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def air_hpc(
    *words: str,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120,
    program: tuple[str, ...] = ("-m", "air_hpc"),
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *program, *words],
        cwd=cwd,
        env=environ(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def environ(more: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AIR_HPC_")}
    return {**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **(more or {})}


def json_of(done: subprocess.CompletedProcess[str]) -> Any:
    """The one object on stdout."""
    return json.loads(done.stdout)
