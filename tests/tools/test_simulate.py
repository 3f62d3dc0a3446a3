"""tools/simulate prints its tables, short ones here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "simulate"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *words], capture_output=True, text=True, timeout=120
    )


def test_it_prints_all_tables_with_their_seed() -> None:
    done = run("--days", "0.1", "--seed", "5")
    assert done.returncode == 0, done.stderr
    assert "--days 0.1 --seed 5" in done.stdout
    for heading in ("Against the closed form", "Beyond it", "The policies", "The interval"):
        assert f"## {heading}" in done.stdout
    assert done.stdout.count("| 16,000 |") == 6


def test_a_time_that_is_none_is_refused() -> None:
    done = run("--days", "0")
    assert done.returncode == 2
    assert "--days is above 0, not 0" in done.stderr
