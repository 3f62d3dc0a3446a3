"""Addresses, params, tags and positions: what needs no store."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from air_hpc.errors import BadInput
from air_hpc.rundir.events import Event, Kind
from air_hpc.rundir.fence import Token
from air_hpc.rundir.state import RunStatus, SlowRank, TimeSpent
from air_hpc.rundir.words import RunState
from air_hpc.tracking.artifacts import collect
from air_hpc.tracking.coverage import Coverage, StepRun
from air_hpc.tracking.describe import (
    MAX_VALUE_CHARS,
    STATUS,
    control_metrics,
    params,
    ranges_text,
    short,
    summary_metrics,
    tags,
)
from air_hpc.tracking.position import ControlPoint, Position, newer
from air_hpc.tracking.store import Row, batches
from air_hpc.tracking.uri import parse_uri, scrub
from tests.tracking.conftest import REPOSITORY
from tests.tracking.simulated import SimulatedRun


@pytest.mark.parametrize(
    "uri", ["file:///tmp/runs", "file:runs", "/tmp/runs", "mlruns", "", "sqlite://", "ftp://host"]
)
def test_what_is_no_store_is_refused_with_what_is(uri: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_uri(uri)
    assert "sqlite:///" in str(refused.value)


def test_a_server_address_with_a_secret_is_refused_without_telling_it() -> None:
    uri = parse_uri("https://host:5000/mlflow/?token=abc")
    assert uri.text == uri.shown == "https://host:5000/mlflow"
    for refusable in ("https://me:secret@host", "http://secret@host", "ftp://me:secret@host"):
        with pytest.raises(BadInput) as refused:
            parse_uri(refusable)
        assert "secret" not in str(refused.value)
    assert (
        scrub("GET http://a:b@c/d and 'https://t0ken@e'")
        == "GET http://***@c/d and 'https://***@e'"
    )


def test_a_relative_database_becomes_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_uri("sqlite:///a/b.db").sqlite_path == tmp_path / "a/b.db"
    assert parse_uri("sqlite:////c/d.db").text == "sqlite:////c/d.db"


def test_every_state_has_a_word() -> None:
    assert set(STATUS) == set(RunState)


def test_params_are_flat_bounded_and_without_secrets(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, uri="https://me:s3cret@host")
    found = params(run.frozen.spec, run.frozen.plan)
    assert found["parallelism.pp"] == "1"
    assert found["plan.mesh.dp_replicate"] == "4"
    assert found["launch.partition"] == "null"
    assert all(len(value) <= MAX_VALUE_CHARS for value in found.values())
    assert not any("hunter2" in value or "s3cret" in value for value in found.values())


def test_a_device_without_a_known_peak_has_no_mfu_whatever_was_planned(tmp_path: Path) -> None:
    plan = replace(SimulatedRun(tmp_path).frozen.plan, peak_flops_per_device=989e12)

    def told(measured: dict[str, Any]) -> dict[str, float]:
        status = RunStatus(time=TimeSpent(training_s=10.0), measured=measured)
        return summary_metrics(status, plan, step=5, last_loss=1.0)

    assert "summary/mfu" not in told({"peak_flops_per_device": None, "peak_source": "unknown"})
    half = told({"peak_flops_per_device": 989e12 / 2})["summary/mfu"]
    assert half == pytest.approx(2 * told({})["summary/mfu"])


def test_only_what_a_secret_name_names_is_masked(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path)
    env = {"TOKENIZERS_PARALLELISM": "false", "MY_API_KEY": "hunter2hunter2"}
    told = dict(collect(run.dir, env))["run.yaml"]
    assert "hunter2" not in told
    assert "reshard_after_forward: true" in told
    assert "cpu_offload: false" in told


def test_long_values_keep_what_tells_most() -> None:
    assert short("x" * 900) == "x" * (MAX_VALUE_CHARS - 1) + "…"
    text = ranges_text([(n, n + 5) for n in range(0, 2000, 10)])
    assert len(text) <= MAX_VALUE_CHARS
    assert text.startswith("…, ")
    assert text.endswith("1990-1995")


def test_a_position_survives_its_file_and_a_damaged_one_is_none() -> None:
    position = Position(
        "abc",
        offsets={Token(1, 2): 77},
        lasts={Token(1, 2): 9},
        coverage=Coverage([StepRun(Token(1, 2), 1, 9, 2)]),
        pending=ControlPoint(3, 1.5, {"a": 1.0}),
        largest_difference=float("inf"),
    )
    data = position.to_json()
    assert Position.from_json(data) == position
    assert Position.from_json(data[:-3]) is None
    assert Position.from_json(b"[]") is None
    assert Position.from_json(json.dumps({**json.loads(data), "version": 99}).encode()) is None


def test_the_further_position_counts() -> None:
    behind = Position("a", offsets={Token(1, 1): 10})
    ahead = Position("a", offsets={Token(1, 1): 20})
    assert newer(behind, ahead) is ahead
    assert newer(ahead, behind) is ahead
    assert newer(None, behind) is behind
    noted = Position("a", offsets={Token(1, 1): 20}, pending=ControlPoint(7, 1.0, {"a": 1.0}))
    assert newer(noted, ahead) is noted
    assert newer(Position("b"), ahead) == Position("b")


def test_batches_keep_a_step_together() -> None:
    rows = [Row(f"m{n}", 0.0, 0, step) for step in range(7) for n in range(3)]
    divided = list(batches(rows, limit=8))
    assert [row for batch in divided for row in batch] == rows
    assert [len(batch) for batch in divided] == [6, 6, 6, 3]
    wide = [Row(f"m{n}", 0.0, 0, 1) for n in range(20)]
    assert [len(batch) for batch in batches(wide, limit=8)] == [8, 8, 4]


def test_importing_the_package_imports_no_mlflow() -> None:
    code = "import sys, air_hpc.tracking.sync; print('mlflow' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert answer.stdout == "False\n"


def test_stragglers_are_counted_and_named_until_there_are_none(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path)
    found = SlowRank(5, "n3", None, 1.18)
    event = Event(1.0, Kind.STRAGGLER, facts={"rank": 5})

    def told(status: RunStatus, *events: Event) -> tuple[float, str | None]:
        metrics = control_metrics(
            status, run.frozen.plan, rolled_back_steps=0, largest_difference=None, allocated_nodes=1
        )
        named = tags(run.dir, status, events, state=RunState.RUNNING, rolled_back=())
        return metrics["recovery/stragglers"], named.get("air_hpc.stragglers")

    assert told(RunStatus()) == (0, None)
    assert told(RunStatus(stragglers=(found,)), event) == (1, str(found))
    assert told(RunStatus(), event) == (0, "none")
