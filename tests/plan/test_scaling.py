"""Several numbers of nodes, and how many a deadline or a budget asks for."""

from __future__ import annotations

import pytest

from air_hpc.config.compose import Composer
from air_hpc.plan.calibration import measured_matmul
from air_hpc.plan.make import make_plan
from air_hpc.plan.outlook import outlook
from air_hpc.plan.scaling import Row, how_many, scale

SHARED = Composer()
BASE = [
    "cluster=slurm",
    "model=llama_8b",
    "parallelism=fsdp",
    "accelerator=h100_sxm",
    "launch.devices_per_node=8",
    "train.precision=bf16",
    "train.compile=true",
    "train.global_batch_size=256",
    "data.sequence_length=8192",
    "parallelism.recompute=full",
]
PRICED = [*BASE, "accelerator.cost_per_device_hour=2"]
TRILLION = 10**12


def rows_of(words: list[str], *nodes: int) -> tuple[Row, ...]:
    return scale(SHARED.compose(words), nodes, words, target_tokens=TRILLION)


def test_more_nodes_are_faster_and_a_little_less_efficient() -> None:
    rows = rows_of(PRICED, 1, 2, 4, 8, 16)
    assert [row.nodes for row in rows] == [1, 2, 4, 8, 16]
    times = [row.takes_s or 0.0 for row in rows]
    assert times == sorted(times, reverse=True)
    assert rows[0].efficiency == 1
    assert rows[0].speedup == 1
    assert 12 < (rows[-1].speedup or 0) <= 17
    assert (rows[-1].efficiency or 0) == pytest.approx((rows[-1].speedup or 0) / 16)
    for row in rows:
        assert row.outlook is not None
        hours = row.outlook.device_hours or 0
        assert hours == pytest.approx((row.takes_s or 0) * 8 * row.nodes / 3600)
        assert row.outlook.cost == pytest.approx(2 * hours)


def test_a_number_that_does_not_work_says_why_and_stops_nothing() -> None:
    rows = rows_of(BASE, 3, 4)
    assert "does not divide" in (rows[0].problem or "")
    assert not rows[0].usable
    assert rows[1].usable
    assert rows[1].efficiency == 1


def test_what_does_not_fit_says_so() -> None:
    words = [w for w in BASE if "recompute" not in w] + ["data.sequence_length=65536"]
    (row,) = rows_of(words, 2)
    assert "the device has 80 GB" in (row.problem or "")
    assert not row.usable


def test_a_search_is_made_for_each_number() -> None:
    words = [w for w in BASE if "recompute" not in w] + ["parallelism=auto"]
    rows = rows_of(words, 1, 2)
    assert all(row.usable for row in rows)
    assert all(row.plan is not None for row in rows)


def test_a_deadline_asks_for_the_fewest_nodes_that_keep_it() -> None:
    rows = rows_of(PRICED, 1, 2, 4, 8, 16)
    deadline = (rows[2].takes_s or 0) * 1.01
    answer = how_many(rows, deadline_s=deadline)
    assert answer.row is rows[2]
    none = how_many(rows, deadline_s=1.0)
    assert none.row is None
    assert "the fastest is 16 nodes" in none.said


def test_a_budget_asks_for_the_fastest_it_pays_for() -> None:
    rows = rows_of(PRICED, 1, 2, 4)
    costs = [row.outlook.cost or 0.0 for row in rows if row.outlook is not None]
    assert how_many(rows, budget=max(costs) * 1.01).row is rows[2]
    assert how_many(rows, budget=min(costs) * 0.5).row is None
    unpriced = rows_of(BASE, 1)
    assert "accelerator.cost_per_device_hour" in how_many(unpriced, budget=1e9).said


def test_unknown_times_answer_nothing() -> None:
    rows = rows_of([*BASE, "accelerator=gb200"], 2)
    assert rows[0].outlook is not None
    assert "matmul_ceiling" in (rows[0].outlook.unknown or "")
    assert how_many(rows, deadline_s=1e9).row is None


def test_failures_take_their_share_and_saves_come_at_the_best_interval() -> None:
    words = [*PRICED, "checkpoint.failures_per_node_day=0.0065", "launch.nodes=32"]
    spec = SHARED.compose(words)
    plan, problems = make_plan(spec, to_run=False)
    assert plan is not None, problems
    made = outlook(spec, plan, target_tokens=TRILLION)
    assert made.ettr is not None
    assert 0.97 < made.ettr < 1
    assert made.expected_s == pytest.approx((made.training_s or 0) / made.ettr)
    state = 12 * plan.counts.parameters / 256
    assert made.save_blocking_s == pytest.approx(state / 64e9)
    assert made.save_interval_s is not None
    assert 60 <= made.save_interval_s <= 3600
    no_rate = SHARED.compose(PRICED)
    calm, _ = make_plan(no_rate, to_run=False)
    assert calm is not None
    assert outlook(no_rate, calm).ettr is None


def test_a_calibration_is_taken_for_its_device_and_precision(tmp_path) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / ".air_hpc" / "calibrations"
    folder.mkdir(parents=True)
    body = (
        '{"flops_per_s": 7e14, "precision": "bf16", "device": "NVIDIA H100 80GB HBM3",'
        ' "threads": 1, "size": 8192}'
    )
    (folder / "matmul-one.json").write_text(body)
    (folder / "matmul-two.json").write_text("not json")
    spec = SHARED.compose([*BASE, f"runs_dir={tmp_path}"])
    assert measured_matmul(spec) == 7e14
    other = SHARED.compose([*BASE, "train.precision=fp32", f"runs_dir={tmp_path}"])
    assert measured_matmul(other) is None
    assert measured_matmul(SHARED.compose([*BASE, f"runs_dir={tmp_path}/none"])) is None
