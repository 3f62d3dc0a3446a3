"""What each trouble of a GPU leads to. NVML is a stand-in: there is no GPU here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from air_hpc.probes.devices import bind, open_nvml, visible_names
from air_hpc.probes.gpu import GPU_CHECKS, GpuAsked, Node
from air_hpc.probes.host import HostAsked
from air_hpc.probes.node import Asked, make_checks
from air_hpc.probes.result import Check
from tests.probes.fake_nvml import GIB, FakeNvml, Gpu

HOST = HostAsked("n1", "/nowhere", "/nowhere", 0, None)


@contextmanager
def node(
    monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu], asked: GpuAsked | None = None
) -> Iterator[Node]:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpus))  # type: ignore[arg-type]
    asked = asked or asking(len(gpus))
    with open_nvml() as nvml:
        described = tuple(nvml.devices())
        yield Node(nvml, bind(visible_names(asked.variables), described), asked, described)


def asking(workers: int, visible: str | None = None, ecc: int | None = 0) -> GpuAsked:
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return GpuAsked(workers, variables, 2 * GIB, ecc)


def checks(asked: GpuAsked) -> dict[str, Check]:
    told: list[Check] = []

    def emit(line: dict) -> None:  # type: ignore[type-arg]
        if "check" in line:
            told.append(Check.from_json(line["check"]))

    make_checks(Asked("gpu", HOST, asked), emit)  # type: ignore[arg-type]
    return {check.name: check for check in told}


def test_healthy_devices_pass_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([Gpu("GPU-a"), Gpu("GPU-b")]))
    found = checks(asking(2))
    assert list(found) == ["nvml", *GPU_CHECKS]
    assert [name for name, check in found.items() if check.ok is not True] == []
    assert found["driver"].value == "570.86.15"
    assert found["clocks"].value == pytest.approx(345 / 1980, abs=1e-3)


@pytest.mark.parametrize(
    ("change", "failing", "words"),
    [
        ({"volatile": 2}, "ecc", "2 uncorrected memory errors"),
        ({"rows": (0, 1, 1, 0)}, "ecc", "waits for a reset"),
        ({"rows": (0, 1, 1, 1)}, "ecc", "could not be remapped"),
        ({"retired_pending": 1}, "ecc", "page waits for a reset"),
        ({"action": 2}, "ecc", "the driver asks for a reboot"),
        ({"action": 99}, "ecc", "recovery action 99"),
        ({"reasons": 0x08}, "clocks", "hardware slowdown"),
        ({"reasons": 0x40 | 0x80}, "clocks", "hardware thermal, power brake"),
        ({"used": 3 * GIB, "pids": (77, 78)}, "device_memory", "processes: 77, 78"),
        ({"temperature": 90}, "temperature", "90 °C, it slows down at 87 °C"),
        ({"mig": (1, 1)}, "mig", "MIG is on"),
        ({"lost_at": "nvmlDeviceGetHandleByIndex"}, "devices", "GPU 1 is lost"),
        ({"lost_at": "nvmlDeviceGetTotalEccErrors"}, "ecc", "GPU 1 (GPU-b): GPU is lost"),
    ],
)
def test_a_trouble_fails_its_check_and_names_its_device(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, object], failing: str, words: str
) -> None:
    gpus = [Gpu("GPU-a"), Gpu("GPU-b", **change)]  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpus))
    found = checks(asking(2))
    assert found[failing].ok is False
    assert words in found[failing].said
    assert "GPU-a" not in found[failing].said
    if failing != "devices":
        assert [name for name, check in found.items() if check.ok is False] == [failing]


def test_a_slowdown_by_software_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    with node(monkeypatch, [Gpu("GPU-a", reasons=0x04 | 0x20)]) as one:
        assert GPU_CHECKS["clocks"](one).ok is True


def test_memory_errors_are_told_and_not_held_against_a_device_without_a_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with node(monkeypatch, [Gpu("GPU-a", volatile=5)], asking(1, ecc=None)) as one:
        check = GPU_CHECKS["ecc"](one)
    assert (check.ok, check.value, check.floor) == (True, 5, None)


def test_what_nvml_does_not_support_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GeForce has no ECC, no MIG and no row remapping."""
    plain = Gpu("GPU-a", volatile=None, aggregate=None, rows=None, mig=None, temperature=None)
    with node(monkeypatch, [plain]) as one:
        told = {name: GPU_CHECKS[name](one).ok for name in ("ecc", "mig", "temperature", "clocks")}
    assert told == {"ecc": None, "mig": None, "temperature": None, "clocks": True}


@pytest.mark.parametrize("described", [[Gpu("GPU-a"), Gpu("GPU-b")], []])
def test_fewer_devices_than_workers_are_found_before_the_workers_share_one(
    monkeypatch: pytest.MonkeyPatch, described: list[Gpu]
) -> None:
    """Four workers on one visible device once ended as a network failure, and were retried."""
    fake = FakeNvml(described, init_error=0 if described else 12)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    check = checks(asking(4, visible="1"))["devices"]
    assert (check.ok, check.value, check.floor) == (False, 1, 4)
    assert "CUDA_VISIBLE_DEVICES=1" in check.said


def test_a_device_that_is_bound_twice_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with node(monkeypatch, [Gpu("GPU-a")], asking(2, visible="0,GPU-a")) as one:
        check = GPU_CHECKS["devices"](one)
    assert check.ok is False
    assert "more than once" in check.said


def test_two_mig_instances_do_not_serve_two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    divided = Gpu("GPU-a", mig=(1, 1), instances=[Gpu("MIG-1"), Gpu("MIG-2")])
    with node(monkeypatch, [divided], asking(2, visible="MIG-1,MIG-2")) as two:
        assert GPU_CHECKS["devices"](two).ok is True
        assert "one MIG instance at most" in GPU_CHECKS["mig"](two).said
    with node(monkeypatch, [divided], asking(1, visible="MIG-2")) as one:
        assert GPU_CHECKS["mig"](one).ok is True


def test_a_mig_instance_has_its_gpus_errors_and_its_own_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    divided = Gpu("GPU-a", mig=(1, 1), used=60 * GIB, volatile=2, instances=[Gpu("MIG-1")])
    with node(monkeypatch, [divided], asking(1, visible="MIG-1")) as one:
        assert GPU_CHECKS["device_memory"](one).ok is True
        check = GPU_CHECKS["ecc"](one)
    assert check.ok is False
    assert "MIG instance of GPU 0 (MIG-1): 2 uncorrected" in check.said
