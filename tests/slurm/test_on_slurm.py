"""The slurm package against a real slurmctld, and once against a real slurmdbd."""

from collections.abc import Iterator

import pytest

from air_hpc.slurm import jobs, snapshot, version
from air_hpc.slurm.command import CommandFailure
from tests.slurm_cluster import DevCluster, why_no_cluster

pytestmark = pytest.mark.slurm


@pytest.fixture
def cluster(devcluster: DevCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[DevCluster]:
    monkeypatch.setenv("SLURM_CONF", str(devcluster.conf))
    yield devcluster
    devcluster.run(["scancel", "--user", "root"], check=False)
    devcluster.wait_until(lambda: not devcluster.run(["squeue", "-h"]).stdout, "no jobs")


def submit(cluster: DevCluster, *options: str, script: str = "sleep 60") -> str:
    return cluster.submit(script, "-o", "/dev/null", *options, user=None)


def test_the_snapshot_is_the_sites(cluster: DevCluster) -> None:
    site = snapshot.take(timeout_s=20)
    assert site.config.version == version.installed()
    assert site.user == "root"
    assert [partition.name for partition in site.partitions] == ["low", "high"]
    assert [node.name for node in site.nodes_of("low")] == [f"n{i}" for i in range(1, 9)]
    assert all(node.devices("h100") == 2 for node in site.nodes)
    assert site.associations is None


def test_one_question_for_all_jobs_and_elements(cluster: DevCluster) -> None:
    array = submit(cluster, "--array=0-2", "--hold", "--job-name=odd name=1|2")
    single = submit(cluster, "--hold")
    found = jobs.queue([array, single, "99999999"])
    assert set(found) == {f"{array}_0", f"{array}_1", f"{array}_2", single}
    assert found[f"{array}_1"].name == "odd name=1|2"
    assert jobs.queue(["99999999"]) == {}
    assert jobs.show_job("99999999") is None
    assert {job.id for job in jobs.find_by_name("odd name=1|2")} == set(found) - {single}
    assert jobs.find_by_name("odd name") == ()
    assert jobs.accounting([single]) is None


@pytest.mark.parametrize("name", [" a ", "it's", '"', "50%", "a|b", "ü ☃", "*", "x" * 200])
def test_a_job_is_found_by_any_name_without_a_comma(cluster: DevCluster, name: str) -> None:
    job = submit(cluster, "--hold", f"--job-name={name}-key")
    submit(cluster, "--hold", f"--job-name={name}-key2")
    assert [found.id for found in jobs.find_by_name(f"{name}-key")] == [job]


def test_an_element_is_requeued_alone_by_its_array_name(cluster: DevCluster) -> None:
    array = submit(cluster, "--array=0-1", "--requeue")
    names = [f"{array}_0", f"{array}_1"]
    cluster.wait_until(
        lambda: all(j.state == "RUNNING" for j in jobs.queue(names).values()), "both"
    )
    shown = [jobs.show_job(name) for name in names]
    assert array in {job.job_id for job in shown if job}, "no element has the array's own id"
    jobs.requeue(names[1])
    after = [jobs.show_job(name) for name in names]
    assert [job.restarts for job in after if job] == [0, 1]


def test_cancelling_what_has_ended_is_no_error(cluster: DevCluster) -> None:
    job = submit(cluster, script="true")
    cluster.wait_for_job(job, "COMPLETED")
    jobs.cancel([job])
    other = submit(cluster)
    jobs.cancel([job, other])
    cluster.wait_for_job(other, "CANCELLED")


def test_a_requeue_that_slurm_refuses_is_a_failure_with_its_words(cluster: DevCluster) -> None:
    job = submit(cluster, "--no-requeue")
    cluster.wait_for_job(job, "RUNNING")
    with pytest.raises(CommandFailure, match="disabled"):
        jobs.requeue(job)


def test_with_accounting_jobs_are_found_after_slurmctld_forgot_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if reason := why_no_cluster():
        pytest.skip(reason)
    with DevCluster() as own:
        own.up(nodes=2, accounting=True, settings={"MinJobAge": "2"})
        monkeypatch.setenv("SLURM_CONF", str(own.conf))
        site = snapshot.take(timeout_s=20)
        assert site.config.accounting
        assert site.associations
        assert "research" in {association.account for association in site.associations}
        assert site.default_account is not None
        job = submit(own, "--job-name=forgotten key", script="exit 4")
        own.wait_until(lambda: not jobs.queue([job]), "slurmctld to forget the job", 120)
        past = jobs.accounting([job])
        assert past is not None
        assert (past[job].state, past[job].exit_code) == ("FAILED", 4)
        assert [found.id for found in jobs.find_by_name("forgotten key")] == [job]
