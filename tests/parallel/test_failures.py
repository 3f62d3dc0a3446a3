"""What a rank says when a collective fails: the axis, the operation, and why."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from air_hpc.config.compose import Composer
from air_hpc.parallel.failures import CollectiveFailed, naming_collectives, pick
from air_hpc.parallel.world import build_mesh
from air_hpc.plan.types import Mesh
from air_hpc.recovery.rules import Evidence, RuleTable
from air_hpc.session.failure import error_facts
from air_hpc.session.watch import Membership
from tests.torch_ranks import run_ranks

pytestmark = pytest.mark.torch

MESH = Mesh(dp_shard=2, tp=2)
"""Ranks 0, 1 and ranks 2, 3 are the groups of axis tp."""


def rank_in_trouble(rank: int, rendezvous: str, trouble: str) -> dict[str, Any]:
    """Rank 3 dies or falls silent while rank 2 waits for it in a collective of their tp group."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    patience = timedelta(seconds=1 if trouble == "silent" else 60)
    store = dist.FileStore(rendezvous, 4)
    dist.init_process_group("gloo", rank=rank, world_size=4, store=store, timeout=patience)
    mesh = build_mesh(MESH, "cpu", patience)
    group = mesh.get_group("tp")
    dist.all_reduce(torch.ones(5), group=mesh.get_group("dp_shard"))
    dist.all_reduce(torch.ones(5), group=group)
    if rank != 2:
        # Those that stay keep their ends of the connections open until rank 2 has told.
        if rank == 3 and trouble == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        _wait_for(f"{rendezvous}-told")
        return {}
    try:
        with naming_collectives(rank, "node-b"):
            dist.all_gather([torch.empty(4, 3), torch.empty(4, 3)], torch.ones(4, 3), group=group)
    except CollectiveFailed as error:
        return {
            "text": str(error),
            "operation": error.operation,
            "timed_out": error.timed_out,
            "facts": error_facts(error),
        }
    finally:
        open(f"{rendezvous}-told", "w").close()
    return {}


def _wait_for(path: str) -> None:
    until = time.monotonic() + 60
    while not os.path.exists(path) and time.monotonic() < until:
        time.sleep(0.01)


def test_a_killed_rank_is_told_by_group_and_operation() -> None:
    with pytest.raises(AssertionError, match=r"rank 3: the process died") as ended:
        run_ranks(4, rank_in_trouble_and_say, "killed")
    told = str(ended.value)
    assert "rank 2 on node-b: all_gather #2 (4x3 float) of group tp (ranks 2, 3) failed: " in told
    assert "its own end tells why" in told


def rank_in_trouble_and_say(rank: int, rendezvous: str, trouble: str) -> None:
    """As a failure, since `run_ranks` returns nothing where a rank died."""
    if told := rank_in_trouble(rank, rendezvous, trouble):
        raise AssertionError(told["text"])


def test_a_silent_rank_is_told_when_the_group_s_time_is_up() -> None:
    told = run_ranks(4, rank_in_trouble, "silent")[2]
    assert told["timed_out"]
    operation = told["operation"]
    assert (operation.name, operation.group, operation.ranks) == ("all_gather", "tp", (2, 3))
    assert (operation.sizes, operation.dtypes) == (((4, 3),), ("float",))
    assert class_of(told["facts"]) == "network"
    assert "all_gather #2" in told["text"]
    assert "Timed out waiting 1000ms" in told["text"]


def class_of(facts: dict[str, Any]) -> str | None:
    """By the table that ships, from what a worker tells of its error."""
    texts = (f"{facts['type']}: {facts['message']}", *facts["causes"])
    table = RuleTable.of(Composer().compose([]).recovery.rules)
    match = table.match(Evidence(exceptions=tuple(facts["exceptions"]), texts=texts))
    return None if match is None else str(match.failure_class)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("NCCL error: unhandled system error, ncclSystemError", "network"),
        ("NCCL error: CUDA error: uncorrectable ECC error encountered", "device"),
        ("ncclInternalError: something that no rule knows", "network"),
    ],
)
def test_what_a_collective_died_of_may_be_a_device_s_fault(said: str, expected: str) -> None:
    with pytest.raises(CollectiveFailed) as raised, naming_collectives(0, "n1"):
        raise RuntimeError(said)
    assert class_of(error_facts(raised.value)) == expected


def entry(number: int, **facts: Any) -> dict[str, Any]:
    return {
        "process_group": ["7", "mesh_pp"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": "nccl:all_reduce",
        "state": "completed",
        "retired": True,
        "input_sizes": [[2]],
        "input_dtypes": ["BFloat16"],
        **facts,
    }


def test_of_several_operations_the_oldest_in_flight_is_named() -> None:
    waiting = {"retired": False, "state": "started"}
    p2p = {"is_p2p": True, "p2p_seq_id": 9, "profiling_name": "nccl:recv 3<-2"}
    entries = [entry(1), entry(2, **waiting, **p2p), entry(3, **waiting), entry(4)]
    operation = pick(entries, {"7": Membership("mesh_pp", (2, 3))}, {})
    assert str(operation) == "recv 3<-2 #9 (2 bfloat16) of group pp (ranks 2, 3)"


def test_a_group_of_all_ranks_goes_by_the_axes_that_it_serves() -> None:
    """To torch it is its default group, whatever axis spans the world."""
    whole = [{**entry(1), "process_group": ["0", "default_pg"]}]
    groups = {"0": Membership("default_pg", (0, 1))}
    assert [str(pick(whole, groups, axes)) for axes in ({"0": ("cp", "fsdp")}, {})] == [
        "all_reduce #1 (2 bfloat16) of group cp/fsdp (ranks 0, 1)",
        "all_reduce #1 (2 bfloat16) of group world (ranks 0, 1)",
    ]


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shape '[2, 3]' is invalid for input of size 7"), ValueError("gloo"), OSError()],
    ids=repr,
)
def test_other_errors_go_through_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, naming_collectives(0, "here"):
        raise error
    assert raised.value is error


def test_without_a_recorder_the_failure_is_told_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Another test may have trained in this very process.
    monkeypatch.setattr("air_hpc.parallel.failures.recorded", list)
    text = "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9"
    with pytest.raises(CollectiveFailed) as raised, naming_collectives(0, "here"):
        raise RuntimeError(text)
    assert "rank 0 on here: an unknown operation failed: [pair.cc:553] Conn" in str(raised.value)
