"""The accelerators of this node and which of them Slurm bound to the job.

NVML (the library behind nvidia-smi, through `nvidia-ml-py`) is asked, never nvidia-smi: it is
imported late, every call may be missing or refused, and any of them may hang where the driver does.
So whoever must not hang asks from a process of its own (`air_hpc.probes.node`).

The binding is read as CUDA reads CUDA_VISIBLE_DEVICES (CUDA C++ Programming Guide, environment
variables): indices or UUIDs, a UUID may be cut short as long as it is unique, and what comes after
the first entry that names no device is not visible. Not measured on a GPU: no test has had one.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from air_hpc.errors import AirHpcError


class NvmlUnavailable(AirHpcError):
    """NVML cannot be asked here: `broken` where that speaks against the node's driver."""

    def __init__(self, message: str, *, broken: bool = False) -> None:
        super().__init__(message)
        self.broken = broken


class DeviceLost(AirHpcError):
    """The driver no longer reaches a device, or wants it reset before anything else."""


@dataclass(frozen=True)
class Device:
    """One accelerator bound to this job on this node.

    `index` is NVML's (the order of the PCI bus), `parent` the index of the GPU that a MIG instance
    is a part of. What is not known is None.
    """

    model: str
    memory_bytes: int | None
    uuid: str | None = None
    index: int | None = None
    parent: int | None = None

    def to_json(self) -> dict[str, Any]:
        """For the hello message."""
        return {"model": self.model, "memory_bytes": self.memory_bytes, "uuid": self.uuid}

    @property
    def label(self) -> str:
        """How a line for people calls it."""
        where = "GPU ?" if self.index is None else f"GPU {self.index}"
        if self.parent is not None:
            where = f"MIG instance of GPU {self.parent}"
        return where if self.uuid is None else f"{where} ({self.uuid})"


@dataclass(frozen=True)
class Binding:
    """The devices that the job may use; `problem` says what is wrong with the binding itself."""

    devices: tuple[Device, ...]
    problem: str = ""


class Nvml:
    """NVML with every call guarded. Made by `open_nvml`."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def ask(self, function: str, *arguments: Any) -> Any:
        """What a function of NVML answers; None where it does not exist, or is not supported.

        Raises DeviceLost where NVML says that the device is lost or must be reset.
        """
        call = getattr(self.module, function, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except self.module.NVMLError as error:
            if getattr(error, "value", None) in (
                self.constant("NVML_ERROR_GPU_IS_LOST", 15),
                self.constant("NVML_ERROR_RESET_REQUIRED", 16),
            ):
                raise DeviceLost(str(error)) from None
            return None

    def constant(self, name: str, otherwise: int) -> int:
        """A constant of the binding, or its value in nvml.h where the binding is too old."""
        return int(getattr(self.module, name, otherwise))

    def devices(self) -> list[Device]:
        """Every GPU that NVML lists, each followed by its MIG instances.

        A device that cannot be reached is in the list, with the model `lost`.
        """
        found: list[Device] = []
        for index in range(int(self.ask("nvmlDeviceGetCount") or 0)):
            try:
                handle = self.ask("nvmlDeviceGetHandleByIndex", index)
                found.append(replace(self._describe(handle), index=index))
            except DeviceLost:
                found.append(Device("lost", None, index=index))
                continue
            for instance in self.instances(handle):
                found.append(replace(self._describe(instance), parent=index))
        return found

    def instances(self, handle: Any) -> list[Any]:
        """The handles of a GPU's MIG instances (none where MIG is off or unknown)."""
        mode = self.ask("nvmlDeviceGetMigMode", handle)
        if not mode or mode[0] != self.constant("NVML_DEVICE_MIG_ENABLE", 1):
            return []
        most = int(self.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
        handles = (self.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, i) for i in range(most))
        return [each for each in handles if each is not None]

    def handle(self, device: Device) -> Any:
        """The handle of a described device, or None."""
        if device.uuid is not None:
            return self.ask("nvmlDeviceGetHandleByUUID", device.uuid)
        return (
            None if device.index is None else self.ask("nvmlDeviceGetHandleByIndex", device.index)
        )

    def _describe(self, handle: Any) -> Device:
        if handle is None:
            return Device("unknown", None)
        memory = self.ask("nvmlDeviceGetMemoryInfo", handle)
        return Device(
            model=_text(self.ask("nvmlDeviceGetName", handle)) or "unknown",
            memory_bytes=None if memory is None else int(memory.total),
            uuid=_text(self.ask("nvmlDeviceGetUUID", handle)),
        )


@contextlib.contextmanager
def open_nvml() -> Iterator[Nvml]:
    """NVML for as long as the context lasts. Raises NvmlUnavailable. May hang with the driver."""
    try:
        module = importlib.import_module("pynvml")
    except ImportError:
        raise NvmlUnavailable("no device can be asked: nvidia-ml-py is not installed") from None
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        # A container may carry the compute libraries without this one; a driver that does not
        # answer its own library is broken.
        absent = getattr(module, "NVML_ERROR_LIBRARY_NOT_FOUND", 12)
        raise NvmlUnavailable(
            f"no device: {error}", broken=getattr(error, "value", None) != absent
        ) from None
    try:
        yield Nvml(module)
    finally:
        with contextlib.suppress(module.NVMLError):
            module.nvmlShutdown()


def visible_names(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The entries of CUDA_VISIBLE_DEVICES (or ROCm's variable); None where nothing is set."""
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environ:
            return tuple(part.strip() for part in environ[name].split(",") if part.strip())
    return None


def bind(names: Sequence[str] | None, described: Sequence[Device]) -> Binding:
    """The devices that `names` bind among those that NVML described; all GPUs without names.

    Where NVML described nothing, each name counts as a device that nothing is known of.
    """
    gpus = [device for device in described if device.parent is None]
    if names is None:
        return Binding(tuple(gpus))
    if not described:
        return Binding(tuple(Device("unknown", None) for _ in names), _named_twice(names))
    chosen: list[Device] = []
    for name in names:
        device = _named(name, gpus, described)
        if device is None:
            return Binding(tuple(chosen), f"CUDA_VISIBLE_DEVICES names {name}: no such device")
        chosen.append(device)
    identities = [device.uuid or f"index {device.index}" for device in chosen]
    return Binding(tuple(chosen), _named_twice(identities))


def _named(name: str, gpus: Sequence[Device], described: Sequence[Device]) -> Device | None:
    if name.isdigit():
        return gpus[int(name)] if int(name) < len(gpus) else None
    if name.startswith("MIG-GPU-"):  # MIG-<GPU UUID>/<GPU instance>/<compute instance>, before R470
        return Device("unknown MIG instance", None, uuid=name)
    found = [device for device in described if device.uuid and device.uuid.startswith(name)]
    return found[0] if len(found) == 1 else None


def _named_twice(names: Sequence[str]) -> str:
    twice = sorted({name for name in names if names.count(name) > 1})
    return f"CUDA_VISIBLE_DEVICES names {', '.join(twice)} more than once" if twice else ""


def board_of(device: Device, described: Sequence[Device]) -> Device:
    """The GPU that has the errors, clocks and heat of a device: its own, or a MIG instance's."""
    if device.parent is None:
        return device
    gpus = (each for each in described if each.parent is None)
    return next((gpu for gpu in gpus if gpu.index == device.parent), device)


def bound_devices(
    kind: str, configured: int, environ: Mapping[str, str], described: Sequence[Device] = ()
) -> list[Device]:
    """The devices this node offers: on a CPU as many as configured, else what Slurm bound.

    A bound device that the driver does not tell of is counted with the model `unknown`.
    """
    if kind == "cpu":
        return [Device("cpu", None)] * configured
    return list(bind(visible_names(environ), described).devices)


def _text(value: Any) -> str | None:
    """NVML's texts are bytes in older bindings."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
