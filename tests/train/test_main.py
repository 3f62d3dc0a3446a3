from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from air_hpc.checkpoint.loader import NoUsableCheckpoint
from air_hpc.checkpoint.saver import SavesFail
from air_hpc.errors import BadInput, EnvironmentFailure
from air_hpc.parallel.world import RanksMissing
from air_hpc.probes.ranks import DeviceUnfit, LinkUnfit
from air_hpc.rundir.commit import CheckpointUnreadable
from air_hpc.rundir.fence import Fenced
from air_hpc.rundir.words import FailureClass
from air_hpc.train.guard import LossDiverged
from air_hpc.train.main import classify
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
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), FailureClass.NETWORK),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), FailureClass.NETWORK),
        (OSError(errno.ENOSPC, "No space left on device"), FailureClass.STORAGE),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), FailureClass.STORAGE),
        (FileNotFoundError(errno.ENOENT, "x"), FailureClass.ENVIRONMENT),
        (MemoryError(), FailureClass.HOST_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
         FailureClass.HOST_MEMORY),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), FailureClass.DEVICE_MEMORY),
        (RuntimeError("CUDA error: an illegal memory access"), FailureClass.DEVICE),
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]"),
         FailureClass.NETWORK),
        (RuntimeError("[unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation"),
         FailureClass.NETWORK),
        (TypeError("forward() missing 1 argument"), FailureClass.USER_ERROR),
        (RuntimeError("something else"), FailureClass.UNKNOWN),
    ],
)  # fmt: skip
def test_an_exception_speaks_for_a_failure_class(
    error: BaseException, expected: FailureClass
) -> None:
    assert classify(error) is expected


def test_a_torch_outside_the_tested_range_is_said() -> None:
    assert torch_warning("2.13.0+cpu") is None
    assert torch_warning("2.13.4") is None
    for version in ("2.1.3", "2.130.0", "2.14.0a0+git1", "3.0.0"):
        assert version in (torch_warning(version) or "")


def test_a_missing_torch_is_told_as_the_environments_fault() -> None:
    # The classifier once imported torch itself, so the worker left "without a word".
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from air_hpc.train.main import _import_torch, classify\n"
        "try: _import_torch()\n"
        "except Exception as error: print(classify(error).value, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{FailureClass.ENVIRONMENT.value} torch cannot be imported")
