"""`plan --trace`: the real engine of one rank, built without devices, beside the arithmetic.

The trace runs in a process of its own (`python -m air_hpc.parallel.trace`): it needs torch, which
this command line never imports, and torch makes one world in a process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from air_hpc.cli.composing import Task
from air_hpc.cli.output import print_table, say
from air_hpc.cli.texts import scaled, size
from air_hpc.errors import EXIT_BAD_INPUT, BadInput, EnvironmentFailure
from air_hpc.plan.frozen import freeze_run, render_run_yaml
from air_hpc.plan.traced import counted, planned

TIMEOUT_S = 600.0
_COMMAND = (sys.executable, "-m", "air_hpc.parallel.trace")


def traced(task: Task, rank: int) -> Mapping[str, Any]:
    """The JSON of a trace. Raises BadInput for a rank that is not there or what cannot be traced,
    EnvironmentFailure where it does not run (no torch)."""
    if rank >= task.plan.world_size:
        raise BadInput.single(
            "--rank", rank, "no such rank", allowed=f"0 to {task.plan.world_size - 1}"
        )
    text = render_run_yaml(freeze_run("plan", task.spec, task.plan))
    command = [*_COMMAND, "-", "--rank", str(rank)]
    told = " ".join(command[1:])
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentFailure(
            f"the trace took more than {TIMEOUT_S:.0f} s", tried=told, next_step="plan without it"
        ) from None
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if done.returncode == EXIT_BAD_INPUT:
        raise BadInput.single("--trace", "", last.removeprefix("error: "))
    if done.returncode:
        needs = 'pip install "air_hpc[train]" where this runs: a trace needs torch'
        raise EnvironmentFailure(f"the trace failed: {last}", tried=told, next_step=needs)
    body: Mapping[str, Any] = json.loads(done.stdout)
    return body


def trace_json(trace: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """Counted beside planned."""
    mine, its = planned(task.spec, task.plan, trace["rank"]), counted(trace)
    return {
        "rank": trace["rank"],
        "memory_bytes": {"planned": mine.memory_bytes, "counted": its.memory_bytes},
        "forward_flops": {"planned": mine.forward_flops, "counted": its.forward_flops},
        "backward_flops": {"planned": mine.backward_flops, "counted": its.backward_flops},
        "bytes": {
            axis: {
                "planned": mine.bytes_by_axis.get(axis, 0),
                "counted": its.bytes_by_axis.get(axis, 0),
            }
            for axis in sorted({*mine.bytes_by_axis, *its.bytes_by_axis})
        },
        "counted": trace,
    }


def show_trace(trace: Mapping[str, Any], task: Task) -> None:
    """A table of both, with how far they are apart."""
    body = trace_json(trace, task)
    say(f"trace         rank {body['rank']} (pp rank {trace['pp_rank']}) on the real engine")
    rows = [
        ("memory of tensors", body["memory_bytes"], size),
        ("FLOP forward", body["forward_flops"], _flop),
        ("FLOP backward", body["backward_flops"], _flop),
        *((f"bytes over {axis}", both, size) for axis, both in body["bytes"].items()),
    ]
    print_table(
        ("OF A STEP", "PLANNED", "COUNTED", "APART"),
        [(name, show(b["planned"]), show(b["counted"]), _apart(b)) for name, b, show in rows],
        right=("PLANNED", "COUNTED", "APART"),
    )


def _flop(count: float) -> str:
    return scaled(count, "FLOP")


def _apart(both: Mapping[str, float]) -> str:
    if not both["counted"]:
        return "-" if both["planned"] else "0.0 %"
    return f"{100 * (both['planned'] / both['counted'] - 1):+.1f} %"
