"""Fixtures that more than one folder of tests uses."""

from collections.abc import Iterator

import pytest

from tests.slurm_cluster import DevCluster, why_no_cluster


@pytest.fixture(scope="session")
def devcluster() -> Iterator[DevCluster]:
    """A real Slurm of 8 nodes with 2 fake GPUs each, shared by the whole session.

    A test leaves it as it found it: its jobs cancelled, its nodes revived.
    """
    if reason := why_no_cluster():
        pytest.skip(reason)
    with DevCluster() as cluster:
        yield cluster.up(nodes=8, devices_per_node=2)
