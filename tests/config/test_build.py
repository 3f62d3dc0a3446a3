from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given

from air_hpc.config.build import build, fields_of, leaf_keys
from air_hpc.config.freeze import to_plain
from air_hpc.config.spec import RunSpec
from tests.config.strategies import RUN_SPECS


def problems_of(**sections: object) -> list[str]:
    return [str(p) for p in build(RunSpec, sections).problems]


def test_an_empty_mapping_is_the_default_run() -> None:
    built = build(RunSpec, {})
    assert built.problems == []
    assert built.value == RunSpec()


@given(RUN_SPECS)
def test_any_spec_comes_back_from_its_plain_form(spec: RunSpec) -> None:
    built = build(RunSpec, to_plain(spec))
    assert built.problems == []
    assert built.value == spec


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "steps", "200"),
        ("train", "steps", True),
        ("train", "steps", 1.5),
        ("train", "steps", 0),
        ("train", "steps", 2**70),
        ("train", "steps", None),
        ("train", "compile", 1),
        ("train", "precision", "fp64"),
        ("train", "micro_batch_size", "automatic"),
        ("train", "micro_batch_size", 0),
        ("optimizer", "lr", float("nan")),
        ("optimizer", "lr", float("inf")),
        ("optimizer", "lr", 10**400),
        ("optimizer", "lr", "1e-3"),
        ("optimizer", "lr", 0),
        ("optimizer", "beta1", 1.0),
        ("launch", "partition", 5),
        ("launch", "partition", "a\nb"),
        ("launch", "partition", "\ud800"),
        ("launch", "nodes", [1]),
        ("launch", "nodes", {"a": 1}),
        ("launch", "sbatch", ["a"]),
        ("launch", "sbatch", {"a": [1]}),
        ("launch", "sbatch", {"a": "b\nc"}),
        ("launch", "sbatch", {1: "b"}),
        ("cluster", "modules", "cuda"),
        ("cluster", "modules", [1]),
        ("cluster", "modules", ["a\tb"]),
        ("cluster", "container", "apptainer"),
        ("model", "rope_scaling", 8),
    ],
)
def test_a_value_that_does_not_fit_is_one_problem_under_its_key(
    section: str, key: str, value: object
) -> None:
    built = build(RunSpec, {section: {key: value}})
    (problem,) = built.problems
    assert problem.key.startswith(f"{section}.{key}")
    assert problem.allowed
    assert built.value == RunSpec(), "a wrong value leaves the default"


def test_a_mapping_inside_a_mapping_is_checked_under_its_full_key() -> None:
    built = build(RunSpec, {"model": {"rope_scaling": {"factor": 0, "factr": 1}}})
    assert [p.key for p in built.problems] == [
        "model.rope_scaling.factor",
        "model.rope_scaling.factr",
    ]


def test_a_whole_number_is_taken_as_a_number() -> None:
    built = build(RunSpec, {"optimizer": {"lr": 1}})
    assert built.value is not None
    assert built.value.optimizer.lr == 1.0
    assert type(built.value.optimizer.lr) is float


def test_a_map_of_free_names_keeps_the_types_of_its_values() -> None:
    given_values = {"licenses": "a:1", "requeue": True, "nice": 5, "x": 1.5, "y": None}
    built = build(RunSpec, {"launch": {"sbatch": given_values}})
    assert built.value is not None
    assert {k: type(v) for k, v in built.value.launch.sbatch.items()} == {
        k: type(v) for k, v in given_values.items()
    }


def test_an_unknown_key_names_the_nearest_and_a_misplaced_one_its_section() -> None:
    (typo,) = problems_of(train={"stepz": 1})
    assert "Did you mean train.steps?" in typo
    (misplaced,) = problems_of(train={"lr": 1})
    assert "Did you mean optimizer.lr?" in misplaced
    (section,) = problems_of(modle={})
    assert "Did you mean model?" in section


def test_all_wrong_values_are_found_in_one_pass() -> None:
    wrong = {
        name: {key: object() for key in fields_of(member.nested)}
        for name, member in fields_of(RunSpec).items()
        if member.nested is not None
    }
    built = build(RunSpec, wrong)
    nested = [key for name in wrong for key in fields_of(fields_of(RunSpec)[name].nested)]  # type: ignore[arg-type]
    assert len(built.problems) == len(nested)


def test_unknown_keys_are_kept_nested_when_asked_for() -> None:
    body = {"later": 1, "model": {"experts": 8}, "cluster": {"container": {"gpu": True}}}
    built = build(RunSpec, body, keep_unknown=True)
    assert built.problems == []
    assert built.unknown == body


def test_every_field_has_a_default_that_its_own_check_allows() -> None:
    spec = RunSpec()
    for key in leaf_keys(RunSpec):
        value: object = spec
        member = None
        for part in key.split("."):
            member = fields_of(type(value))[part]
            value = getattr(value, part)
            if value is None:
                break
        assert member is not None
        assert member.check is None or member.check(value) is None, key


def test_the_spec_is_frozen_all_the_way_down() -> None:
    for name in fields_of(RunSpec):
        value = getattr(RunSpec(), name)
        if dataclasses.is_dataclass(value):
            with pytest.raises(dataclasses.FrozenInstanceError):
                value.name = "x"  # type: ignore[attr-defined]
