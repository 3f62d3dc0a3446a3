"""What keeps nodes from training together."""

from __future__ import annotations

from typing import Any

from air_hpc.agent.members import Member, problems_of

H100 = {"model": "NVIDIA H100", "memory_bytes": 80 * 2**30}
A100 = {"model": "NVIDIA A100", "memory_bytes": 80 * 2**30}
A100_40 = {"model": "NVIDIA A100", "memory_bytes": 40 * 2**30}


def member(node: str, devices: list[dict[str, Any]], **facts: Any) -> Member:
    hello = {
        "index": int(node[1:]) - 1,
        "boot_id": f"boot-{node}",
        "address": f"10.0.0.{node[1:]}",
        "ports": [20001, 20002],
        "devices": devices,
        **facts,
    }
    return Member.from_hello(node, hello, 0.0)


def found(*members: Member, devices_per_node: int = 2, allow_mixed: bool = False) -> list[str]:
    return problems_of(members, devices_per_node, allow_mixed=allow_mixed)


def test_equal_nodes_are_fine() -> None:
    assert found(member("n1", [H100] * 2), member("n2", [H100] * 2)) == []


def test_a_node_with_too_few_devices_is_named() -> None:
    (problem,) = found(member("n1", [H100] * 2), member("n2", [H100]))
    assert "n2 has 1 devices" in problem
    assert "asks for 2" in problem


def test_spare_devices_are_fine() -> None:
    assert found(member("n1", [H100] * 4), member("n2", [H100] * 2)) == []


def test_mixed_models_are_refused_unless_allowed() -> None:
    mixed = member("n1", [H100] * 2), member("n2", [A100] * 2)
    (problem,) = found(*mixed)
    assert "NVIDIA H100 80 GiB on n1" in problem
    assert "NVIDIA A100 80 GiB on n2" in problem
    assert "cluster.allow_mixed_devices=true" in problem
    assert found(*mixed, allow_mixed=True) == []


def test_the_same_model_with_other_memory_is_another_device() -> None:
    (problem,) = found(member("n1", [A100] * 2), member("n2", [A100_40] * 2))
    assert "40 GiB" in problem


def test_a_node_that_mixes_devices_itself_is_seen() -> None:
    (problem,) = found(member("n1", [A100, A100_40]))
    assert "80 GiB on n1" in problem
    assert "40 GiB on n1" in problem


def test_loopback_addresses_between_machines_are_refused() -> None:
    (problem,) = found(
        member("n1", [H100] * 2, address="127.0.0.1"), member("n2", [H100] * 2, address="127.0.1.1")
    )
    assert problem.startswith("n1, n2 would be reached over a loopback address")
    assert "cluster.network_interface" in problem


def test_loopback_addresses_on_one_machine_are_fine() -> None:
    same = {"boot_id": "one", "address": "127.0.0.1"}
    assert found(member("n1", [H100] * 2, **same), member("n2", [H100] * 2, **same)) == []


def test_every_problem_is_told_at_once() -> None:
    problems = found(
        member("n1", [H100], address="127.0.0.1"), member("n2", [A100, A100]), devices_per_node=2
    )
    assert len(problems) == 3
