"""The summary at a run's end: nothing in it is more than is known."""

from pathlib import Path

from air_hpc.cli.summary import describe
from air_hpc.rundir.events import Kind
from air_hpc.runs.summary import summarize
from tests.runs.made import FIRST, MadeRun


def summary_of(run: MadeRun) -> dict[str, str]:
    lines = describe(summarize(run.ended().dir, ask_slurm=False)).splitlines()
    return {name: value for name, _, value in (line.partition(" ") for line in lines)}


def test_mlflow_is_offered_once_something_was_sent_there(tmp_path: Path) -> None:
    # Where MLflow could not be imported, a command that opens an empty store once stood here.
    run = MadeRun(tmp_path / "runs").submitted().training()
    assert "nothing was sent; to send it: python -m air_hpc sync" in summary_of(run)["MLflow"]
    run.event(Kind.TRACKING_STARTED, FIRST, uri="sqlite:////a/mlflow.db", mlflow_run_id="x1")
    assert "ui --backend-store-uri sqlite:////a/mlflow.db" in summary_of(run)["MLflow"]


def test_a_rate_above_the_peak_is_said_to_be_wrong_and_gives_no_mfu(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "runs").submitted().training()
    run.event(Kind.MEASURED, FIRST, peak_flops_per_device=3e10, peak_source="measured", device="X")
    rates = {"perf/tokens_per_second": 12000.0, "perf/mfu_invalid": 1.0}
    run.metrics({1: rates, 2: rates})
    shown = summary_of(run)
    assert shown["tokens/s"].strip() == "12,000 in the median step"
    assert "above the measured peak of 30 GFLOP/s" in shown["MFU"]
