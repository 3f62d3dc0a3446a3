"""`plan --trace`: what the real engine counts beside the arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import air_hpc, json_of

TINY = ["plan", "launch.devices_per_node=4", "train.global_batch_size=16"]


@pytest.mark.torch
@pytest.mark.full
def test_the_engine_computes_and_sends_what_is_planned(tmp_path: Path) -> None:
    words = [*TINY, "parallelism=fsdp", "parallelism.recompute=full", "train.micro_batch_size=2"]
    trace = json_of(air_hpc(*words, "--trace", "--rank", "3", "--json", cwd=tmp_path))["trace"]
    assert trace["rank"] == 3
    for part in ("forward_flops", "backward_flops"):
        assert trace[part]["planned"] == pytest.approx(trace[part]["counted"], rel=1e-3)
    (moved,) = trace["bytes"].values()
    assert moved["planned"] == pytest.approx(moved["counted"], rel=0.02)
    memory = trace["memory_bytes"]
    assert memory["planned"] == pytest.approx(memory["counted"], rel=0.2)


def test_a_rank_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    done = air_hpc(*TINY, "--trace", "--rank", "4", cwd=tmp_path)
    assert done.returncode == 2
    assert "0 to 3" in done.stderr


def test_a_trace_has_no_scaling_table(tmp_path: Path) -> None:
    done = air_hpc(*TINY, "--trace", "--nodes", "1,2", cwd=tmp_path)
    assert done.returncode == 2
    assert "about one plan" in done.stderr
