"""The short form of tools/chaos: a few random faults of a fixed seed, and nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.runs import ROOT
from tests.slurm_cluster import why_no_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


def test_runs_under_random_faults_end_as_if_undisturbed(tmp_path: Path) -> None:
    if reason := why_no_cluster():
        pytest.skip(reason)
    report = tmp_path / "report.md"
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "tools" / "chaos"), "--faults", "8", "--seed", "7",
            "--mlflow", "none", "--steps", "300", "--report", str(report),
        ],
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    told = report.read_text() if report.exists() else ""
    assert done.returncode == 0, f"{done.stderr}\n{told}"
