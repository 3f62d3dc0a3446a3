from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from air_hpc.config.freeze import canonical_hash, dump_yaml, load_yaml
from air_hpc.config.spec import RunSpec
from air_hpc.errors import BadInput
from air_hpc.plan.frozen import config_hash, freeze_run, read_run_yaml, render_run_yaml
from air_hpc.plan.make import make_plan
from air_hpc.plan.types import Plan
from tests.config.strategies import PLANS, RUN_SPECS, TEXT


def default_plan() -> Plan:
    plan, _ = make_plan(RunSpec(), local_cpu_count=2)
    assert plan is not None
    return plan


def a_text() -> str:
    return render_run_yaml(freeze_run("run-1", RunSpec(), default_plan(), ("train.steps=200",)))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(TEXT, RUN_SPECS, PLANS, st.lists(TEXT, max_size=3))
def test_what_is_frozen_is_read_back_and_written_the_same(
    run_id: str, spec: RunSpec, plan: Plan, overrides: list[str]
) -> None:
    frozen = freeze_run(run_id, spec, plan, tuple(overrides))
    text = render_run_yaml(frozen)
    read = read_run_yaml(text)
    assert read == frozen
    assert read.config_hash == config_hash(spec, plan)
    assert render_run_yaml(read) == text


def test_the_hash_is_of_the_config_and_not_of_the_run() -> None:
    spec, plan = RunSpec(), default_plan()
    assert freeze_run("a", spec, plan).config_hash == freeze_run("b", spec, plan).config_hash
    other = dataclasses.replace(spec, runs_dir="elsewhere")
    assert config_hash(other, plan) != config_hash(spec, plan)
    slower = dataclasses.replace(plan, lead_s=1.0)
    assert config_hash(spec, slower) != config_hash(spec, plan)


@pytest.mark.parametrize(
    ("old", "new"), [("steps: 200", "steps: 201"), ("lead_s: auto", "lead_s: 5.0")]
)
def test_a_file_edited_by_hand_is_refused(old: str, new: str) -> None:
    text = a_text()
    assert old in text
    with pytest.raises(BadInput, match="edited after it was written"):
        read_run_yaml(text.replace(old, new, 1))


def test_layout_and_comments_do_not_matter() -> None:
    body = load_yaml(a_text())
    shuffled = dump_yaml(dict(reversed(body.items()))) + "# a note\n"
    assert read_run_yaml(shuffled) == read_run_yaml(a_text())


def test_a_newer_version_is_refused_by_name() -> None:
    text = a_text().replace("schema_version: 1", "schema_version: 2")
    with pytest.raises(BadInput, match=r"newer air_hpc.*at most 1"):
        read_run_yaml(text, "/runs/x/run.yaml")


def test_keys_of_a_later_writer_are_kept() -> None:
    body = load_yaml(a_text())
    body["site_note"] = {"a": 1}
    body["spec"]["model"]["experts"] = 8
    body["spec"]["cluster"]["container"]["gpu"] = True
    body["plan"]["stages"] = [1, 2]
    body["config_hash"] = canonical_hash({"spec": body["spec"], "plan": body["plan"]})
    read = read_run_yaml(dump_yaml(body))
    assert read.spec == RunSpec()
    again = load_yaml(render_run_yaml(read))
    assert again == body
    assert config_hash(read.spec, read.plan, read.extra) == read.config_hash


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "- 1",
        "schema_version: x",
        "schema_version: true",
        "schema_version: 1",
        "schema_version: 1\nrun_id: a\nconfig_hash: b\noverrides: []\nspec: 1\nplan: 2\n",
        "schema_version: 0\n",
        "\0",
        "!!python/object/apply:os.system [x]",
    ],
)
def test_what_is_no_run_yaml_is_bad_input(text: str) -> None:
    with pytest.raises(BadInput, match=r"run\.yaml"):
        read_run_yaml(text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seed: 0", "seed: .nan"),
        ("seed: 0", "seed: 2026-01-01"),
        ("seed: 0", "1: 0"),
        ("run_id: run-1", "run_id: 1"),
        ("overrides:\n- train.steps=200", "overrides: 1"),
        ("overrides:\n- train.steps=200", "overrides: [1]"),
    ],
)
def test_what_only_an_editor_puts_there_is_bad_input(old: str, new: str) -> None:
    assert old in a_text()
    with pytest.raises(BadInput):
        read_run_yaml(a_text().replace(old, new, 1))


@settings(deadline=None)
@given(st.integers(0, 4000), st.integers(0, 255))
def test_a_damaged_file_is_bad_input_or_read_as_it_was(at: int, byte: int) -> None:
    raw = bytearray(a_text().encode())
    raw[at % len(raw)] = byte
    text = raw.decode(errors="replace")
    try:
        read = read_run_yaml(text)
    except BadInput:
        return
    whole = read_run_yaml(a_text())
    assert (read.spec, read.plan) == (whole.spec, whole.plan)


@pytest.mark.parametrize("part", ["spec", "plan"])
def test_a_value_of_the_wrong_type_is_named_with_its_part(part: str) -> None:
    body = load_yaml(a_text())
    body[part]["later" if part == "plan" else "runs_dir"] = 5
    if part == "plan":
        body[part]["nodes"] = "two"
    body["config_hash"] = canonical_hash({"spec": body["spec"], "plan": body["plan"]})
    with pytest.raises(BadInput, match=rf"{part}\.(runs_dir|nodes)="):
        read_run_yaml(dump_yaml(body))
