"""Which devices Slurm bound, read as CUDA reads it. NVML is a stand-in: there is no GPU here."""

from __future__ import annotations

import sys

import pytest

from air_hpc.probes.devices import (
    Device,
    NvmlUnavailable,
    bind,
    bound_devices,
    open_nvml,
    visible_names,
)
from tests.probes.fake_nvml import LIBRARY_NOT_FOUND, FakeNvml, Gpu

FOUR = tuple(Device(f"gpu{i}", 2**30, f"GPU-{i}{i}{i}", i) for i in range(4))
INSTANCE = Device("H100 MIG 1g", 2**30, "MIG-abc", parent=3)


def test_on_a_cpu_there_are_as_many_as_configured() -> None:
    devices = bound_devices("cpu", 3, {"CUDA_VISIBLE_DEVICES": "0"})
    assert [device.model for device in devices] == ["cpu"] * 3


def test_bound_devices_are_counted_where_no_driver_describes_them() -> None:
    assert len(bound_devices("cuda", 8, {"CUDA_VISIBLE_DEVICES": "0,1"})) == 2
    assert len(bound_devices("rocm", 8, {"ROCR_VISIBLE_DEVICES": "0,1,2"})) == 3
    assert bound_devices("cuda", 8, {}) == []


@pytest.mark.parametrize(
    ("visible", "models"),
    [
        (None, ["gpu0", "gpu1", "gpu2", "gpu3"]),
        ("1,3", ["gpu1", "gpu3"]),
        ("GPU-222,GPU-000", ["gpu2", "gpu0"]),
        ("GPU-1", ["gpu1"]),
        ("MIG-abc", ["H100 MIG 1g"]),
        ("", []),
    ],
)
def test_a_bound_device_is_described_by_its_index_or_uuid(
    visible: str | None, models: list[str]
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    binding = bind(visible_names(environ), (*FOUR, INSTANCE))
    assert ([device.model for device in binding.devices], binding.problem) == (models, "")


@pytest.mark.parametrize("name", ["7", "GPU-9", "GPU-", "-1"])
def test_nothing_after_a_name_of_no_device_is_visible(name: str) -> None:
    binding = bind(["0", name, "1"], FOUR)
    assert [device.model for device in binding.devices] == ["gpu0"]
    assert f"names {name}" in binding.problem


@pytest.mark.parametrize("names", [["0", "0"], ["0", "GPU-000"]])
def test_a_device_that_is_named_twice_is_a_problem(names: list[str]) -> None:
    assert "more than once" in bind(names, FOUR).problem


def test_a_device_is_told_with_its_mig_instances_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    divided = Gpu("GPU-b", name=b"A100", mig=(1, 1), instances=[Gpu("MIG-1"), Gpu("MIG-2")])
    fake = FakeNvml([Gpu("GPU-a"), divided])
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    with open_nvml() as nvml:
        found = nvml.devices()
    assert [(d.uuid, d.index, d.parent) for d in found] == [
        ("GPU-a", 0, None), ("GPU-b", 1, None), ("MIG-1", None, 1), ("MIG-2", None, 1),
    ]  # fmt: skip
    assert found[1].model == "A100"
    assert fake.shut


def test_a_device_that_is_lost_is_still_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Gpu("GPU-a", lost_at="nvmlDeviceGetHandleByIndex")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([lost, Gpu("GPU-b")]))
    with open_nvml() as nvml:
        assert [device.model[:6] for device in nvml.devices()] == ["lost", "NVIDIA"]


@pytest.mark.parametrize(
    ("module", "broken"),
    [
        (None, False),
        (FakeNvml([], init_error=LIBRARY_NOT_FOUND), False),
        (FakeNvml([], init_error=9), True),
    ],
)
def test_only_a_driver_that_refuses_its_own_library_speaks_against_a_node(
    monkeypatch: pytest.MonkeyPatch, module: object, broken: bool
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)  # type: ignore[arg-type]
    with pytest.raises(NvmlUnavailable, match="no device") as caught, open_nvml():
        pass
    assert caught.value.broken is broken
