"""What a run on this machine needs of it, asked before anything is made for the run."""

from __future__ import annotations

import importlib.util
import sys

import psutil

from air_hpc.config.spec import ClusterSpec, RunSpec
from air_hpc.errors import EnvironmentFailure, Problem
from air_hpc.launch import script
from air_hpc.plan.types import Plan


def memory_problems(spec: RunSpec, plan: Plan) -> list[Problem]:
    """A run on CPUs whose state alone is more than this machine's memory and swap together.

    Activations are left out: what is refused here could not run in any case.
    """
    if spec.accelerator.kind != "cpu":
        return []
    part = plan.memory_per_rank
    needed = part.weights_bytes + part.gradients_bytes + part.optimizer_bytes
    needed *= plan.devices_per_node
    present = psutil.virtual_memory().total + psutil.swap_memory().total
    if needed <= present:
        return []
    message = (
        f"its weights, gradients and optimizer state take {needed / 2**30:.1f} GiB here, "
        f"this machine has {present / 2**30:.1f} GiB"
    )
    hint = "Choose a smaller model, or submit it to a cluster: cluster=slurm"
    return [Problem("model", spec.model.name, message, hint=hint)]


def require_torch(cluster: ClusterSpec) -> None:
    """Refuse a run here that this Python could not train, before anything is made for it.

    Another interpreter than this one (`cluster.python`, `cluster.venv`) is not asked: its worker
    says what it lacks. Nothing is imported. Raises EnvironmentFailure.
    """
    python = script.interpreter(cluster)
    if python == sys.executable and importlib.util.find_spec("torch") is None:
        raise EnvironmentFailure(
            "a run on this machine trains with torch, and it is not installed",
            tried=python,
            next_step="install the project with its extra `train` (pip install '.[train,tracking]' "
            "in its folder; tools/demo does it), or set cluster.python or cluster.venv to an "
            "environment that has torch",
        )
