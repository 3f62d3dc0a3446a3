from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_hpc.config.complete import complete


@pytest.mark.parametrize(
    ("word", "some"),
    [
        ("mod", ["model=", "model."]),
        ("model=ll", ["model=llama_8b", "model=llama_405b"]),
        ("model=tiny,ll", ["model=tiny,llama_8b"]),
        ("train.gl", ["train.global_batch_size="]),
        ("train.precision=", ["train.precision=fp32", "train.precision=bf16"]),
        ("train.compile=t", ["train.compile=true"]),
        ("launch.lead_s=", ["launch.lead_s=auto"]),
        ("launch.qos=", ["launch.qos=null"]),
        ("+exp", ["+experiment="]),
        ("~launch.pa", ["~launch.partition"]),
        ("runs", ["runs_dir="]),
        ("cluster.container.k", ["cluster.container.kind="]),
    ],
)
def test_candidates_begin_with_the_word(word: str, some: list[str]) -> None:
    found = complete(["run", word])
    assert set(some) <= set(found)
    assert all(candidate.startswith(word) for candidate in found)


def test_options_of_a_folder_of_the_users_are_offered(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mysite.yaml").write_text("name: mysite\n")
    assert complete(["cluster=my"], tmp_path) == ["cluster=mysite"]
    assert complete(["cluster=my"], tmp_path / "nowhere") == []


@given(st.text())
def test_any_word_is_answered(word: str) -> None:
    complete([word])


def test_completion_and_the_spec_import_no_hydra() -> None:
    code = (
        "import sys, air_hpc.config.complete, air_hpc.config.spec, air_hpc.config.freeze;"
        "import air_hpc.plan.make, air_hpc.plan.frozen;"
        "print([m for m in sys.modules if m.split('.')[0] in ('hydra', 'omegaconf', 'torch')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
