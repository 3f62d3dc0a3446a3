"""Run directories for the tests, in memory where there is a tmpfs (an fsync is free there)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from air_hpc.rundir.layout import RunDir, create_run_dir


@pytest.fixture
def folder() -> Iterator[Path]:
    shm = Path("/dev/shm")
    where = shm if shm.is_dir() and os.access(shm, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=where) as path:
        yield Path(path)


@pytest.fixture
def run(folder: Path) -> RunDir:
    return create_run_dir(folder / "runs", "tiny-1")
