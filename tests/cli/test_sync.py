from pathlib import Path

import pytest

from air_hpc.cli.sync import ScheduledStates
from air_hpc.rundir.events import Kind, read_ledger
from air_hpc.rundir.words import RunState
from tests.cli.commands import air_hpc, json_of
from tests.runs.made import MadeRun, ToldSlurm, queued


def test_runs_are_sent_to_a_store_once_and_a_broken_one_stops_no_other(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    run = MadeRun(tmp_path / "runs", "tiny-a").submitted().training()
    run.metrics({step: {"train/loss": 5.0 / step} for step in (1, 2, 3)}).ended()
    broken = MadeRun(tmp_path / "runs", "tiny-b").submitted()
    broken.dir.run_yaml.write_text("not: a run\n")
    words = ["sync", "--uri", f"sqlite:///{tmp_path}/store.db", "--json"]
    done = air_hpc(*words, cwd=tmp_path)
    assert done.returncode == 1
    first, second = json_of(done)["runs"]
    assert (first["run_id"], first["state"], first["error"]) == ("tiny-a", "FINISHED", None)
    assert first["rows"] > 0
    assert "no run.yaml" in second["error"]
    again = json_of(air_hpc(*words[:-1], "tiny-a", "--json", cwd=tmp_path))["runs"][0]
    assert (again["rows"], again["mlflow_run_id"]) == (0, first["mlflow_run_id"])
    told = [event.kind for event in read_ledger(run.dir).events]
    assert told.count(Kind.TRACKING_STARTED) == 1


def test_a_store_that_mlflow_refuses_is_bad_input(tmp_path: Path) -> None:
    MadeRun(tmp_path / "runs").submitted()
    done = air_hpc("sync", "--uri", "file:/tmp/store", cwd=tmp_path)
    assert (done.returncode, "sqlite:///" in done.stderr) == (2, True)


def test_no_runs_are_no_error(tmp_path: Path) -> None:
    done = air_hpc("sync", "--json", cwd=tmp_path)
    assert (done.returncode, json_of(done)) == (0, {"runs": []})


def test_slurm_is_asked_once_a_minute_for_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once every pass asked for each run by itself: hundreds of calls every ten seconds."""
    slurm = ToldSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", slurm.environ["PATH"])
    slurm.tell("squeue", queued("100_0", "RUNNING"), queued("100_1", "PENDING", "JobHeldUser"))
    runs = [MadeRun(tmp_path / "runs", f"tiny-{n}").submitted("100", n).dir for n in range(2)]
    now = 0.0
    state_of = ScheduledStates(runs, clock=lambda: now)
    assert [state_of(run) for run in (*runs, *runs)] == [None, RunState.HELD] * 2
    assert len(slurm.calls("squeue")) == 1
    now = 61.0
    slurm.tell("squeue", queued("100_0", "RUNNING"), queued("100_1", "RUNNING"))
    assert [state_of(run) for run in runs] == [None, None]
    assert len(slurm.calls("squeue")) == 2
