from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from air_hpc.checkpoint.loader import NoUsableCheckpoint
from air_hpc.checkpoint.saver import SavesFail
from air_hpc.data.shards import ShardUnreadable
from air_hpc.errors import BadInput, EnvironmentFailure
from air_hpc.parallel.failures import CollectiveFailed
from air_hpc.parallel.world import RanksMissing
from air_hpc.probes.ranks import DeviceUnfit, LinkUnfit
from air_hpc.rundir.commit import CheckpointUnreadable
from air_hpc.rundir.fence import Fenced
from air_hpc.rundir.words import FailureClass
from air_hpc.train.guard import LossDiverged
from air_hpc.train.main import own_class
from air_hpc.train.setup import torch_warning


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Fenced("x"), FailureClass.FENCED),
        (SavesFail("x"), FailureClass.STORAGE),
        (LossDiverged("x", {}), FailureClass.DIVERGED),
        (CheckpointUnreadable("x"), FailureClass.STORAGE),
        (NoUsableCheckpoint("x"), FailureClass.CHECKPOINT),
        (BadInput.single("a", 1, "x"), FailureClass.USER_ERROR),
        (EnvironmentFailure("x"), FailureClass.ENVIRONMENT),
        (RanksMissing("rank 1 of 2 could not join the others"), FailureClass.NETWORK),
        (DeviceUnfit("pre-flight: matmul: 1 TFLOP/s, the median of 8 is 4"), FailureClass.DEVICE),
        (LinkUnfit("pre-flight: all_reduce_node: 90 ms"), FailureClass.NETWORK),
        (ShardUnreadable("x"), FailureClass.DATA),
        (CollectiveFailed(0, "n1", None, "NCCL error"), None),
        (OSError(errno.ENOSPC, "No space left on device"), None),
        (TypeError("forward() missing 1 argument"), None),
    ],
)  # fmt: skip
def test_an_error_of_our_own_has_a_class_and_others_leave_it_to_the_table(
    error: BaseException, expected: FailureClass | None
) -> None:
    assert own_class(error) is expected


def test_a_torch_outside_the_tested_range_is_said() -> None:
    assert torch_warning("2.13.0+cpu") is None
    assert torch_warning("2.13.4") is None
    for version in ("2.1.3", "2.130.0", "2.14.0a0+git1", "3.0.0"):
        assert version in (torch_warning(version) or "")


def test_a_missing_torch_is_told_as_the_environments_fault() -> None:
    # The classifier once imported torch itself, so the worker left "without a word".
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from air_hpc.train.main import _import_torch, own_class\n"
        "try: _import_torch()\n"
        "except Exception as error: print(own_class(error).value, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{FailureClass.ENVIRONMENT.value} torch cannot be imported")
