import re
from pathlib import Path

import pytest

from tests.cli.commands import air_hpc, json_of

BIG = [
    "cluster=slurm",
    "model=llama_8b",
    "parallelism=fsdp",
    "launch.nodes=2",
    "launch.devices_per_node=8",
]


def test_the_json_is_one_object_with_the_names_that_scripts_rely_on(tmp_path: Path) -> None:
    body = json_of(air_hpc("plan", *BIG, "accelerator=h100_sxm", "--json", cwd=tmp_path))
    assert {"causal", "palm"} == set(body["flops_per_token"]) == set(body["mfu"])
    assert body["mesh"]["dp_shard"] == 16
    assert body["memory_per_rank_bytes"] > 0
    assert body["step_time_s"] is None
    assert body["mfu"] == {"causal": None, "palm": None}


def test_the_text_says_what_is_unknown_and_both_conventions(tmp_path: Path) -> None:
    text = air_hpc("plan", cwd=tmp_path).stdout
    assert "causal" in text
    assert "palm" in text
    assert re.search(r"^step time +unknown: accelerator=cpu has no peak_flops.fp32$", text, re.M)
    assert "activations" in text


def test_an_automatic_interval_says_what_it_goes_by(tmp_path: Path) -> None:
    auto = "checkpoint.interval_steps=auto"
    text = air_hpc("plan", *BIG, auto, cwd=tmp_path).stdout
    assert "saved every 10 min 00 s: the rate of failures is unknown" in text
    text = air_hpc(
        "plan", *BIG, auto, "checkpoint.failures_per_node_day=0.0065", cwd=tmp_path
    ).stdout
    assert "saved every 1 min 00 s to 1 h 00 min, as measured saves and 0.0065 failures" in text


def test_a_plan_for_many_nodes_is_made_on_one_machine_without_a_warning(tmp_path: Path) -> None:
    done = air_hpc("plan", *BIG[1:], cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "to start it: cluster=slurm" in done.stdout


def test_a_limit_on_this_machine_is_told_as_it_is_kept(tmp_path: Path) -> None:
    assert "none on this machine" in air_hpc("plan", cwd=tmp_path).stdout
    assert "time 5 min" in air_hpc("plan", "launch.time_limit_min=5", cwd=tmp_path).stdout


def test_a_sweep_is_one_line_or_one_object_a_run(tmp_path: Path) -> None:
    words = ["plan", "-m", "optimizer.lr=1e-3,3e-4", "train.seed=1,2"]
    text = air_hpc(*words, cwd=tmp_path).stdout
    assert len(text.splitlines()) == 5
    assert all(line == line.rstrip() for line in text.splitlines())
    assert len(json_of(air_hpc(*words, "--json", cwd=tmp_path))["runs"]) == 4


def test_hydras_options_hold(tmp_path: Path) -> None:
    extra = tmp_path / "mine" / "model"
    extra.mkdir(parents=True)
    (extra / "own.yaml").write_text("name: own\nlayers: 2\n")
    done = air_hpc("-cd", "mine", "model=own", "+launch.sbatch.licenses=a:1", "--cfg", "job",
                   cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "name: own" in done.stdout
    assert "licenses: a:1" in done.stdout
    (tmp_path / "mine" / "other.yaml").write_text(
        "defaults: [config, _self_]\ntrain: {steps: 70}\n"
    )
    named = air_hpc("plan", "--config-dir=mine", "--config-name=other", "--json", cwd=tmp_path)
    assert named.returncode == 0, named.stderr
    assert json_of(named)["total_tokens"] == 70 * json_of(named)["tokens_per_step"]


def test_colour_stays_out_of_pipes(tmp_path: Path) -> None:
    done = air_hpc("plan", "-m", "train.seed=1,2", cwd=tmp_path, env={"COLUMNS": "30"})
    assert "\x1b" not in done.stdout


FAST = [*BIG, "accelerator=h100_sxm", "train.precision=bf16", "train.compile=true"]
FAST += ["data.sequence_length=8192", "train.global_batch_size=64"]


def test_a_known_device_has_a_time_by_parts_and_a_speed(tmp_path: Path) -> None:
    body = json_of(air_hpc("plan", *FAST, "--json", cwd=tmp_path))
    assert body["step_time_s"] == pytest.approx(sum(body["step_time"].values()))
    assert body["tokens_per_second"] == pytest.approx(64 * 8192 / body["step_time_s"])
    assert 0.2 < body["mfu"]["causal"] < body["mfu"]["palm"] < 0.6
    assert body["cost"] is None
    assert body["expected_ettr"] is None
    text = air_hpc("plan", *FAST, cwd=tmp_path).stdout
    for part in ("matrix products", "attention", "memory-bound", "FSDP", "training"):
        assert part in text


def test_auto_says_what_it_chose_over_what(tmp_path: Path) -> None:
    words = [*FAST, "parallelism=auto", "parallelism.recompute=ops"]
    text = air_hpc("plan", *words, cwd=tmp_path).stdout
    assert re.search(r"^search +[\d,]+ layouts", text, re.M)
    assert text.count("  next  ") == 2
    assert "  no search " in text
    body = json_of(air_hpc("plan", *words, "--json", cwd=tmp_path))
    chosen = body["search"]["chosen"]
    assert chosen["mesh"] == body["mesh"]
    assert "parallelism.recompute=ops" in chosen["overrides"]
    assert chosen["step_time_s"] == pytest.approx(body["step_time_s"])
    again = json_of(air_hpc("plan", *FAST, *chosen["overrides"], "--json", cwd=tmp_path))
    assert again["step_time_s"] == pytest.approx(body["step_time_s"])
    assert again["memory_per_rank_bytes"] == body["memory_per_rank_bytes"]


def test_a_scaling_table_and_how_many_nodes(tmp_path: Path) -> None:
    priced = [*FAST, "parallelism.recompute=full", "accelerator.cost_per_device_hour=2"]
    asked = ["--nodes", "1,2,3,4", "--target-tokens", "1T", "--deadline", "500d", "--json"]
    body = json_of(air_hpc("plan", *priced, *asked, cwd=tmp_path))
    rows = {row["nodes"]: row for row in body["scaling"]}
    assert list(rows) == [1, 2, 3, 4]
    assert "does not divide" in rows[3]["problem"]
    assert rows[4]["speedup"] > rows[2]["speedup"] > 1
    fast_enough = [n for n in (1, 2, 4) if rows[n]["training_s"] <= 500 * 86400]
    assert body["answer"]["nodes"] == min(fast_enough)
    text = air_hpc("plan", *priced, *asked[:-1], cwd=tmp_path).stdout
    assert text.startswith("NODES")
    assert f"how many nodes: {min(fast_enough)} " in text


def test_everything_wrong_with_the_asks_and_the_config_is_told_at_once(tmp_path: Path) -> None:
    words = ["--nodes", "1,x", "--target-tokens", "many", "--deadline", "2m", "--budget", "-1"]
    done = air_hpc("plan", *words, "--rank", "3", "train.steps=0", "--json", cwd=tmp_path)
    assert done.returncode == 2
    keys = {problem["key"] for problem in json_of(done)["problems"]}
    assert keys == {
        "--nodes", "--target-tokens", "--deadline", "--budget", "--rank", "train.steps"
    }  # fmt: skip


def test_a_layout_that_cannot_fit_is_bad_input_with_the_least_it_would_need(tmp_path: Path) -> None:
    words = [*FAST, "parallelism=auto", "model=llama_405b", "launch.nodes=1"]
    done = air_hpc("plan", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "the smallest needs" in done.stderr
