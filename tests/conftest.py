"""Fixtures that more than one folder of tests uses."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.slurm_cluster import DevCluster, why_no_cluster

# Machines are shared, so no example of a property is timed. CI tries the same examples each time.
settings.register_profile(
    "untimed",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def devcluster_session() -> Iterator[DevCluster]:
    """The one cluster that `devcluster` hands to each test."""
    if reason := why_no_cluster():
        pytest.skip(reason)
    with DevCluster() as cluster:
        yield cluster.up(nodes=8, devices_per_node=2)


@pytest.fixture
def devcluster(devcluster_session: DevCluster) -> Iterator[DevCluster]:
    """A real Slurm of 8 nodes with 2 fake GPUs each; the whole session shares it.

    Before and after each test it has no job, and all nodes are idle.
    """
    yield devcluster_session
    devcluster_session.clean()
