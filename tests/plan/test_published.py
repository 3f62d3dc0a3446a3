"""The published runs: their data, the fit's honesty, and the table of docs/planner.md."""

from __future__ import annotations

import json
import statistics
import sys

import pytest

from tests.acceptance.runs import ROOT

sys.path.insert(0, str(ROOT))

from air_hpc.plan.flops import count_parameters
from air_hpc.plan.rates import FITTED, Constants, fitted
from tools._published.fit import fit, loss
from tools._published.runs import Run, all_runs, sources
from tools._published.tables import SECTIONS, filled


def of(group: str, name: str) -> Run:
    (found,) = [run for run in all_runs() if run.group == group and run.name == name]
    return found


def test_the_page_holds_what_the_command_makes() -> None:
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    assert filled(page) == page, "run tools/plan-published --write"


def test_every_section_is_one_that_the_page_has() -> None:
    with pytest.raises(ValueError, match="has not one section"):
        filled("no section here")
    assert set(SECTIONS) == {"constants", "summary", "every run"}


def test_only_torchtitans_8b_runs_are_fitted_on() -> None:
    chosen = [run for run in all_runs() if run.fit]
    assert {run.job.model.name for run in chosen} == {"llama_8b"}
    assert all(run.source.startswith("torchtitan") for run in chosen)
    body = json.loads(FITTED.read_text())
    assert body["fitted_on"] == [f"{run.group}: {run.name}" for run in chosen]
    assert len(body["constants"]) <= 3


def test_the_kept_constants_are_where_the_fit_is() -> None:
    """No value near the kept ones is better on the fitted runs."""
    chosen = [run for run in all_runs() if run.fit]
    kept = fitted()
    least = loss(chosen, kept)
    for name in ("matmul_share", "attention_share", "link_share"):
        for factor in (0.97, 1.03):
            moved = Constants(**{**vars(kept), name: factor * getattr(kept, name)})
            assert loss(chosen, moved) > least


def test_a_fit_finds_constants_that_made_its_data() -> None:
    true = Constants(0.7, 0.4, 0.6)
    chosen = [
        of("torchtitan 8B, H100", "8 GPUs, compile"),
        of("torchtitan 8B, long sequences", "32k, cp 1"),
        of("torchtitan 8B, tp 8", "bf16"),
    ]
    made = [Run(**{**vars(run), "tokens_per_s": run.predicted(true)}) for run in chosen]
    found = fit(made, rounds=8)
    assert loss(made, found) < 1e-3
    assert found.link_share == pytest.approx(true.link_share, rel=0.1)


def test_held_out_runs_are_predicted_within_the_aim_in_the_median() -> None:
    held = [abs(run.error()) for run in all_runs() if not run.fit]
    assert len(held) > 150
    assert statistics.median(held) <= 0.15


def test_the_models_are_of_their_published_size() -> None:
    """llm-foundry prints them: MPT's positions and biases are what differs."""
    printed = {"mpt_1b": 1315950592, "mpt_7b": 6658859008, "mpt_30b": 29975214080}
    models = {run.job.model.name: run.job.model for run in all_runs()}
    for name, count in printed.items():
        positions = 2048 * models[name].dim
        ours = count_parameters(models[name]).parameters + positions
        assert ours == pytest.approx(count, rel=2e-3)
    assert count_parameters(models["gpt_175b"]).parameters == pytest.approx(175e9, rel=0.01)


def test_a_runs_mesh_fills_its_gpus_and_its_source_is_listed() -> None:
    for run in all_runs():
        assert run.job.mesh.world_size == run.gpus, run.name
        assert run.source in sources()


def test_published_figures_are_what_the_sources_say() -> None:
    """Tokens a step over the step's time, where a source prints both."""
    megascale = of("MegaScale 175B, A100", "12,288 GPUs")
    assert megascale.tokens_per_s * 12288 == pytest.approx(1984e3, rel=1e-3)
    assert megascale.job.micro_batches == 32
    llama = of("Llama 3 405B", "8,192 GPUs, 8k")
    assert llama.tokens == pytest.approx(16.8e6, rel=0.01)
