"""The short form of tools/chaos: a few random faults of a fixed seed, and nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.runs import ROOT
from tests.slurm_cluster import why_no_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


KINDS = (
    "kill_worker,kill_agent,preempt,shard_corrupted,shard_missing,disk_full,no_permission,"
    "port_taken,clock_step"
)
"""Those that are over soon. With this seed one run meets seven of them: a corrupted and a missing
shard, a preemption and a full disk during saves, a clock step, a killed worker and agent."""


def test_a_run_under_random_faults_ends_as_if_undisturbed(tmp_path: Path) -> None:
    if reason := why_no_cluster():
        pytest.skip(reason)
    report = tmp_path / "report.md"
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "tools" / "chaos"), "--faults", "7", "--seed", "4",
            "--policies", "spare", "--kinds", KINDS, "--mlflow", "none", "--steps", "300",
            "--runs-at-once", "1", "--report", str(report),
        ],
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    told = report.read_text() if report.exists() else ""
    assert done.returncode == 0, f"{done.stderr}\n{told}"
