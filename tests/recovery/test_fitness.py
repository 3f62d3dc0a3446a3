"""Which nodes may train, from what their checks said."""

from __future__ import annotations

from typing import Any

import pytest

from air_hpc.recovery.fitness import NodeWord, compare, judge, unfit


def check(name: str, ok: bool | None, said: str = "", value: Any = None) -> dict[str, Any]:
    return {"name": name, "ok": ok, "said": said, "value": value}


FINE = (check("ports", True), check("ecc", None, "no device"))


def test_what_passes_or_cannot_be_told_speaks_against_nobody() -> None:
    assert unfit(FINE) is None
    assert unfit([]) is None


def test_every_failed_check_is_named_in_one_line() -> None:
    checks = [*FINE, check("ecc", False, "GPU 3: 2 errors"), check("mig", False, "MIG is on")]
    assert unfit(checks) == "ecc: GPU 3: 2 errors; mig: MIG is on"


def test_a_full_shared_file_system_is_no_nodes_fault() -> None:
    full = (check("run_dir_space", False, "ENOSPC"), check("run_dir_write", None, "ENOSPC"))
    assert unfit(full) is None
    found = judge({"n1": NodeWord(full), "n2": NodeWord(FINE)}, None)
    assert found.unfit == {}
    assert found.notes == ("run_dir_space fails on 1 of 2 nodes: ENOSPC",)


@pytest.mark.parametrize(
    ("failing", "unfit_nodes"), [(1, {"n0"}), (2, {"n0", "n1"}), (3, set()), (4, set())]
)
def test_what_most_nodes_fail_of_what_they_share_is_held_against_none(
    failing: int, unfit_nodes: set[str]
) -> None:
    hangs = (check("run_dir_write", False, "hangs: not done within 5 s"),)
    words = {f"n{i}": NodeWord(hangs if i < failing else FINE) for i in range(4)}
    found = judge(words, None)
    assert set(found.unfit) == unfit_nodes
    assert bool(found.notes) is (failing > 2)


def test_a_node_of_one_is_not_excused_by_being_all_of_them() -> None:
    assert judge({"n1": NodeWord((check("run_dir_write", False, "EROFS"),))}, None).unfit


def test_a_trouble_of_its_own_stays_beside_a_common_one() -> None:
    both = (check("run_dir_write", False, "EIO"), check("clocks", False, "power brake"))
    found = judge({"n1": NodeWord(both), "n2": NodeWord(both[:1])}, None)
    assert found.unfit == {"n1": "clocks: power brake"}


def clocks(*offsets: float | None) -> dict[str, NodeWord]:
    return {f"n{i}": NodeWord(clock_offset_s=offset) for i, offset in enumerate(offsets)}


@pytest.mark.parametrize(
    ("offsets", "odd"),
    [
        ((0.0, 4.0), set()),
        ((0.0, -9.0), {"n1"}),
        ((0.0, 9.0, 9.1), {"n0"}),
        ((0.0, 0.2, None, -30.0), {"n3"}),
        ((None, None), set()),
    ],
)
def test_the_clock_that_is_apart_from_most_is_at_fault(
    offsets: tuple[float | None, ...], odd: set[str]
) -> None:
    found = compare(clocks(*offsets), 5.0)
    assert set(found) == odd
    assert all("5 s are allowed" in reason for reason in found.values())
    assert compare(clocks(*offsets), None) == {}


def test_a_device_that_two_nodes_name_is_found() -> None:
    words = {
        "n1": NodeWord(devices=({"model": "h100", "uuid": "GPU-a"}, {"model": "cpu"})),
        "n2": NodeWord(devices=({"model": "h100", "uuid": "GPU-a"}, {"model": "cpu"})),
    }
    assert compare(words, 5.0) == {"n2": "device GPU-a is bound on n1 too"}


def test_drivers_that_differ_are_only_noted() -> None:
    words = {
        node: NodeWord((check("driver", True, value=version),))
        for node, version in (("n1", "570"), ("n2", "550"), ("n3", "570"))
    }
    found = judge(words, 5.0)
    assert found.unfit == {}
    assert found.notes == ("the nodes' drivers differ: 550 on n2; 570 on n1, n3",)


def test_a_hello_is_a_word_of_checks_and_devices() -> None:
    hello = {"devices": [{"model": "cpu"}], "facts": {"preflight": [*FINE]}}
    assert NodeWord.from_hello(hello) == NodeWord(FINE, ({"model": "cpu"},))
    assert NodeWord.from_hello({}) == NodeWord()
