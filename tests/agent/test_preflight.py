"""The agent's hold on its node's checks: when the hello goes out, what it carries, asked again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from air_hpc.agent.channel import Message
from air_hpc.agent.environment import JobContext
from air_hpc.agent.node import NodeAgent
from air_hpc.agent.preflight import Preflight
from air_hpc.config.spec import PreflightSpec, RecoverySpec, RunSpec
from air_hpc.hardware.accelerator import AcceleratorSpec
from air_hpc.probes.host import HOST_CHECKS
from air_hpc.probes.result import Check
from air_hpc.probes.run import Findings
from air_hpc.rundir.layout import create_run_dir
from tests.agent.groups import ROOT, wait_until
from tests.probes.fake_nvml import write_module

TWO = "FakeNvml([Gpu('GPU-a'), Gpu('GPU-b')])"
Make = Callable[..., Preflight]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Preflight] = []

    def preflight(kind: str = "cpu", nvml: str = TWO, **floors: Any) -> Preflight:
        spec = RunSpec(
            accelerator=AcceleratorSpec(name=kind, kind=kind),  # type: ignore[arg-type]
            recovery=RecoverySpec(preflight=PreflightSpec(**{"timeout_s": 60.0, **floors})),
        )
        spec = replace(spec, cluster=replace(spec.cluster, node_local_dir=str(tmp_path)))
        environ = {
            **os.environ,
            "PYTHONPATH": f"{write_module(tmp_path / 'nvml', nvml)}:{ROOT}",
            "CUDA_VISIBLE_DEVICES": "1",
        }
        run = create_run_dir(tmp_path, f"run{len(made)}")
        made.append(Preflight(spec, 1, run, "n1", environ))
        return made[-1]

    yield preflight
    for one in made:
        one.close()


def found_by(preflight: Preflight) -> Findings:
    preflight.start()
    wait_until(lambda: preflight.poll() is not None)
    found = preflight.poll()
    assert found is not None
    return found


def test_on_a_cpu_the_hello_carries_the_hosts_checks_and_no_device(make: Make) -> None:
    preflight = make()
    found = found_by(preflight)
    assert [check.name for check in found.checks] == [*HOST_CHECKS, "devices"]
    assert (found.checks[-1].ok, found.checks[-1].said) == (None, "no device")
    hello = preflight.fill({"type": "hello", "facts": {"pid": 7}})
    assert [device["model"] for device in hello["devices"]] == ["cpu"]
    assert hello["facts"]["pid"] == 7
    assert hello["facts"]["preflight"] == [check.to_json() for check in found.checks]


def test_a_gpu_is_told_with_its_uuid(make: Make) -> None:
    preflight = make("cuda")
    found = found_by(preflight)
    assert [check for check in found.checks if check.ok is False] == []
    [device] = preflight.fill({})["devices"]
    assert device == {
        "model": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 * 2**30, "uuid": "GPU-b",
    }  # fmt: skip


def test_switched_off_it_asks_for_the_devices_only(make: Make) -> None:
    preflight = make("cuda", enabled=False)
    found_by(preflight)
    hello = preflight.fill({})
    assert [device["uuid"] for device in hello["devices"]] == ["GPU-b"]
    assert "preflight" not in hello["facts"]
    nothing = make("cpu", enabled=False)
    assert found_by(nothing).checks == ()


def test_a_driver_that_hangs_is_told_and_its_devices_are_only_counted(make: Make) -> None:
    preflight = make("cuda", f"{TWO[:-1]}, hangs='nvmlInit')", check_timeout_s=0.5)
    failed = [check for check in found_by(preflight).checks if check.ok is False]
    assert [(check.name, check.said[:5]) for check in failed] == [("nvml", "hangs")]
    assert [device["model"] for device in preflight.fill({})["devices"]] == ["unknown"]


class ByHand:
    """A pre-flight that a test ends, and a node agent that has it."""

    def __init__(self, folder: Path) -> None:
        self.now = 100.0
        self.starts = 0
        self.found: Findings | None = None
        self.sent: list[Message] = []
        self.ready = True
        self.agent = NodeAgent(
            JobContext("slurm", "n2", 1, ("n1", "n2"), "7", None, None, 0, None),
            create_run_dir(folder, "run"),
            RecoverySpec(),
            self,
            {"type": "hello"},
            self,  # type: ignore[arg-type]
            ["python"],
            {},
            start_timeout_s=60,
            say=lambda text: None,
            on_coordinator_lost=lambda: True,
            preflight=self,  # type: ignore[arg-type]
            clock=lambda: self.now,
        )

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def start(self) -> None:
        self.starts += 1
        self.found = None

    def poll(self) -> Findings | None:
        return self.found

    def fill(self, hello: Message) -> Message:
        return {**hello, "filled": True}

    def tick(self) -> None:
        self.now += 0.25
        self.agent.tick()

    def of(self, kind: str) -> list[Message]:
        return [message for message in self.sent if message["type"] == kind]


@pytest.fixture
def by_hand(tmp_path: Path) -> ByHand:
    return ByHand(tmp_path)


def test_no_hello_before_the_nodes_checks_are_done(by_hand: ByHand) -> None:
    assert by_hand.starts == 1
    for _ in range(20):
        by_hand.tick()
    assert by_hand.sent == []
    by_hand.found = Findings((Check("ecc", True),))
    by_hand.tick()
    assert by_hand.of("hello") == [{"type": "hello", "filled": True}]


def test_asked_again_a_node_is_checked_anew_and_answers_each_asking(by_hand: ByHand) -> None:
    by_hand.found = Findings((Check("ecc", True),))
    by_hand.agent.on_message({"type": "welcome"})
    for _ in range(2):  # a message that is said again starts nothing
        by_hand.agent.on_message({"type": "preflight", "request": "0.1"})
        by_hand.tick()
    assert (by_hand.starts, by_hand.of("preflight")) == (2, [])
    by_hand.found = Findings((Check("ecc", False, said="GPU 1"),), seconds=0.5)
    by_hand.tick()
    by_hand.agent.on_message({"type": "preflight", "request": "0.1"})  # the answer was lost
    by_hand.tick()
    first, again = by_hand.of("preflight")
    assert first == again
    assert (first["request"], first["seconds"]) == ("0.1", 0.5)
    assert [(c["name"], c["ok"]) for c in first["checks"]] == [("ecc", False)]
    assert by_hand.starts == 2
    by_hand.agent.on_message({"type": "preflight", "request": "0.2"})
    assert by_hand.starts == 3


def test_what_the_ranks_found_is_told_once_as_one_word_of_the_node(by_hand: ByHand) -> None:
    by_hand.agent.group = SimpleNamespace(workers=[0, 1], token="0.1", close=int)  # type: ignore[assignment]
    for rank, rate in ((2, 5.0), (3, 4.0)):
        assert by_hand.of("rank_checks") == []
        check = Check("matmul", True, rate, unit="FLOP/s").to_json()
        message = {"kind": "preflight", "rank": rank, "checks": [check]}
        by_hand.agent._on_worker_message(rank, message)
    [told] = by_hand.of("rank_checks")
    assert (told["token"], [c["value"] for c in told["checks"]]) == ("0.1", [4.0])
