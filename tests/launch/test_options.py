from dataclasses import replace
from typing import Any

import pytest

from air_hpc.config.spec import RecoverySpec, RunSpec
from air_hpc.hardware.accelerator import AcceleratorSpec
from air_hpc.launch import options
from air_hpc.launch.executor import header_lines
from air_hpc.launch.script import srun_args
from tests.launch.making import spec, task

WHERE = options.JobHeader(name="tiny-key", output="/runs/%j.log", chdir="/home/u")


def header(accelerator: str = "cpu", **launch: Any) -> list[str]:
    made = spec("/runs", **launch)
    kind = "cpu" if accelerator == "cpu" else "cuda"
    made = replace(made, accelerator=AcceleratorSpec(name=accelerator, kind=kind))
    return header_lines(options.build(made, task(made).plan, WHERE))


def keys(**launch: Any) -> list[str]:
    return [problem.key for problem in options.problems(spec("/runs", **launch))]


def test_nothing_is_rendered_that_was_not_asked_for() -> None:
    lines = header(time_limit_min=None)
    assert lines == [
        "#SBATCH --job-name=tiny-key",
        "#SBATCH --output=/runs/%j.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --chdir=/home/u",
        "#SBATCH --export=NONE",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --signal=USR2@60",
        "#SBATCH --requeue",
    ]


def test_every_key_of_launch_reaches_the_header() -> None:
    lines = header(
        nodes=4, devices_per_node=2, cpus_per_device=7, partition="low", account="a", qos="q",
        constraint="x&y", reservation="r", exclusive=True, mem="64G", mail_type="END",
        mail_user="u@h", dependency="afterok:1", comment="it's mine", time_limit_min=90,
        sbatch={
            "licenses": "a:1", "contiguous": True, "hold": False, "nice": 100, "switches": None,
        },
    )  # fmt: skip
    expected = {
        "nodes=4", "cpus-per-task=14", "partition=low", "account=a", "qos=q", "constraint='x&y'",
        "reservation=r", "exclusive", "mem=64G", "mail-type=END", "mail-user=u@h", "time=90",
        "dependency=afterok:1", """comment='it'"'"'s mine'""", "licenses=a:1", "contiguous",
        "nice=100",
    }  # fmt: skip
    assert {f"#SBATCH --{line}" for line in expected} <= set(lines)
    assert not any("hold" in line or "switches" in line for line in lines)


@pytest.mark.parametrize(
    ("accelerator", "launch", "expected"),
    [
        ("cpu", {}, None),
        ("cpu", {"gpus": "gres"}, "gres=gpu:2"),
        ("h100", {}, "gpus-per-node=2"),
        ("h100", {"gres_type": "h100"}, "gpus-per-node=h100:2"),
        ("h100", {"gpus": "gres", "gres_type": "h100"}, "gres=gpu:h100:2"),
        ("h100", {"gpus": "none"}, None),
    ],
)
def test_devices_are_asked_for_as_the_site_wants(
    accelerator: str, launch: dict[str, Any], expected: str | None
) -> None:
    lines = [x for x in header(accelerator, devices_per_node=2, **launch) if "gpu" in x]
    assert lines == ([f"#SBATCH --{expected}"] if expected else [])


def recovering(**keys: Any) -> RunSpec:
    nodes = keys.pop("nodes", 2)
    return replace(spec("/runs", nodes=nodes), recovery=RecoverySpec(**keys))


@pytest.mark.parametrize(
    ("keys", "nodes", "no_kill"),
    [
        ({"nodes": 1}, 1, False),
        ({}, 2, True),
        ({"restart": "elastic"}, 2, True),
        ({"restart": "requeue"}, 2, False),
        ({"restart": "spare", "spare_nodes": 2}, 4, True),
        ({"restart": "spare", "spare_nodes": 1, "nodes": 1}, 2, True),
    ],
)
def test_the_job_and_its_step_have_the_spares_and_outlive_a_node(
    keys: dict[str, Any], nodes: int, no_kill: bool
) -> None:
    made = recovering(**keys)
    plan = task(made).plan
    lines = header_lines(options.build(made, plan, WHERE))
    step = srun_args(made, plan)
    assert f"#SBATCH --nodes={nodes}" in lines
    assert step[:2] == [f"--nodes={nodes}", f"--ntasks={nodes}"]
    assert ("#SBATCH --no-kill" in lines) == ("--no-kill" in step) == no_kill
    assert plan.nodes == made.launch.nodes


def test_no_kill_is_the_platforms_own() -> None:
    assert keys(sbatch={"no_kill": True}) == ["launch.sbatch.no_kill"]


def test_only_continuation_none_forbids_a_requeue() -> None:
    for continuation in ("requeue", "chain", "resubmit"):
        assert "#SBATCH --requeue" in header(continuation=continuation)
    lines = header(continuation="none")
    assert "#SBATCH --no-requeue" in lines
    assert "#SBATCH --requeue" not in lines


@pytest.mark.parametrize(
    "name", ["array", "output", "signal", "job_name", "--nodes", "wrap", "quiet"]
)
def test_options_of_the_platform_are_refused_with_the_key_to_use(name: str) -> None:
    (problem,) = options.problems(spec("/runs", sbatch={name: "x"}))
    assert problem.key == f"launch.sbatch.{name}"
    assert problem.hint


def test_all_bad_pass_through_options_are_listed_together() -> None:
    assert keys(
        comment="a\nrm -rf /",
        account="back\\slash",
        lead_s=70000.0,
        sbatch={"licences": "a:1", "wait": True, "begin": True, "network": "a\tb", "hold": True},
    ) == [
        "launch.account",
        "launch.comment",
        "launch.lead_s",
        "launch.sbatch.licences",
        "launch.sbatch.wait",
        "launch.sbatch.begin",
        "launch.sbatch.network",
    ]


def test_a_job_name_that_could_not_be_looked_up_is_refused() -> None:
    assert keys(job_name="lr=1,wd=2") == ["launch.job_name"]


def test_an_unknown_option_gets_the_nearest_name() -> None:
    (problem,) = options.problems(spec("/runs", sbatch={"licences": "a:1"}))
    assert problem.hint == "Did you mean licenses?"


def test_runs_share_an_array_only_where_the_script_is_the_same() -> None:
    base = spec("/runs")
    same = spec("/runs", seed=9)
    others = [
        spec("/runs", nodes=2),
        spec("/runs", comment="x"),
        spec("/runs", continuation="chain"),
        spec("/runs", cluster={"modules": ("cuda",)}),
        spec("/runs", lead_s=90.0),
        spec("/runs", job_name="other"),
    ]
    shape = options.shape(base, task(base).plan)
    assert options.shape(same, task(same).plan) == shape
    assert all(options.shape(other, task(other).plan) != shape for other in others)
