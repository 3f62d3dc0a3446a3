from dataclasses import replace
from pathlib import Path

from air_hpc.plan.frozen import freeze_run, read_run_yaml, render_run_yaml
from air_hpc.rundir.events import Kind
from air_hpc.rundir.fence import Token
from air_hpc.runs.summary import mlflow_command, summarize
from air_hpc.runs.watch import Watch
from tests.runs.made import MadeRun


def sample(loss: float, rate: float, mfu: float) -> dict[str, float]:
    return {
        "train/loss": loss,
        "perf/tokens_per_second": rate,
        "perf/mfu": mfu,
        "perf/mfu_palm": mfu * 1.1,
    }


def test_figures_are_of_the_steps_that_count_without_each_generations_first(
    tmp_path: Path,
) -> None:
    run = MadeRun(tmp_path / "runs").submitted().training()
    run.metrics({1: sample(5, 1, 0.01), 2: sample(4, 100, 0.4), 3: sample(9, 999, 0.9)})
    run.ended(failure_class="node_lost", verdict="requeue")
    again = Token(2, 1)
    run.event(Kind.ATTEMPT_STARTED, again, nodes=["n1"]).event(Kind.RESUMED, again, step=2)
    facts = {"peak_flops_per_device": 2e12, "peak_source": "measured", "device_name": "X"}
    run.event(Kind.MEASURED, again, **facts)
    run.metrics({3: sample(3, 2, 0.02), 4: sample(2, 110, 0.5)}, again)
    run.ended(again)
    summary = summarize(run.dir, ask_slurm=False)
    assert (summary.first_loss, summary.last_loss) == (5, 2)
    assert summary.tokens_per_s == 105
    assert summary.mfu_causal == 0.45
    assert summary.attempts == 2
    assert summary.peak is not None
    assert (summary.peak.flops_per_device, summary.peak.source) == (2e12, "measured")


def test_an_unknown_peak_gives_no_mfu(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "runs").submitted().training()
    run.metrics({n: {"train/loss": 1.0} for n in (1, 2, 3)})
    body = summarize(run.ended().dir, ask_slurm=False).to_json()
    assert body["mfu"] == {"causal": None, "palm": None}
    assert body["peak"] is None
    assert body["state"] == "FINISHED"


def test_the_peak_of_another_device_than_the_one_planned_for_is_unknown(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "runs").submitted().training()
    run.event(Kind.MEASURED, peak_flops_per_device=None, peak_source="unknown", device_name="X")
    frozen = read_run_yaml(run.dir.run_yaml.read_text())
    planned = replace(frozen.plan, peak_flops_per_device=989e12)
    again = freeze_run(frozen.run_id, frozen.spec, planned)
    run.dir.run_yaml.write_text(render_run_yaml(again))
    assert summarize(run.dir, ask_slurm=False).peak is None


def test_a_run_that_never_started_has_a_summary_without_figures(tmp_path: Path) -> None:
    summary = summarize(MadeRun(tmp_path / "runs").dir, ask_slurm=False)
    assert summary.last_loss is None
    assert summary.checkpoints == ()
    assert summary.mlflow_command is not None  # the plan knows the store


def test_the_command_that_opens_mlflow_quotes_its_store() -> None:
    assert mlflow_command("sqlite:////a b/mlflow.db").endswith(
        "ui --backend-store-uri 'sqlite:////a b/mlflow.db'"
    )
    assert mlflow_command("https://mlflow.example") == "https://mlflow.example"


def test_a_watch_reads_on_from_where_it_was_and_never_half_a_line(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "runs").submitted()
    watch = Watch(run.dir)
    assert [event.kind for event in watch.look()] == ["submitted"]
    line = '{"v":1,"time":1700000100,"kind":"signal","facts":{"name":"USR2"}}\n'
    other = run.dir.ledger_dir / "other.jsonl"
    other.write_text(line[:30])
    assert watch.look() == []
    other.write_text(line)
    assert [event.kind for event in watch.look()] == ["signal"]
    run.training().metrics({1: sample(5, 1, 0.1), 3: sample(4, 1, 0.1)})
    watch.look()
    assert watch.last is not None
    assert watch.last.step == 3
    assert watch.seconds_per_step() == 0.5
