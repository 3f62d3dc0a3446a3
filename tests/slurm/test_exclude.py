from __future__ import annotations

from dataclasses import replace

import pytest

from air_hpc.config.spec import LaunchSpec, RecoverySpec, RunSpec
from air_hpc.hardware.accelerator import AcceleratorSpec
from air_hpc.plan.make import make_plan
from air_hpc.plan.types import Plan
from air_hpc.rundir.exclusions import Exclusion
from air_hpc.slurm import snapshot
from air_hpc.slurm.exclude import avoided, exclude_option, serving_nodes
from air_hpc.slurm.site import Snapshot
from tests.slurm import recorded


@pytest.fixture
def site() -> Snapshot:
    return snapshot.parse(recorded.texts("22.05.8"), taken_at=1.0)


def run(**launch: object) -> tuple[RunSpec, Plan]:
    spec = RunSpec(
        launch=replace(LaunchSpec(), **launch),  # type: ignore[arg-type]
        accelerator=AcceleratorSpec(name="cpu", kind="cpu"),
    )
    plan, problems = make_plan(RunSpec())
    assert plan is not None, problems
    return spec, replace(plan, devices_per_node=spec.launch.devices_per_node)


def bad(*nodes: str) -> list[Exclusion]:
    return [Exclusion(node, 0.0, 100.0, "hang") for node in nodes]


def test_the_users_own_list_and_the_platforms_are_one(site: Snapshot) -> None:
    spec, plan = run(sbatch={"exclude": "n4"})
    assert exclude_option(spec, plan, site, bad("n1", "n4"), 1.0) == "n[1,4]"
    assert exclude_option(spec, plan, site, [], 1.0) == "n4"
    assert exclude_option(*run(), site, [], 1.0) == ""


def test_the_users_own_list_counts_against_the_room(site: Snapshot) -> None:
    nodes = len(serving_nodes(*run(), site) or {})
    assert nodes == 4
    assert avoided(*run(nodes=2), site, bad("n1", "n2"), 1.0) == ("n1", "n2")
    own, plan = run(nodes=2, sbatch={"exclude": "n[3]"})
    assert avoided(own, plan, site, bad("n1", "n2"), 1.0) == ("n2",)


def test_spares_count_among_the_nodes_that_a_run_needs(site: Snapshot) -> None:
    spec, plan = run(nodes=2)
    spares = replace(spec, recovery=RecoverySpec(restart="spare", spare_nodes=1))
    assert avoided(spares, plan, site, bad("n1", "n2"), 1.0) == ("n2",)


def test_nodes_that_could_not_serve_the_run_are_no_room(site: Snapshot) -> None:
    assert serving_nodes(*run(cpus_per_device=10_000), site) == {}
    assert avoided(*run(cpus_per_device=10_000), site, bad("n1"), 1.0) == ()


def test_the_nodes_of_several_partitions_count_together(site: Snapshot) -> None:
    assert serving_nodes(*run(partition="low,high"), site) == serving_nodes(*run(), site)
    assert avoided(*run(partition="low,high"), site, bad("n1", "x9"), 1.0) == ("n1",)


def test_where_no_partition_is_known_only_the_cap_holds(site: Snapshot) -> None:
    assert serving_nodes(*run(partition="lov"), site) is None
    assert avoided(*run(partition="lov"), site, bad("n1"), 1.0) == ("n1",)
    assert avoided(*run(), None, bad("n1"), 1.0) == ("n1",)


def test_a_run_may_go_without(site: Snapshot) -> None:
    spec, plan = run()
    off = replace(spec.recovery.exclusion, enabled=False)
    spec = replace(spec, recovery=replace(spec.recovery, exclusion=off))
    assert exclude_option(spec, plan, site, bad("n1"), 1.0) == ""
