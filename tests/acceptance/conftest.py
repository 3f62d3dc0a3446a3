"""Fixtures of the acceptance tests."""

import pytest

from air_hpc.rundir.layout import list_runs
from tests.acceptance.runs import SMALL, air_hpc, losses


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of an undisturbed run of the same world size, on this machine."""
    runs_dir = tmp_path_factory.mktemp("reference")
    air_hpc(*SMALL, "launch.devices_per_node=4", f"runs_dir={runs_dir}", "tracking.uri=null")
    (run,) = list_runs(runs_dir)
    return losses(run)
