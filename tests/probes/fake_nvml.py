"""A stand-in for nvidia-ml-py: this machine has no GPU, so no real part can be tried here.

It answers the calls that `air_hpc.probes` makes as the NVML API reference says they answer, with
what a test wants the devices to be. In this process it takes the place of `pynvml` in sys.modules;
for a process of its own, `write_module` writes a `pynvml.py` that builds the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GIB = 2**30
NOT_SUPPORTED, LIBRARY_NOT_FOUND, TIMEOUT, LOST = 3, 12, 10, 15


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__({LIBRARY_NOT_FOUND: "NVML Shared Library Not Found", LOST: "GPU is lost"}
                         .get(value, f"error {value}"))  # fmt: skip
        self.value = value


@dataclass
class Gpu:
    """One healthy H100, but for what a test changes. None: not supported."""

    uuid: str
    name: str | bytes = "NVIDIA H100 80GB HBM3"
    used: int = GIB // 2
    mig: tuple[int, int] | None = (0, 0)
    instances: list[Gpu] = field(default_factory=list)
    volatile: int | None = 0
    aggregate: int | None = 3
    rows: tuple[int, int, int, int] | None = (1, 0, 0, 0)
    retired_pending: int | None = None
    action: int = 0
    reasons: int | None = 1
    clocks: tuple[int, int] = (345, 1980)
    temperature: int | None = 31
    pids: tuple[int, ...] = ()
    lost_at: str = ""
    """The first function that finds the device lost."""


class FakeNvml:
    """The module."""

    NVMLError = NVMLError
    NVML_ERROR_LIBRARY_NOT_FOUND = LIBRARY_NOT_FOUND

    def __init__(
        self, gpus: list[Gpu], *, init_error: int = 0, hangs: str = "", crashes: str = ""
    ) -> None:
        self.gpus = gpus
        self.init_error = init_error
        self.hangs = hangs
        self.crashes = crashes
        self.events: list[Any] = []
        self.registered: dict[str, int] = {}
        self.freed = False
        self.shut = False

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("nvml") and callable(found):
            return lambda *arguments: self._call(name, found, *arguments)
        return found

    def _call(self, name: str, function: Any, *arguments: Any) -> Any:
        if self.hangs == name:
            time.sleep(3600)
        if self.crashes == name:
            raise SystemExit("libnvidia-ml crashed")
        for gpu in arguments:
            if isinstance(gpu, Gpu) and gpu.lost_at == name:
                raise NVMLError(LOST)
        answer = function(*arguments)
        if answer is None and name.startswith("nvmlDeviceGet"):
            raise NVMLError(NOT_SUPPORTED)
        return answer

    def nvmlInit(self) -> None:
        if self.init_error:
            raise NVMLError(self.init_error)

    def nvmlShutdown(self) -> None:
        self.shut = True

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.15"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        gpu = self.gpus[index]
        if gpu.lost_at == "nvmlDeviceGetHandleByIndex":
            raise NVMLError(LOST)
        return gpu

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu | None:
        everything = [*self.gpus, *(i for gpu in self.gpus for i in gpu.instances)]
        return next((gpu for gpu in everything if gpu.uuid == uuid), None)

    def nvmlDeviceGetName(self, gpu: Gpu) -> str | bytes:
        return gpu.name

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:
        return SimpleNamespace(total=80 * GIB, used=gpu.used)

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> tuple[int, int] | None:
        return gpu.mig

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, index: int) -> Gpu | None:
        return gpu.instances[index] if index < len(gpu.instances) else None

    def nvmlDeviceGetTotalEccErrors(self, gpu: Gpu, kind: int, counter: int) -> int | None:
        assert kind == 1, "uncorrected ones were asked for"
        return gpu.aggregate if counter else gpu.volatile

    def nvmlDeviceGetRemappedRows(self, gpu: Gpu) -> tuple[int, int, int, int] | None:
        return gpu.rows

    def nvmlDeviceGetRetiredPagesPendingStatus(self, gpu: Gpu) -> int | None:
        return gpu.retired_pending

    def nvmlDeviceGetFieldValues(self, gpu: Gpu, fields: list[int]) -> list[Any]:
        assert fields == [230]
        value = SimpleNamespace(uiVal=gpu.action)
        return [SimpleNamespace(nvmlReturn=0, value=value)]

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: Gpu) -> int | None:
        return gpu.reasons

    def nvmlDeviceGetClockInfo(self, gpu: Gpu, clock: int) -> int:
        return gpu.clocks[0]

    def nvmlDeviceGetMaxClockInfo(self, gpu: Gpu, clock: int) -> int:
        return gpu.clocks[1]

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in gpu.pids]

    def nvmlDeviceGetTemperature(self, gpu: Gpu, sensor: int) -> int | None:
        return gpu.temperature

    def nvmlDeviceGetTemperatureThreshold(self, gpu: Gpu, threshold: int) -> int:
        return 87

    # -- events --

    def nvmlDeviceGetSupportedEventTypes(self, gpu: Gpu) -> int:
        return 0b1010

    def nvmlEventSetCreate(self) -> object:
        return self.events

    def nvmlEventSetFree(self, events: object) -> None:
        self.freed = True

    def nvmlDeviceRegisterEvents(self, gpu: Gpu, types: int, events: object) -> None:
        self.registered[gpu.uuid] = types

    def nvmlEventSetWait(self, events: list[Any], timeout_ms: int) -> Any:
        if not events:
            time.sleep(0.005)
            raise NVMLError(TIMEOUT)
        event = events.pop(0)
        if isinstance(event, Exception):
            raise event
        return event


def write_module(folder: Path, expression: str) -> Path:
    """A folder for PYTHONPATH whose `pynvml` is the FakeNvml that `expression` makes."""
    folder.mkdir(exist_ok=True)
    (folder / "pynvml.py").write_text(
        "from tests.probes.fake_nvml import FakeNvml, Gpu\n"
        f"_fake = {expression}\n"
        "def __getattr__(name):\n"
        "    return getattr(_fake, name)\n"
    )
    return folder
