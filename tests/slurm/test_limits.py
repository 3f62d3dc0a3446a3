from dataclasses import replace
from typing import Any

import pytest

from air_hpc.config.spec import ClusterSpec, LaunchSpec, RecoverySpec, RunSpec
from air_hpc.errors import Problem
from air_hpc.hardware.accelerator import AcceleratorSpec
from air_hpc.plan.make import make_plan
from air_hpc.slurm import limits, snapshot
from air_hpc.slurm.site import Snapshot
from tests.slurm import recorded

CPU = AcceleratorSpec(name="cpu", kind="cpu")
H100 = AcceleratorSpec(name="h100", kind="cuda")


@pytest.fixture
def site() -> Snapshot:
    return snapshot.parse(recorded.texts("22.05.8"), taken_at=1.0)


def changed(site: Snapshot, partition: str, **values: Any) -> Snapshot:
    parts = tuple(replace(p, **values) if p.name == partition else p for p in site.partitions)
    return replace(site, partitions=parts)


def check(site: Snapshot, accelerator: AcceleratorSpec = CPU, **launch: Any) -> list[Problem]:
    lead = launch.pop("lead_s", 60.0)
    spec = RunSpec(
        accelerator=accelerator,
        cluster=ClusterSpec(grace_s=launch.pop("grace_s", 15.0)),
        launch=replace(LaunchSpec(time_limit_min=30, continuation="chain"), **launch),
    )
    plan, problems = make_plan(RunSpec())
    assert plan is not None, problems
    plan = replace(
        plan, nodes=spec.launch.nodes, devices_per_node=spec.launch.devices_per_node, lead_s=lead
    )
    return limits.check(spec, plan, site)


def with_spares(site: Snapshot, nodes: int, spares: int) -> list[Problem]:
    spec = RunSpec(
        accelerator=CPU,
        cluster=ClusterSpec(grace_s=15.0),
        launch=LaunchSpec(nodes=nodes, time_limit_min=30, continuation="chain"),
        recovery=RecoverySpec(restart="spare", spare_nodes=spares),
    )
    plan, problems = make_plan(RunSpec())
    assert plan is not None, problems
    return limits.check(spec, replace(plan, nodes=nodes, lead_s=60.0), site)


def test_spares_count_against_the_partition(site: Snapshot) -> None:
    assert with_spares(site, 3, 1) == []
    (found,) = with_spares(site, 3, 2)
    assert (found.key, found.value, found.allowed) == ("recovery.spare_nodes", "2", "at most 1")
    (found,) = with_spares(site, 3, 4)
    assert "the spares would leave no node to train on" in found.message
    (found,) = with_spares(site, 9, 1)
    assert (found.key, found.allowed) == ("launch.nodes", "at most 3")


def keys(problems: list[Problem]) -> list[str]:
    return [problem.key + ("?" if problem.warning else "") for problem in problems]


def test_a_job_that_fits_has_no_problem(site: Snapshot) -> None:
    assert check(site, H100, nodes=4, devices_per_node=2, cpus_per_device=4, mem="64G") == []


def test_every_problem_is_found_in_one_pass(site: Snapshot) -> None:
    found = check(
        site, H100, nodes=2, partition="lov", account="reserch", qos="limitd", time_limit_min=1
    )
    assert keys(found) == ["launch.partition", "launch.account", "launch.qos", "launch.lead_s"]
    assert found[0].allowed == "low, high"
    assert found[0].hint == "Did you mean low?"
    assert found[1].hint == "Did you mean research?"
    assert found[2].hint == "Did you mean limited?"


@pytest.mark.parametrize(
    ("launch", "key", "allowed"),
    [
        ({"nodes": 9}, "launch.nodes", "at most 4"),
        ({"devices_per_node": 4}, "launch.devices_per_node", "nodes have up to 2 gpus"),
        ({"gres_type": "a100"}, "launch.gres_type", "h100"),
        ({"cpus_per_device": 9}, "launch.cpus_per_device", "nodes have up to 8 CPUs"),
        ({"mem": "65G"}, "launch.mem", "nodes have up to 65536M"),
    ],
)
def test_a_size_that_no_node_has_is_an_error(
    site: Snapshot, launch: dict[str, Any], key: str, allowed: str
) -> None:
    found = check(site, H100, **launch)
    assert key in keys(found)
    assert next(p for p in found if p.key == key).allowed == allowed


def test_too_many_nodes_do_not_hide_what_no_node_has(site: Snapshot) -> None:
    found = check(site, H100, nodes=9, devices_per_node=4)
    assert keys(found) == ["launch.nodes", "launch.devices_per_node"]
    assert keys(check(site, H100, nodes=9)) == ["launch.nodes"]


def test_all_of_a_nodes_memory_may_be_asked_for(site: Snapshot) -> None:
    assert check(site, mem="0") == []


def test_devices_are_not_asked_for_on_a_cpu(site: Snapshot) -> None:
    assert check(site, CPU, devices_per_node=16) == []
    assert keys(check(site, CPU, devices_per_node=16, gpus="gres")) == ["launch.devices_per_node"]
    assert check(site, H100, devices_per_node=16, gpus="none") == []


def test_nodes_beyond_what_the_partition_gives_one_job(site: Snapshot) -> None:
    found = check(changed(site, "low", max_nodes=2), nodes=3)
    assert keys(found) == ["launch.nodes"]
    assert "gives one job" in found[0].message


def test_a_time_limit_above_the_partitions(site: Snapshot) -> None:
    found = check(changed(site, "low", max_time_min=20))
    assert keys(found) == ["launch.time_limit_min"]
    assert found[0].allowed == "at most 20 minutes"
    assert "partition low" in found[0].message


def test_a_qos_time_limit_holds_and_may_override_the_partitions(site: Snapshot) -> None:
    qos = tuple(replace(q, max_wall_min=25) for q in site.qos or ())
    assert keys(check(replace(site, qos=qos))) == ["launch.time_limit_min"]
    free = tuple(replace(q, flags=("PartitionTimeLimit",)) for q in site.qos or ())
    assert check(changed(replace(site, qos=free), "low", max_time_min=20)) == []


def test_the_lead_must_fit_the_limit_in_force(site: Snapshot) -> None:
    assert keys(check(site, lead_s=1800)) == ["launch.lead_s"]
    assert keys(check(site, lead_s=1799)) == []
    # Without a limit of its own the job gets the partition's default, an hour.
    assert keys(check(site, time_limit_min=None, lead_s=3600)) == ["launch.lead_s"]


def test_a_partition_for_others(site: Snapshot) -> None:
    assert keys(check(changed(site, "low", allow_groups=("staff",)))) == ["launch.partition"]
    assert keys(check(changed(site, "low", allow_accounts=("other",)))) == ["launch.account"]
    assert keys(check(changed(site, "low", deny_accounts=("research",)))) == ["launch.account"]
    assert keys(check(changed(site, "low", allow_qos=("limited",)))) == ["launch.qos"]
    assert check(changed(site, "low", allow_groups=("airhpc",))) == []


def test_what_makes_it_wait_is_a_warning(site: Snapshot) -> None:
    assert keys(check(changed(site, "low", state="DOWN"))) == ["launch.partition?"]
    assert keys(check(changed(site, "low", state="INACTIVE"))) == ["launch.partition"]
    drained = tuple(replace(n, states=("idle", "drain")) for n in site.nodes[:2]) + site.nodes[2:]
    assert check(replace(site, nodes=drained), nodes=2) == []
    assert keys(check(replace(site, nodes=drained), nodes=3)) == ["launch.nodes?"]


def test_an_unknown_account_is_an_error_only_where_accounts_are_enforced(site: Snapshot) -> None:
    assert keys(check(site, account="nosuch")) == ["launch.account"]
    lax = replace(site, config=replace(site.config, accounting_enforce=()))
    assert keys(check(lax, account="nosuch")) == ["launch.account?"]
    none = replace(site, associations=(), default_account=None)
    assert keys(check(none)) == ["launch.account"]


def test_without_accounting_nothing_is_invented(site: Snapshot) -> None:
    unknown = replace(site, associations=None, qos=None, default_account=None)
    assert check(unknown, account="anything", qos="anything") == []


def test_a_site_that_does_not_requeue_by_default_is_a_warning(site: Snapshot) -> None:
    # Seen: a job submitted with --requeue may be requeued under JobRequeue=0.
    assert keys(check(site, continuation="requeue")) == ["launch.continuation?"]


def test_a_grace_that_the_site_does_not_leave_is_a_warning(site: Snapshot) -> None:
    (problem,) = check(site, grace_s=15.5)
    assert (problem.key, problem.allowed, problem.warning) == (
        "cluster.grace_s",
        "at most 15",
        True,
    )
    # Nobody preempts the jobs of this one.
    assert check(site, grace_s=600.0, partition="high") == []
