"""What NVML tells of the devices bound to the job, and whether they are fit to train on.

One check a kind of trouble, over all bound devices: `value` is the worst device's, `said` names
every device that fails. What NVML does not support is left out; a device that it no longer reaches
fails every check that needs it. Sources: the NVML API reference, and NVIDIA's "GPU Memory Error
Management" (uncorrected errors, row remapping, page retirement). Tested with a stand-in for the
library; not measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from air_hpc.probes.devices import Binding, Device, DeviceLost, Nvml, board_of
from air_hpc.probes.result import Check, nothing_to_say

_THROTTLES = {0x08: "hardware slowdown", 0x40: "hardware thermal", 0x80: "power brake"}
"""nvmlClocksEventReason*: the board itself slows down, for heat or for power."""
_RECOVERY_ACTION_FIELD = 230
_ACTIONS = {1: "a GPU reset", 2: "a reboot", 3: "draining", 4: "draining and a reset"}


@dataclass(frozen=True)
class GpuAsked:
    """What the checks need to know. Floors as in config.spec.PreflightSpec.

    `workers` is how many devices this node needs, `variables` what Slurm and CUDA said of the
    binding.
    """

    workers: int
    variables: Mapping[str, str]
    max_used_device_memory_bytes: int | None
    max_ecc_uncorrected: int | None


@dataclass(frozen=True)
class Node:
    """The devices under test and the library that tells of them, which `described` all it has."""

    nvml: Nvml
    binding: Binding
    asked: GpuAsked
    described: tuple[Device, ...] = ()


@dataclass
class _Findings:
    """Gathers one check over the devices: the worst value, and what fails where."""

    worst: float | None = None
    told: int = 0
    failed: list[str] | None = None

    def saw(self, value: float | None) -> None:
        if value is not None:
            self.told += 1
            self.worst = value if self.worst is None else max(self.worst, value)

    def fail(self, device: Device, why: str) -> None:
        self.failed = [*(self.failed or []), f"{device.label}: {why}"]

    def check(self, name: str, floor: float | None = None, unit: str = "", said: str = "") -> Check:
        if self.failed:
            return Check(name, False, self.worst, floor, unit, "; ".join(self.failed))
        if not self.told:
            return nothing_to_say(name, "NVML does not tell")
        return Check(name, True, self.worst, floor, unit, said)


def check_devices(binding: Binding, asked: GpuAsked) -> Check:
    """As many devices bound as workers are to start, each there once and within reach.

    Workers that found fewer would share one, and die in their first collective.
    """
    count = len(binding.devices)
    wrong = [binding.problem] if binding.problem else []
    wrong += [f"{device.label} is lost" for device in binding.devices if device.model == "lost"]
    if count < asked.workers:
        wrong.append(f"devices bound to the job: {count}, workers that need one: {asked.workers}")
    if not wrong:
        models = ", ".join(sorted({device.model for device in binding.devices}))
        return Check("devices", True, count, asked.workers, said=models)
    words = [f"{name}={value}" for name, value in sorted(asked.variables.items())]
    wrong.append(", ".join(words) or "no variable binds devices")
    return Check("devices", False, count, asked.workers, said="; ".join(wrong))


def check_driver(node: Node) -> Check:
    """The driver's version: told, so that nodes can be compared."""
    version = node.nvml.ask("nvmlSystemGetDriverVersion")
    if version is None:
        return nothing_to_say("driver", "NVML does not tell")
    text = version.decode() if isinstance(version, bytes) else str(version)
    return Check("driver", True, text)


def check_mig(node: Node) -> Check:
    """No whole GPU is bound that is divided: CUDA would see nothing, or one instance of it."""
    found = _Findings()
    for gpu in _each(node, found):
        mode = gpu.ask("nvmlDeviceGetMigMode")
        if not mode:
            found.saw(None if mode is None else 0)
            continue
        found.saw(float(mode[0]))
        if mode[0] and gpu.device.parent is None:
            instances = len(node.nvml.instances(gpu.handle))
            found.fail(gpu.device, f"MIG is on ({instances} instances), and the whole GPU is bound")
    parts = [device for device in node.binding.devices if device.parent is not None]
    if parts and node.asked.workers > 1:
        why = f"{node.asked.workers} workers, and CUDA gives a process one MIG instance at most"
        found.fail(parts[0], why)
    return found.check("mig", said="no divided GPU is bound whole")


def check_ecc(node: Node) -> Check:
    """Uncorrected memory errors since the driver was loaded, and repairs that did not succeed or
    wait for a reset; also what the driver itself asks for (GPU recovery action)."""
    limit = node.asked.max_ecc_uncorrected
    found, since_new = _Findings(), 0
    for gpu in _each(node, found):
        count = _ecc(gpu, "NVML_VOLATILE_ECC", 0)
        since_new = max(since_new, _ecc(gpu, "NVML_AGGREGATE_ECC", 1) or 0)
        found.saw(count)
        if count and limit is not None and count > limit:
            found.fail(gpu.device, f"{count} uncorrected memory errors since the driver was loaded")
        for why in _repairs(gpu):
            found.fail(gpu.device, why)
    return found.check("ecc", limit, "errors", f"{since_new} in the life of the worst device")


def check_clocks(node: Node) -> Check:
    """No device that its own board slows down. `value`: the share of the highest SM clock that the
    slowest device runs at now, which is low while idle and so has no floor."""
    found, slowest = _Findings(), 1.0
    for gpu in _each(node, found):
        reasons = gpu.ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = gpu.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        sm = gpu.constant("NVML_CLOCK_SM", 1)
        now = gpu.ask("nvmlDeviceGetClockInfo", sm)
        most = gpu.ask("nvmlDeviceGetMaxClockInfo", sm)
        if now is not None and most:
            slowest = min(slowest, now / most)
            found.saw(1.0)
        if reasons is not None:
            found.saw(1.0)
            why = [words for bit, words in _THROTTLES.items() if reasons & bit]
            if why:
                found.fail(gpu.device, f"slowed down by its board: {', '.join(why)}")
    found.worst = None if found.worst is None else round(slowest, 3)
    return found.check("clocks", unit="of the highest clock")


def check_memory(node: Node) -> Check:
    """Device memory that others hold: before the workers start, none is ours."""
    limit = node.asked.max_used_device_memory_bytes
    found = _Findings()
    for gpu in _each(node, found, whole=False):
        memory = gpu.ask("nvmlDeviceGetMemoryInfo")
        if memory is None:
            continue
        found.saw(int(memory.used))
        if limit is not None and memory.used > limit:
            running = gpu.ask("nvmlDeviceGetComputeRunningProcesses") or []
            pids = ", ".join(str(process.pid) for process in running[:8]) or "not told"
            used, most = memory.used / 2**30, limit / 2**30
            why = f"{used:.1f} GiB are in use before the start, at most {most:.1f} may be"
            found.fail(gpu.device, f"{why} (processes: {pids})")
    return found.check("device_memory", limit, "bytes")


def check_temperature(node: Node) -> Check:
    """No device as hot as where it slows itself down."""
    found, floor = _Findings(), None
    for gpu in _each(node, found):
        sensor = gpu.constant("NVML_TEMPERATURE_GPU", 0)
        degrees = gpu.ask("nvmlDeviceGetTemperature", sensor)
        threshold = gpu.constant("NVML_TEMPERATURE_THRESHOLD_SLOWDOWN", 1)
        limit = gpu.ask("nvmlDeviceGetTemperatureThreshold", threshold)
        found.saw(degrees)
        if limit:
            floor = limit if floor is None else min(floor, limit)
        if degrees is not None and limit and degrees >= limit:
            found.fail(gpu.device, f"{degrees} °C, it slows down at {limit} °C")
    return found.check("temperature", floor, "°C")


GPU_CHECKS: dict[str, Callable[[Node], Check]] = {
    "devices": lambda node: check_devices(node.binding, node.asked),
    "driver": check_driver,
    "mig": check_mig,
    "ecc": check_ecc,
    "clocks": check_clocks,
    "device_memory": check_memory,
    "temperature": check_temperature,
}


@dataclass(frozen=True)
class _Open:
    """A device within reach."""

    nvml: Nvml
    device: Device
    handle: Any

    def ask(self, function: str, *arguments: Any) -> Any:
        """As Nvml.ask, of this device; raises DeviceLost with its name."""
        try:
            return self.nvml.ask(function, self.handle, *arguments)
        except DeviceLost as lost:
            raise DeviceLost(f"{self.device.label}: {lost}") from None

    def constant(self, name: str, otherwise: int) -> int:
        return self.nvml.constant(name, otherwise)


def _each(node: Node, found: _Findings, *, whole: bool = True) -> Iterator[_Open]:
    """The devices within reach; one that is lost fails the check. Of a MIG instance the whole GPU
    is asked, unless what is asked for is the instance's own."""
    for device in node.binding.devices:
        try:
            handle = node.nvml.handle(board_of(device, node.described) if whole else device)
        except DeviceLost as lost:
            found.fail(device, str(lost))
            continue
        if handle is not None:
            yield _Open(node.nvml, device, handle)


def _ecc(gpu: _Open, counter: str, number: int) -> int | None:
    kind = gpu.constant("NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1)
    count = gpu.ask("nvmlDeviceGetTotalEccErrors", kind, gpu.constant(counter, number))
    return None if count is None else int(count)


def _repairs(gpu: _Open) -> Iterator[str]:
    rows = gpu.ask("nvmlDeviceGetRemappedRows")
    if rows is not None:
        _, _, pending, failed = rows
        if failed:
            yield "a faulty memory row could not be remapped"
        elif pending:
            yield "a faulty memory row waits for a reset to be remapped"
    if gpu.ask("nvmlDeviceGetRetiredPagesPendingStatus"):
        yield "a faulty memory page waits for a reset to be retired"
    field = gpu.constant("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", _RECOVERY_ACTION_FIELD)
    values = gpu.ask("nvmlDeviceGetFieldValues", [field])
    if values and not values[0].nvmlReturn and values[0].value.uiVal:
        number = int(values[0].value.uiVal)
        yield f"the driver asks for {_ACTIONS.get(number, f'recovery action {number}')}"
