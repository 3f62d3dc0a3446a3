"""Watches for Xid errors while a run trains: NVIDIA's driver says through them what broke.

NVML can be waited on for critical Xid errors and double-bit ECC errors; what happened before the
watch began is in the kernel's log only, which is often closed to users. A thread waits, since the
wait may not return; it never raises and holds nothing up, at the end of the process either. On a
node without NVML it ends at once. Numbers: NVIDIA's "Xid Errors" document. Not measured on a GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from air_hpc.errors import AirHpcError
from air_hpc.probes.devices import Device, DeviceLost, Nvml, bind, board_of, open_nvml

WAIT_MS = 500
PAUSE_S = 1.0
"""After a wait that failed otherwise than by its time: never a busy loop."""
DOUBLE_BIT_ECC = 48
"""The Xid of a double-bit ECC error, which has an event of its own."""
MOST_KEPT = 1000

_Known = dict[str | None, tuple[Device, int]]
"""The watched devices by UUID, with their places among the bound ones."""


@dataclass(frozen=True)
class Xid:
    """One error of a device. `time` is seconds since the epoch when it was heard of, `local_rank`
    the place of the device among those bound to the job: the worker that has it."""

    device_uuid: str | None
    index: int | None
    number: int
    time: float
    local_rank: int | None = None

    def to_json(self) -> dict[str, Any]:
        """For the report of a worker's end, and the ledger."""
        return {"xid": self.number, "device": self.device_uuid, "index": self.index,
                "time": self.time}  # fmt: skip


class XidWatch:
    """Collects the errors of the bound devices from `start` until `stop`."""

    def __init__(
        self, names: Sequence[str] | None, *, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """`names` are the entries of CUDA_VISIBLE_DEVICES, None for all devices."""
        self._names = names
        self._wall_clock = wall_clock
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._found: list[Xid] = []
        self._thread = threading.Thread(target=self._run, name="xid-watch", daemon=True)
        self.state = "not started"
        """In words: what the watch is at, and why it sees nothing where it does not."""

    def start(self) -> None:
        """Begin to watch; returns at once."""
        self.state = "starting"
        self._thread.start()

    def take(self) -> list[Xid]:
        """The errors since the last call, oldest first."""
        with self._lock:
            found, self._found = self._found, []
        return found

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the watch; a thread that hangs in the driver is left behind."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def watching(self) -> bool:
        """Whether errors would be seen now."""
        return self.state == "watching"

    def _run(self) -> None:
        try:
            with open_nvml() as nvml:
                self._watch(nvml)
                self.state = "stopped"
        except AirHpcError as error:
            self.state = str(error)
        except Exception as error:  # a defect of the watch must never cost the run
            self.state = f"{type(error).__name__}: {error}"

    def _watch(self, nvml: Nvml) -> None:
        events = nvml.ask("nvmlEventSetCreate")
        if events is None:
            raise AirHpcError("NVML has no events here")
        try:
            known = self._register(nvml, events)
            if not known:
                raise AirHpcError("no device tells of its errors")
            self.state = "watching"
            while not self._stop.is_set():
                self._wait_once(nvml, events, known)
        finally:
            nvml.ask("nvmlEventSetFree", events)

    def _register(self, nvml: Nvml, events: Any) -> _Known:
        """Ask to be told of each bound device."""
        xid = nvml.constant("nvmlEventTypeXidCriticalError", 8)
        ecc = nvml.constant("nvmlEventTypeDoubleBitEccError", 2)
        described = nvml.devices()
        known: _Known = {}
        for local_rank, device in enumerate(bind(self._names, described).devices):
            gpu = board_of(device, described)
            try:
                handle = nvml.handle(gpu)
                supported = nvml.ask("nvmlDeviceGetSupportedEventTypes", handle)
            except DeviceLost:
                continue
            wanted = (xid | ecc) & supported if supported is not None else 0
            if handle is not None and wanted and gpu.uuid not in known:
                nvml.module.nvmlDeviceRegisterEvents(handle, wanted, events)
                known[gpu.uuid] = (gpu, local_rank)
        return known

    def _wait_once(self, nvml: Nvml, events: Any, known: _Known) -> None:
        module = nvml.module
        try:
            event = module.nvmlEventSetWait(events, WAIT_MS)
        except module.NVMLError as error:
            timeout = nvml.constant("NVML_ERROR_TIMEOUT", 10)
            if getattr(error, "value", None) != timeout:
                self._stop.wait(PAUSE_S)
            return
        is_xid = event.eventType == nvml.constant("nvmlEventTypeXidCriticalError", 8)
        uuid = self._uuid(nvml, event.device)
        number = int(event.eventData) if is_xid else DOUBLE_BIT_ECC
        with self._lock:
            if len(self._found) < MOST_KEPT:
                device, rank = known.get(uuid, (None, None))
                index = None if device is None else device.index
                self._found.append(Xid(uuid, index, number, self._wall_clock(), rank))

    @staticmethod
    def _uuid(nvml: Nvml, handle: Any) -> str | None:
        try:
            uuid = nvml.ask("nvmlDeviceGetUUID", handle)
        except AirHpcError:  # the error was that the device is lost
            return None
        return uuid.decode(errors="replace") if isinstance(uuid, bytes) else uuid
