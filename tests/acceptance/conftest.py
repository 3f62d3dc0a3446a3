"""Fixtures of the acceptance tests."""

import pytest

from air_hpc.rundir.layout import list_runs
from tests.acceptance.runs import SHORT, SMALL, air_hpc, losses


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of an undisturbed run of the same world size, on this machine."""
    return undisturbed(tmp_path_factory, *SMALL, "launch.devices_per_node=4")


@pytest.fixture(scope="session")
def short_reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The same of a short run of two workers."""
    return undisturbed(tmp_path_factory, *SHORT, "launch.devices_per_node=2")


def undisturbed(factory: pytest.TempPathFactory, *words: str) -> dict[int, float]:
    """The losses of a run on this machine alone that nothing happens to."""
    runs_dir = factory.mktemp("reference")
    air_hpc(*words, f"runs_dir={runs_dir}", "tracking.uri=null")
    (run,) = list_runs(runs_dir)
    return losses(run)
