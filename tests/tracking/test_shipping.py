from __future__ import annotations

import json
import math
import socket
from pathlib import Path
from typing import Any

import pytest

from air_hpc.errors import EnvironmentFailure
from air_hpc.rundir.events import Kind, read_ledger
from air_hpc.rundir.words import RunState
from air_hpc.tracking.position import load_position, save_position
from air_hpc.tracking.shipper import RunShipper
from air_hpc.tracking.store import RunDeleted, Store, StoreUnavailable
from air_hpc.tracking.sync import sync_runs
from tests.tracking.conftest import Reader
from tests.tracking.simulated import SimulatedRun, loss_of


def shipper_of(run: SimulatedRun, uri: str, warnings: list[str] | None = None) -> RunShipper:
    said = [] if warnings is None else warnings
    store = Store(uri, "air_hpc")
    return RunShipper(
        run.dir, run.frozen, store, writer="tracking-test-1", say=said.append, clock=run.clock
    )


def test_three_attempts_are_one_run_and_no_step_is_doubled(tmp_path: Path, database: str) -> None:
    run = SimulatedRun(tmp_path / "runs")
    warnings: list[str] = []
    shipper = shipper_of(run, database, warnings)
    words = []

    def ship() -> None:
        shipper.ship()
        words.append(Reader(database).one("tiny-1").info.status)

    run.whole_life(ship)
    reader = Reader(database)
    assert not warnings
    assert words[0] == "SCHEDULED"
    assert words[1:] == ["RUNNING", "SCHEDULED", "RUNNING", "RUNNING", "RUNNING", "FINISHED"]
    for key in ("train/loss", "perf/tokens_per_second", "perf/mfu"):
        assert reader.steps("tiny-1", key) == list(range(1, 31))
    found = reader.one("tiny-1")
    for key in found.data.metrics:
        steps = reader.steps("tiny-1", key)
        assert len(steps) == len(set(steps)), key
    assert found.data.tags["air_hpc.rolled_back"] == "11-17, 20-22"
    assert found.data.metrics["recovery/rolled_back_steps"] == 10
    # Steps 11-17 were run again exactly, 20-22 were not.
    assert found.data.metrics["recovery/rerun_loss_difference"] == pytest.approx(0.25)
    assert found.data.tags["air_hpc.attempts"] == "3"
    assert found.data.tags["air_hpc.nodes"] == "n[3-4]"
    assert found.data.tags["air_hpc.sweep"] == "sweep-7"
    assert found.data.tags["air_hpc.state"] == "FINISHED"
    assert found.data.params["optimizer.lr"] == "0.001"
    assert found.data.params["plan.world_size"] == "4"
    assert 0 < found.data.metrics["goodput/ratio"] < 1
    assert found.data.metrics["summary/loss"] == pytest.approx(loss_of(30) + 0.25)
    assert reader.history("tiny-1", "goodput/ratio")[-1].step == 30
    events = read_ledger(run.dir).events
    assert found.info.start_time == int(events[0].time * 1000)
    ended = next(e for e in events if e.facts.get("verdict") == "stop")
    assert found.info.end_time == int(ended.time * 1000)
    noted = [e for e in events if e.kind == Kind.TRACKING_STARTED]
    assert [e.facts["mlflow_run_id"] for e in noted] == [found.info.run_id]


def test_a_roll_back_that_was_not_shipped_yet_is_never_shipped(
    tmp_path: Path, database: str
) -> None:
    run = SimulatedRun(tmp_path / "runs")
    run.attempt(1, None)
    run.train(1, 20, offset=9.0)
    run.end("device", "requeue", 20)
    run.attempt(2, 10)
    run.train(11, 15)
    shipper_of(run, database).ship()
    reader = Reader(database)
    values = {row.step: row.value for row in reader.history("tiny-1", "train/loss")}
    assert sorted(values) == list(range(1, 16))
    assert values[10] == pytest.approx(loss_of(10) + 9)
    assert values[11] == pytest.approx(loss_of(11))
    assert reader.one("tiny-1").data.tags["air_hpc.rolled_back"] == "11-20"


def test_a_generation_that_has_no_samples_yet_rolls_back_what_waits(
    tmp_path: Path, database: str
) -> None:
    run = SimulatedRun(tmp_path / "runs")
    run.attempt(1, None)
    run.train(1, 20)
    run.attempt(1, 10, generation=2)
    shipper_of(run, database).ship()
    assert Reader(database).steps("tiny-1") == list(range(1, 11))


@pytest.mark.parametrize("lost", ["the note of the last chunk", "the whole position"])
def test_a_crash_before_the_note_doubles_nothing(tmp_path: Path, database: str, lost: str) -> None:
    run = SimulatedRun(tmp_path / "runs")
    run.attempt(1, None)
    run.train(1, 10)
    first = shipper_of(run, database)
    first.ship()
    (path,) = run.dir.metrics_dir.glob("position-*.json")
    before = load_position(path)
    assert before is not None
    run.more(11, 20)
    first.ship()
    if lost == "the whole position":
        path.unlink()
    else:
        save_position(path, before)
    # The re-run of 16-20 begins before the restarted shipper sees the spool.
    run.end("node_lost", "requeue", 20)
    run.attempt(2, 15)
    run.train(16, 25, offset=0.5)
    shipper_of(run, database).ship()
    reader = Reader(database)
    assert reader.steps("tiny-1") == list(range(1, 26))
    values = {row.step: row.value for row in reader.history("tiny-1", "train/loss")}
    assert values[18] == pytest.approx(loss_of(18))
    assert values[22] == pytest.approx(loss_of(22) + 0.5)
    goodput = reader.steps("tiny-1", "goodput/ratio")
    assert len(goodput) == len(set(goodput)) or lost == "the whole position"


def test_values_that_are_no_numbers_arrive(tmp_path: Path, database: str) -> None:
    run = SimulatedRun(tmp_path / "runs")
    run.attempt(1, None)
    assert run.spool is not None
    run.spool.log(1, {"train/loss": math.nan, "train/grad_norm": math.inf, "odd[name]": 1.0})
    run.spool.flush()
    shipper_of(run, database).ship()
    reader = Reader(database)
    assert math.isnan(reader.history("tiny-1", "train/loss")[0].value)
    # SQL stores keep the largest double for infinity.
    assert reader.history("tiny-1", "train/grad_norm")[0].value > 1e308
    assert reader.history("tiny-1", "odd_name_")[0].value == 1.0


def test_two_shippers_converge_on_the_oldest_run(tmp_path: Path, database: str) -> None:
    run = SimulatedRun(tmp_path / "runs")
    run.attempt(1, None)
    run.train(1, 5)
    one, two = Store(database, "air_hpc"), Store(database, "air_hpc")
    one.connect()
    two.connect()
    one._create("tiny-1", 1.0)
    two._create("tiny-1", 1.0)
    assert len(Reader(database).runs("tiny-1")) == 2
    kept = {store.find_or_create_run("tiny-1", 1.0) for store in (two, one)}
    assert kept == {Reader(database).one("tiny-1").info.run_id}
    shipper_of(run, database).ship()
    assert Reader(database).steps("tiny-1") == [1, 2, 3, 4, 5]


def test_a_shipper_whose_run_lost_the_race_ships_all_to_the_one_that_stays(
    tmp_path: Path, database: str
) -> None:
    run = SimulatedRun(tmp_path / "runs")
    run.attempt(1, None)
    run.train(1, 5)
    shipper = shipper_of(run, database)
    loser = shipper.ship().mlflow_run_id
    store = Store(database, "air_hpc")
    store.connect()
    store._create("tiny-1", 1.0)
    reader = Reader(database)
    reader.client.set_tag(loser, "air_hpc.duplicate_of", "the other")
    reader.client.delete_run(loser)
    run.more(6, 8)
    with pytest.raises(StoreUnavailable):
        shipper.ship()
    assert shipper.ship().mlflow_run_id != loser
    assert reader.steps("tiny-1") == list(range(1, 9))


def test_a_run_that_a_person_deleted_is_not_made_again(tmp_path: Path, database: str) -> None:
    run = SimulatedRun(tmp_path / "runs")
    run.submitted()
    deleted = shipper_of(run, database).ship().mlflow_run_id
    Reader(database).client.delete_run(deleted)
    with pytest.raises(RunDeleted):
        shipper_of(run, database).ship()
    assert Reader(database).runs("tiny-1") == []


def test_artifacts_hold_the_script_and_the_config_without_secrets(
    tmp_path: Path, database: str
) -> None:
    run = SimulatedRun(tmp_path / "runs")
    run.submitted()
    shipper_of(run, database).ship()
    found = Reader(database).one("tiny-1")
    folder = Path(found.info.artifact_uri)
    assert folder.is_relative_to(tmp_path)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert names == ["code/code.json", "code/diff.patch", "run.yaml", "submit/1.sh"]
    told = json.dumps(found.to_dictionary())
    for path in folder.rglob("*"):
        if path.is_file():
            told += path.read_text()
    assert "MY_API_KEY" in told
    assert "hunter2" not in told
    assert not Path("mlruns").exists()


def test_sync_ships_many_runs_and_names_the_one_that_it_cannot(
    tmp_path: Path, database: str
) -> None:
    runs = [SimulatedRun(tmp_path / "runs", f"tiny-{index}") for index in range(3)]
    runs[0].whole_life()
    runs[1].attempt(1, None)
    runs[1].train(1, 7)
    runs[2].dir.run_yaml.write_text("nonsense: [")
    dirs = [run.dir for run in runs]
    summary = sync_runs(dirs, uri=database)
    assert [run.state for run in summary.runs] == [RunState.FINISHED, RunState.RUNNING, None]
    assert [run.final for run in summary.runs] == [True, False, False]
    assert [run.run_id for run in summary.failed] == ["tiny-2"]
    assert "run.yaml" in str(summary.failed[0].error)
    reader = Reader(database)
    assert reader.steps("tiny-0") == list(range(1, 31))
    assert reader.one("tiny-0").info.status == "FINISHED"
    runs[1].more(8, 9)
    again = sync_runs(dirs, uri=database, state_of=lambda run: RunState.FAILED)
    assert again.runs[0].rows == 0
    assert reader.steps("tiny-1") == list(range(1, 10))
    assert reader.one("tiny-1").info.status == "FAILED"


def test_sync_says_when_a_store_does_not_answer_and_loses_nothing(
    tmp_path: Path, database: str
) -> None:
    run = SimulatedRun(tmp_path / "runs")
    run.attempt(1, None)
    run.train(1, 5)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and never listening: refused
        uri = f"http://me:s3cret@127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EnvironmentFailure, match="start the store") as failed:
            sync_runs([run.dir], uri=uri)
    assert "s3cret" not in str(failed.value)
    assert sync_runs([run.dir], uri=database).runs[0].error is None
    assert Reader(database).steps("tiny-1") == [1, 2, 3, 4, 5]


def test_a_deleted_experiment_is_said_and_not_made_again(tmp_path: Path, database: str) -> None:
    run = SimulatedRun(tmp_path / "runs")
    run.submitted()
    sync_runs([run.dir], uri=database)
    client = Reader(database).client
    client.delete_experiment(client.get_experiment_by_name("air_hpc").experiment_id)
    run.attempt(1, None)
    (failed,) = sync_runs([run.dir], uri=database).failed
    assert "tracking.experiment" in str(failed.error)


def test_two_shippers_log_the_run_as_a_whole_once_a_step(tmp_path: Path, database: str) -> None:
    run = SimulatedRun(tmp_path / "runs")
    run.attempt(1, None)
    shippers = [shipper_of(run, database) for _ in range(2)]
    for last in range(3, 30, 3):
        (run.train if last == 3 else run.more)(last - 2, last, step_s=20)
        for shipper in shippers:
            shipper.ship()
    goodput = Reader(database).steps("tiny-1", "goodput/ratio")
    assert goodput == list(range(3, 30, 3))


def test_sync_follows_until_every_run_is_over(tmp_path: Path, database: str) -> None:
    run = SimulatedRun(tmp_path / "runs")
    run.attempt(1, None)
    run.train(1, 5)
    passes = []

    def after(synced: Any) -> None:
        passes.append(synced.state)
        if len(passes) == 1:
            run.more(6, 30)
            run.end("user_error", "stop", 30)

    summary = sync_runs([run.dir], uri=database, follow=True, interval_s=0.01, on_run=after)
    assert summary.runs[0].final
    found = Reader(database).one("tiny-1")
    assert found.info.status == "FAILED"
    assert found.data.tags["air_hpc.failure_class"] == "user_error"
    assert Reader(database).steps("tiny-1") == list(range(1, 31))
