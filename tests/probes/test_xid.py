"""The watch for Xid errors. NVML is a stand-in: there is no GPU here."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from air_hpc.probes.xid import DOUBLE_BIT_ECC, Xid, XidWatch
from tests.agent.groups import wait_until
from tests.probes.fake_nvml import FakeNvml, Gpu, NVMLError

XID, ECC = 8, 2
Start = Callable[..., XidWatch]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    watches: list[XidWatch] = []

    def begin(module: object, names: list[str] | None = None) -> XidWatch:
        monkeypatch.setitem(sys.modules, "pynvml", module)  # type: ignore[arg-type]
        watches.append(XidWatch(names, wall_clock=lambda: 12.5))
        watches[-1].start()
        wait_until(lambda: watches[-1].state != "starting")
        return watches[-1]

    yield begin
    for watch in watches:
        watch.stop()


def event(gpu: Gpu, kind: int, data: int) -> object:
    return SimpleNamespace(device=gpu, eventType=kind, eventData=data)


def test_errors_are_collected_with_their_device(start: Start) -> None:
    first, second = Gpu("GPU-a"), Gpu("GPU-b")
    fake = FakeNvml([first, second])
    watch = start(fake)
    fake.events += [event(second, XID, 79), event(first, ECC, 0)]
    found = []

    def both() -> bool:
        found.extend(watch.take())
        return len(found) == 2

    wait_until(both)
    assert found == [Xid("GPU-b", 1, 79, 12.5, 1), Xid("GPU-a", 0, DOUBLE_BIT_ECC, 12.5, 0)]
    assert found[0].to_json() == {"xid": 79, "device": "GPU-b", "index": 1, "time": 12.5}
    assert watch.take() == []


def test_only_the_bound_devices_are_watched(start: Start) -> None:
    lost = Gpu("GPU-d", lost_at="nvmlDeviceGetSupportedEventTypes")
    divided = Gpu("GPU-c", mig=(1, 1), instances=[Gpu("MIG-1")])
    fake = FakeNvml([Gpu("GPU-a"), Gpu("GPU-b"), divided, lost])
    assert start(fake, ["GPU-d", "GPU-b", "MIG-1"]).watching
    assert fake.registered == {"GPU-b": XID | ECC, "GPU-c": XID | ECC}


def test_a_device_that_is_lost_still_gives_its_number(start: Start) -> None:
    gpu = Gpu("GPU-a")
    fake = FakeNvml([gpu])
    watch = start(fake)
    gpu.lost_at = "nvmlDeviceGetUUID"
    fake.events.append(event(gpu, XID, 79))
    wait_until(lambda: not fake.events)
    watch.stop()
    assert [(x.number, x.device_uuid) for x in watch.take()] == [(79, None)]


@pytest.mark.parametrize("module", [None, FakeNvml([], init_error=12), FakeNvml([])])
def test_without_a_device_it_ends_and_says_so(start: Start, module: object) -> None:
    watch = start(module)
    assert not watch.watching
    assert "no device" in watch.state
    assert watch.take() == []


def test_an_error_of_the_wait_ends_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("air_hpc.probes.xid.PAUSE_S", 0.01)
    gpu = Gpu("GPU-a")
    fake = FakeNvml([gpu])
    watch = start(fake)
    fake.events += [NVMLError(999), event(gpu, XID, 31)]
    wait_until(lambda: not fake.events)
    watch.stop()
    assert [xid.number for xid in watch.take()] == [31]
    assert (watch.state, fake.freed, fake.shut) == ("stopped", True, True)
    assert "xid-watch" not in [thread.name for thread in threading.enumerate()]


def test_a_defect_never_reaches_the_run(start: Start) -> None:
    fake = FakeNvml([Gpu("GPU-a")])
    fake.nvmlDeviceRegisterEvents = None  # type: ignore[method-assign, assignment]
    assert "TypeError" in start(fake).state
