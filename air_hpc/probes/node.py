"""The node's own checks, in a process of their own: `python -m air_hpc.probes.node ASKED`.

It prints one JSON line for each thing it does, as it does it, so that whoever reads them (`run`)
knows at any moment what has been found and which check has not come back:

    {"begun": NAME}      this check is made now
    {"check": {...}}     what it said (probes.result.Check)
    {"devices": [...]}   the devices that the job may use on this node (probes.devices.Device)
    {"done": true}       all was asked

It may be killed at any moment. It imports no torch, and NVML only for `group` "gpu".
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from air_hpc.probes.devices import (
    DeviceLost,
    NvmlUnavailable,
    bind,
    open_nvml,
    visible_names,
)
from air_hpc.probes.gpu import GPU_CHECKS, GpuAsked, Node, check_devices
from air_hpc.probes.host import HOST_CHECKS, HostAsked
from air_hpc.probes.result import Check, nothing_to_say

NVML = "nvml"
"""The name under which the library itself is opened."""
BINDING_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "SLURM_JOB_GPUS",
    "SLURM_STEP_GPUS",
)

Emit = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Asked:
    """One group of checks: `host` or `gpu`. Without `checks` only the devices are described."""

    group: Literal["host", "gpu"]
    host: HostAsked
    gpu: GpuAsked
    checks: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The checks of the group, in the order they are made."""
        if self.group == "host":
            return tuple(HOST_CHECKS)
        return (NVML, *GPU_CHECKS) if self.checks else (NVML,)

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read back `to_json`."""
        body = json.loads(text)
        return cls(
            body["group"], HostAsked(**body["host"]), GpuAsked(**body["gpu"]), body["checks"]
        )


def make_checks(asked: Asked, emit: Emit) -> None:
    """Make every check of the group, telling each as it begins and as it ends."""
    if asked.group == "host":
        for name, host_check in HOST_CHECKS.items():
            _one(name, emit, lambda check=host_check: check(asked.host))  # type: ignore[misc]
    else:
        _gpu_checks(asked, emit)
    emit({"done": True})


def _gpu_checks(asked: Asked, emit: Emit) -> None:
    emit({"begun": NVML})
    began = time.monotonic()
    names = visible_names(asked.gpu.variables)
    try:
        with open_nvml() as nvml:
            described = nvml.devices()
            binding = bind(names, described)
            emit({"devices": [asdict(device) for device in binding.devices]})
            took = round(time.monotonic() - began, 3)
            emit({"check": Check(NVML, True, len(described), seconds=took).to_json()})
            node = Node(nvml, binding, asked.gpu, tuple(described))
            for name, gpu_check in GPU_CHECKS.items() if asked.checks else ():
                _one(name, emit, lambda check=gpu_check: check(node))  # type: ignore[misc]
    except NvmlUnavailable as unavailable:
        binding = bind(names, ())
        emit({"devices": [asdict(device) for device in binding.devices]})
        broken = False if unavailable.broken else None
        emit({"check": Check(NVML, broken, said=str(unavailable)).to_json()})
        if asked.checks and names is not None:
            emit({"check": check_devices(binding, asked.gpu).to_json()})


def _one(name: str, emit: Emit, make: Callable[[], Check]) -> None:
    emit({"begun": name})
    began = time.monotonic()
    try:
        check = make()
    except DeviceLost as lost:
        check = Check(name, False, said=str(lost))
    except Exception as error:  # a check that is wrong must not cost a node
        check = nothing_to_say(name, f"{type(error).__name__}: {error}")
    took = round(time.monotonic() - began, 3)
    emit({"check": {**check.to_json(), "seconds": took}})


def main() -> int:
    """Print the checks that the argument asks for."""

    def emit(line: Mapping[str, Any]) -> None:
        print(json.dumps(line), flush=True)

    make_checks(Asked.from_json(sys.argv[1]), emit)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
