"""The table of failures that ships: each rule takes its example, and no earlier rule does.

The texts of gloo, the allocator and the loader were recorded from torch 2.13 on a CPU; those of
NCCL, CUDA and the driver are minimal samples of their published formats.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from air_hpc.config.compose import Composer
from air_hpc.config.spec import FailureRule, RuleClass
from air_hpc.recovery.decide import decide
from air_hpc.recovery.rules import (
    MOST_LOG_MATCHES,
    SEARCHED_CHARS,
    Evidence,
    LogMatch,
    RuleTable,
)
from air_hpc.rundir.words import FREE, FailureClass, Verdict

SPEC = Composer().compose([])
RULES = SPEC.recovery.rules
TABLE = RuleTable.of(RULES)


def error(kind: str, message: str, *more: str, **facts: Any) -> Evidence:
    """An error that a worker told: its type, its text, and the types that it derives from."""
    names = (kind, *more)
    return Evidence(
        exit_code=1,
        exceptions=(*names, "Exception"),
        texts=(f"{kind.rpartition('.')[2]}: {message}",),
        **facts,
    )


def runtime(message: str, **facts: Any) -> Evidence:
    return error("RuntimeError", message, **facts)


def log(*lines: str, **facts: Any) -> Evidence:
    """A worker that died without a word; its log was searched as its node does."""
    return Evidence(log_matches=TABLE.search_log(lines), **{"signal": "SIGABRT", **facts})


def xids(*seen: int) -> Evidence:
    return runtime("CUDA error: unspecified launch failure", xids=seen)


GLOO_CLOSED = (
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:25722. This is typically caused by a remote worker crashing"
)
NCCL_WATCHDOG = (
    "[rank4]:[E321 02:07:08.414640780 ProcessGroupNCCL.cpp:607] [Rank 4] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
    "Timeout(ms)=600000) ran for 600067 milliseconds before timing out."
)

EXAMPLES: dict[str, list[Evidence]] = {
    "xid_off_the_bus": [xids(79), xids(45, 79)],
    "xid_ecc": [xids(48), xids(63, 64), xids(94), xids(95), xids(140)],
    "xid_link": [xids(74), xids(145)],
    "xid_firmware": [xids(119), xids(62), xids(120)],
    "device_off_the_bus": [
        runtime("NVML: Unable to determine the device handle for gpu 0000:4B:00.0: GPU is lost")
    ],
    "device_ecc": [
        runtime("CUDA error: uncorrectable ECC error encountered"),
        runtime("CUDA error: uncorrectable NVLink error detected during the execution"),
    ],
    "device_memory": [
        error(
            "torch.OutOfMemoryError",
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity of 79.1 GiB",
            "RuntimeError",
        )
    ],
    "device_memory_text": [
        runtime("CUDA out of memory. Tried to allocate 2.00 GiB"),
        runtime("CUDA error: out of memory"),
        runtime("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        log("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 64 MiB", exit_code=1),
    ],
    "device_assert": [
        runtime("CUDA error: device-side assert triggered"),
        log("Indexing.cu:1369: indexSelectLargeIndex: Assertion `srcIndex < srcSize` failed."),
    ],
    "xid_application": [xids(13), xids(31), xids(43), xids(45)],
    "illegal_access": [
        error("torch.AcceleratorError", "CUDA error: an illegal memory access was encountered")
    ],
    "oom_kill": [Evidence(signal="SIGKILL", oom_killed=True)],
    "host_memory": [error("MemoryError", "")],
    "host_memory_text": [
        runtime(
            "[enforce fail at alloc_cpu.cpp:129] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 4611686018427387904 bytes. Error code 12 (Cannot "
            "allocate memory)"
        ),
        log("terminate called after throwing an instance of 'std::bad_alloc'"),
    ],
    "slurm_out_of_memory": [Evidence(slurm_state="OUT_OF_MEMORY")],
    "storage_full": [
        error("OSError", "[Errno 28] No space left on device", errno="ENOSPC"),
        error("OSError", "[Errno 122] Disk quota exceeded: 'x'", errno="EDQUOT"),
    ],
    "storage": [error("OSError", "[Errno 116] Stale file handle", errno="ESTALE")],
    "storage_denied": [
        error("PermissionError", "[Errno 13] Permission denied: 'x'", "OSError", errno="EACCES"),
        error("PermissionError", "[Errno 1] Operation not permitted", "OSError", errno="EPERM"),
    ],
    "storage_text": [
        runtime("PytorchStreamWriter failed writing file data/3: No space left on device")
    ],
    "bus_error": [Evidence(signal="SIGBUS")],
    "nccl_timeout": [log(NCCL_WATCHDOG), runtime(NCCL_WATCHDOG)],
    "nccl": [
        error(
            "torch.distributed.DistBackendError",
            "NCCL error in: ProcessGroupNCCL.cpp:3384, remote process exited or there was a "
            "network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to "
            "a network error or a remote process exiting prematurely.",
            "torch.distributed.DistError",
            "RuntimeError",
        ),
        log("node3:412:611 [2] NET/IB : Got completion with status=12 error 12 vendor err 129"),
    ],
    "gloo_timeout": [
        runtime(
            "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting "
            "3000ms for recv operation to complete"
        ),
        runtime(
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:169] Application timeout caused pair "
            "closure"
        ),
    ],
    "gloo_lost_peer": [
        runtime(GLOO_CLOSED),
        runtime("[tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer"),
        error("ConnectionResetError", "[Errno 104] Connection reset by peer", "ConnectionError",
              "OSError", errno="ECONNRESET"),
    ],
    "rendezvous": [
        error(
            "torch.distributed.DistStoreError",
            "wait timeout after 1000ms, keys: /x",
            "torch.distributed.DistError",
            "RuntimeError",
        ),
        error(
            "torch.distributed.DistNetworkError",
            "The client socket has timed out after 2000ms while trying to connect to "
            "(127.0.0.1, 29813).",
            "torch.distributed.DistError",
            "RuntimeError",
        ),
    ],
    "torch_network": [
        error("torch.distributed.DistBackendError", "something new", "RuntimeError"),
        error("air_hpc.parallel.failures.CollectiveFailed", "rank 3 on n2: all_reduce failed"),
    ],
    "connection": [
        error("TimeoutError", "[Errno 110] Connection timed out", "OSError", errno="ETIMEDOUT"),
        error("ConnectionRefusedError", "[Errno 111] refused", "ConnectionError", "OSError"),
    ],
    "slurm_node_fail": [Evidence(slurm_state="NODE_FAIL")],
    "slurm_time_limit": [Evidence(slurm_state="TIMEOUT"), Evidence(slurm_state="DEADLINE")],
    "slurm_preempted": [Evidence(slurm_state="PREEMPTED")],
    "slurm_cancelled": [Evidence(slurm_state="CANCELLED")],
    "slurm_launch_failed": [Evidence(slurm_state="PENDING", slurm_reason="JobHoldMaxRequeue")],
    "device_error": [
        runtime("CUDA error: the launch timed out and was terminated"),
        runtime("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ],
    "device_exception": [error("torch.AcceleratorError", "something new", "RuntimeError")],
    "missing_library": [
        error(
            "OSError",
            "libnothere.so.1: cannot open shared object file: No such file or directory",
        ),
        error("ImportError", "/lib/libc.so.6: version `GLIBC_2.34' not found"),
    ],
    "missing_module": [
        error("ModuleNotFoundError", "No module named 'flash_attn'", "ImportError")
    ],
    "mistake": [
        error("TypeError", "forward() missing 1 required positional argument: 'x'"),
        error("KeyError", "'lr'", "LookupError"),
        error("ZeroDivisionError", "division by zero", "ArithmeticError"),
    ],
    "illegal_instruction": [Evidence(signal="SIGILL")],
    "system_error": [error("FileNotFoundError", "[Errno 2] No such file", "OSError")],
    "xid_ecc_recorded": [runtime("something else", xids=(63,))],
    "traceback_in_user_code": [
        runtime("mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)", origin="user")
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule is not None])
def test_a_shipped_rule_takes_its_examples_and_no_earlier_rule_does(name: str) -> None:
    assert EXAMPLES[name], "each rule has an example"
    for evidence in EXAMPLES[name]:
        match = TABLE.match(evidence)
        assert match is not None
        assert match.rule == name
        assert match.hint, "each tells what to do"


def test_every_example_is_of_a_rule_that_ships() -> None:
    assert set(EXAMPLES) == set(RULES)


def test_shipped_rules_leave_room_for_a_users_own() -> None:
    priorities = [rule.priority for rule in RULES.values() if rule is not None]
    assert max(priorities) < FailureRule("unknown").priority
    assert len(set(priorities)) == len(priorities), "no order that hangs on a name"


def test_the_classes_of_a_rule_are_those_of_the_ledger() -> None:
    assert set(get_args(RuleClass)) == {str(c) for c in FailureClass} - {"completed", "fenced"}


def test_nothing_known_is_no_match() -> None:
    assert TABLE.match(runtime("something else")) is None
    assert TABLE.match(Evidence(signal="SIGKILL")) is None
    assert TABLE.match(Evidence(signal="SIGKILL", oom_killed=False)) is None
    assert TABLE.match(Evidence(exit_code=1)) is None
    assert RuleTable().match(runtime("CUDA out of memory")) is None


def test_a_line_of_the_log_does_not_explain_an_error_that_was_told() -> None:
    """A loop that survives running out of memory says so in its log, and may fail later."""
    survived = TABLE.search_log(["CUDA out of memory, trying a smaller batch"])
    assert [found.rule for found in survived] == ["device_memory_text"]
    mistake = replace(error("KeyError", "'lr'", "LookupError"), log_matches=survived)
    match = TABLE.match(mistake)
    assert match is not None
    assert match.rule == "mistake"


def test_a_rule_of_the_users_own_goes_first_and_hears_the_log_too() -> None:
    own = FailureRule("network", pattern="port [0-9]+ flapped", action="exclude", hint="call us")
    table = RuleTable.of({**RULES, "fabric": own})
    found = table.search_log(["all well", "switch 7: port 12 flapped", "Traceback ..."])
    assert found == (LogMatch("fabric", "switch 7: port 12 flapped"),)
    match = table.match(replace(error("KeyError", "x", "LookupError"), log_matches=found))
    assert match is not None
    assert (match.rule, match.action, match.line) == ("fabric", "exclude", found[0].line)


def test_all_conditions_of_a_rule_must_hold() -> None:
    rule = FailureRule("device", exit_code=(3, 4), pattern="lost", exception=("RuntimeError",))
    table = RuleTable.of({"both": rule})
    assert table.match(replace(runtime("lost"), exit_code=4)) is not None
    assert table.match(runtime("lost")) is None
    assert table.match(replace(runtime("found"), exit_code=3)) is None
    assert table.match(replace(error("OSError", "lost"), exit_code=3)) is None


def test_a_rule_that_is_null_is_switched_off() -> None:
    table = RuleTable.of({**RULES, "gloo_lost_peer": None})
    assert table.match(runtime(GLOO_CLOSED)) is None


def test_what_travels_of_a_log_is_bounded() -> None:
    rules = {f"r{n}": FailureRule("unknown", pattern="x") for n in range(9)}
    found = RuleTable.of(rules).search_log(["x" * 10_000] * 40)
    assert len(found) == MOST_LOG_MATCHES
    assert all(len(match.line) <= 300 for match in found)
    late = RuleTable.of({"late": FailureRule("unknown", pattern="end$")})
    assert late.search_log(["x" * SEARCHED_CHARS + "end"]) == ()


def test_the_last_line_that_a_pattern_is_found_in_is_the_evidence() -> None:
    table = RuleTable.of({"any": FailureRule("unknown", pattern="bad")})
    assert table.search_log(["bad 1", "bad 2", "good"])[0].line == "bad 2"


@pytest.mark.parametrize(
    ("action", "failure_class", "stops"),
    [
        (None, FailureClass.USER_ERROR, True),
        ("restart", FailureClass.USER_ERROR, False),
        ("exclude", FailureClass.USER_ERROR, False),
        ("stop", FailureClass.NETWORK, True),
        (None, FailureClass.NETWORK, False),
        ("restart", FailureClass.COMPLETED, True),
        ("restart", FailureClass.CANCELLED, True),
    ],
)
def test_an_action_wins_over_its_class(
    action: Any, failure_class: FailureClass, stops: bool
) -> None:
    decision = decide(failure_class, None, (), SPEC.recovery, action=action)
    assert (decision.verdict is Verdict.STOP) is stops
    assert failure_class not in FREE
