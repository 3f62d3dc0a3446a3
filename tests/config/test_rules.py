"""The table of failures as config: by override, by file, and everything that is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from air_hpc.config.build import build
from air_hpc.config.complete import complete
from air_hpc.config.compose import Composer
from air_hpc.config.freeze import to_plain
from air_hpc.config.spec import FailureRule, RecoverySpec, RunSpec
from air_hpc.errors import BadInput, Problem
from air_hpc.plan.frozen import freeze_run, read_run_yaml, render_run_yaml
from air_hpc.plan.make import make_plan

SHARED = Composer()


def problems_of(*overrides: str) -> list[Problem]:
    with pytest.raises(BadInput) as caught:
        SHARED.compose(list(overrides))
    return list(caught.value.problems)


def test_a_rule_of_the_users_own_is_an_override() -> None:
    spec = SHARED.compose(
        [
            'recovery.rules.my_site.pattern="port \\d+ flapped"',
            "recovery.rules.my_site.failure_class=network",
            "recovery.rules.my_site.exit_code=[3,4]",
            "recovery.rules.my_site.action=exclude",
        ]
    )
    rule = spec.recovery.rules["my_site"]
    assert rule == FailureRule(
        "network", exit_code=(3, 4), pattern="port \\d+ flapped", action="exclude"
    )
    assert len(spec.recovery.rules) > 20, "the shipped ones are still there"


def test_a_shipped_rule_is_changed_or_switched_off() -> None:
    spec = SHARED.compose(["recovery.rules.oom_kill=null", "recovery.rules.nccl.action=exclude"])
    assert spec.recovery.rules["oom_kill"] is None
    changed = spec.recovery.rules["nccl"]
    assert changed is not None
    assert (changed.action, changed.failure_class) == ("exclude", "network")
    assert "nccl" not in SHARED.compose(["~recovery.rules.nccl"]).recovery.rules


def test_a_file_of_the_users_own_adds_to_the_shipped_ones(tmp_path: Path) -> None:
    folder = tmp_path / "recovery" / "rules"
    folder.mkdir(parents=True)
    (folder / "my_site.yaml").write_text(
        "defaults: [default, _self_]\nfabric: {xid: [79], failure_class: device}\n"
    )
    rules = Composer(tmp_path).compose(["recovery/rules=my_site"]).recovery.rules
    assert rules["fabric"] == FailureRule("device", xid=(79,))
    assert "oom_kill" in rules


def test_every_mistake_of_a_table_is_found_in_one_pass() -> None:
    problems = problems_of(
        "recovery.rules.one.failure_class=meteor",
        "recovery.rules.one.pattern=x",
        "recovery.rules.two.failure_class=network",
        "recovery.rules.two.pattern='(unclosed'",
        "recovery.rules.two.action=pray",
        "recovery.rules.three.failure_class=device",
        "recovery.rules.four.xid=[79]",
        "recovery.rules.five={failure_class: data, signal: [SIGKIL], errno: [ENOSPACE]}",
        "recovery.rules.six=yes",
        "recovery.rules.seven={failure_class: data, exit_code: 3}",
    )
    assert {problem.key for problem in problems} == {
        "recovery.rules.one.failure_class",
        "recovery.rules.two.pattern",
        "recovery.rules.two.action",
        "recovery.rules.three",
        "recovery.rules.four.failure_class",
        "recovery.rules.five.signal",
        "recovery.rules.five.errno",
        "recovery.rules.six",
        "recovery.rules.seven.exit_code",
    }
    by_key = {problem.key: problem for problem in problems}
    assert "user_error" in by_key["recovery.rules.one.failure_class"].allowed
    assert "unterminated" in by_key["recovery.rules.two.pattern"].allowed
    assert "restart, exclude, stop" in by_key["recovery.rules.two.action"].allowed
    assert "a rule without a condition" in by_key["recovery.rules.three"].message
    assert by_key["recovery.rules.seven.exit_code"].hint == "Write [3]"


def test_an_unknown_key_of_a_rule_names_the_nearest() -> None:
    (problem,) = problems_of("recovery.rules.mine.patern=x")
    assert problem.key == "recovery.rules.mine.patern"
    assert problem.hint == "Did you mean recovery.rules.mine.pattern?"
    built = build(
        RunSpec, {"recovery": {"rules": {"mine": {"xids": [1], "failure_class": "data"}}}}
    )
    assert built.problems[0].hint == "Did you mean recovery.rules.mine.xid?"


@pytest.mark.parametrize("name", ["a b", "", "1st", "a.b"])
def test_a_name_that_no_override_can_address_is_refused(name: str) -> None:
    rule = {"xid": [1], "failure_class": "device"}
    built = build(RunSpec, {"recovery": {"rules": {name: rule}}})
    assert [problem.key for problem in built.problems] == ["recovery.rules"]


@pytest.mark.parametrize("value", ["text", 3, ["a"]])
def test_a_table_that_is_no_mapping_is_refused(value: object) -> None:
    built = build(RunSpec, {"recovery": {"rules": value}})
    assert [problem.key for problem in built.problems] == ["recovery.rules"]


def test_a_table_that_was_built_before_is_the_same_again() -> None:
    """The last one is kept for the next task of a sweep; another one must not be taken for it."""
    rule = {"xid": [1], "failure_class": "device"}
    for code in (True, 1, 1.0, "1"):
        table = {"rules": {"a": {**rule, "priority": code}}}
        first, again = build(RecoverySpec, table), build(RecoverySpec, table)
        assert first == again
        assert bool(first.problems) is (code is True or not isinstance(code, int))


def test_the_table_is_frozen_into_run_yaml_without_what_is_empty() -> None:
    spec = SHARED.compose(["recovery.rules.oom_kill=null"])
    plan, _ = make_plan(spec, local_cpu_count=1)
    assert plan is not None
    text = render_run_yaml(freeze_run("run", spec, plan))
    assert read_run_yaml(text).spec == spec
    plain = to_plain(spec)["recovery"]["rules"]
    assert plain["oom_kill"] is None
    assert set(plain["host_memory"]) == {"exception", "failure_class", "priority", "hint"}


def test_completion_offers_names_keys_and_values() -> None:
    assert "recovery.rules.oom_kill." in complete(["recovery.rules.oo"])
    keys = complete(["recovery.rules.oom_kill."])
    assert "recovery.rules.oom_kill.pattern=" in keys
    assert "recovery.rules.mine.action=" in complete(["recovery.rules.mine.a"])
    assert complete(["recovery.rules.mine.action=ex"]) == ["recovery.rules.mine.action=exclude"]
    assert "recovery.rules.mine.failure_class=host_memory" in complete(
        ["recovery.rules.mine.failure_class=host"]
    )
