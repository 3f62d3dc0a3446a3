"""What `recovery.py` found, judged and laid out as tables for docs/benchmarks.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

TARGETS_S = {"worker": 5.0, "elastic": 8.0, "spare": 8.0}
NAMES = {
    "worker": "worker killed, 2 nodes × 2 workers",
    "elastic": "node killed of 3, `elastic`",
    "spare": "node killed of 2 + 1, `spare`",
}
CPU_TARGET_PERCENT = 1.0


def problems(result: Mapping[str, Any]) -> list[str]:
    """Work lost beyond what is allowed, miscounted, or a run of ours that did not come back."""
    found = []
    for name, rounds in _ours(result):
        for number, one in enumerate(rounds, 1):
            where = f"{name}, round {number}"
            lost, allowed = one.get("lost_steps"), one.get("allowed_steps")
            if "took_s" not in one:
                found.append(f"{where}: no new step")
            elif lost is None:
                found.append(f"{where}: the ledger does not say what was lost")
            elif lost > allowed:
                found.append(f"{where}: {lost} steps lost, allowed are {allowed}")
            if lost is not None and one.get("lost_by_spool", lost) > lost:
                found.append(f"{where}: the ledger counts {lost} steps lost, the spool more: {one}")
    return found


def markdown(result: Mapping[str, Any]) -> str:
    """The tables, with date, commit, machine and load above them."""
    head = (
        f"{result['date'][:10]}, commit {result['commit']}, {result['machine']}, load before "
        f"{result['load_before']:.1f}; `tools/bench/recovery.py --rounds {result['rounds']}`, a "
        f"checkpoint each {result['checkpoint_interval_steps']} steps."
    )
    return "\n\n".join(part for part in (head, _times(result), _lost(result), _cpu(result)) if part)


def _times(result: Mapping[str, Any]) -> str:
    rows = []
    for name, _ in _ours(result):
        case = result[name]
        rows.append(
            f"| {NAMES[name]} | {_figure(case['air_hpc'])} | {_figure(case['torchrun'])} "
            f"| ≤ {TARGETS_S[name]:g} s | {_phases(case['air_hpc']['rounds'])} |"
        )
    if not rows:
        return ""
    head = "| kill → end of the first new step | air_hpc | tuned torchrun | target | of ours: "
    return "\n".join(
        [f"{head}all ended, next started, loaded, first step |", "|---|---|---|---|---|", *rows]
    )


def _figure(side: Mapping[str, Any]) -> str:
    if side["median_s"] is None:
        return f"never ({side['never']} of {len(side['rounds'])})"
    text = f"{side['median_s']:.1f} s (worst {side['worst_s']:.1f}"
    return text + (f", never {side['never']} times)" if side["never"] else ")")


def _phases(rounds: Iterable[Mapping[str, Any]]) -> str:
    """The medians of the moments after the kill."""
    told = [one["moments_s"] for one in rounds if "moments_s" in one]
    if not told:
        return ""
    return ", ".join(f"{statistics.median(m[key] for m in told):.1f}" for key in told[0])


def _lost(result: Mapping[str, Any]) -> str:
    rows = []
    for name, rounds in _ours(result):
        told = [one for one in rounds if "lost_steps" in one]
        if not told:
            continue
        lost = [one["lost_steps"] for one in told]
        above = sum(one["lost_steps"] > one["allowed_steps"] for one in told)
        allowed = max(one["allowed_steps"] for one in told)
        middle = statistics.median(lost)
        rows.append(f"| {NAMES[name]} | {middle:g} | {max(lost)} | {allowed} | {above} |")
    if not rows:
        return ""
    head = "| work lost, in steps by the ledger | median | most | allowed at most | rounds above |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def _cpu(result: Mapping[str, Any]) -> str:
    cpu = result.get("cpu")
    if cpu is None:
        return ""
    return (
        f"Agent and session with {cpu['workers']} workers: {cpu['together_percent']:g} % CPU time "
        f"per second of training (target: {CPU_TARGET_PERCENT:g} %)."
    )


def _ours(result: Mapping[str, Any]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    return [(name, result[name]["air_hpc"]["rounds"]) for name in NAMES if name in result]
