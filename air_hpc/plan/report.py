"""A Plan as the JSON object that `plan --json` prints. What is not known is null."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from air_hpc.config.spec import RunSpec
from air_hpc.plan.candidate import Candidate, Found
from air_hpc.plan.outlook import Outlook, outlook
from air_hpc.plan.scaling import Answer, Row
from air_hpc.plan.step_time import StepTime
from air_hpc.plan.types import MESH_AXES, Mesh, Plan

PARTS = {
    "matmul_s": "matrix products",
    "attention_s": "attention",
    "memory_bound_s": "memory-bound",
    "recompute_s": "recompute",
    "tp_s": "tp",
    "cp_s": "cp",
    "ep_s": "ep",
    "fsdp_s": "FSDP",
    "dp_s": "replicas",
    "bubble_s": "pipeline bubble",
    "optimizer_s": "optimizer",
}
"""What takes a step's time, as people read it."""


def plan_json(
    plan: Plan, spec: RunSpec, made: Outlook | None = None, found: Found | None = None
) -> dict[str, Any]:
    """The plan's figures as plain data; FLOP, bytes, seconds and tokens. `made` is its outlook
    (worked out where None), `found` the search that decided it."""
    told = made or outlook(spec, plan)
    body = {
        "mesh": mesh_json(plan.mesh),
        "world_size": plan.world_size,
        "nodes": plan.nodes,
        "allocated_nodes": spec.allocated_nodes,
        "devices_per_node": plan.devices_per_node,
        "model": spec.model.name,
        "accelerator": spec.accelerator.name,
        "precision": spec.train.precision,
        "parameters": plan.counts.parameters,
        "matmul_parameters": plan.counts.matmul_parameters,
        "flops_per_token": {
            "causal": plan.flops_per_token.causal,
            "palm": plan.flops_per_token.palm,
        },
        "micro_batch_size": plan.micro_batch_size,
        "accumulation_steps": plan.accumulation_steps,
        "tokens_per_step": plan.tokens_per_step,
        "total_tokens": plan.tokens_per_step * spec.train.steps,
        "memory_per_rank_bytes": plan.memory_per_rank.total_bytes,
        "memory_per_rank": memory_json(plan),
        "device_memory_bytes": spec.accelerator.memory_bytes,
        "peak_flops_per_device": plan.peak_flops_per_device,
        "step_time_s": plan.step_time_s,
        "mfu": _mfu(plan),
        **outlook_json(told),
        "lead_s": plan.lead_s,
        "threads_per_worker": plan.threads_per_worker,
        "tracking_uri": plan.tracking_uri,
    }
    if found is not None:
        body["search"] = found_json(found)
    return body


def mesh_json(mesh: Mesh) -> dict[str, int]:
    """Its degrees."""
    return {axis: getattr(mesh, axis) for axis in (*MESH_AXES, "ep")}


def memory_json(plan: Plan) -> dict[str, int]:
    """What holds the fullest rank's memory."""
    memory = plan.memory_per_rank
    return {part.name: getattr(memory, part.name) for part in fields(memory)}


def outlook_json(made: Outlook) -> dict[str, Any]:
    """Speed, time and cost."""
    return {
        "step_time": None if made.step is None else step_json(made.step),
        "step_time_unknown": made.unknown,
        "tokens_per_second": made.tokens_per_s,
        "target_tokens": made.target_tokens,
        "training_s": made.training_s,
        "expected_s": made.expected_s,
        "device_hours": made.device_hours,
        "cost": made.cost,
        "save_blocking_s": made.save_blocking_s,
        "best_save_interval_s": made.save_interval_s,
        "expected_ettr": made.ettr,
    }


def step_json(step: StepTime) -> dict[str, float]:
    """The parts of a step."""
    return {part.name: getattr(step, part.name) for part in fields(step)}


def found_json(found: Found) -> dict[str, Any]:
    """A search: what it chose, what comes next, and what was asked for."""
    return {
        "ranked_by": "time" if found.by_time else "idle, then bytes",
        "layouts": found.tried,
        "too_big": found.too_big,
        "chosen": None if found.best is None else candidate_json(found.best),
        "next": [candidate_json(one) for one in found.ranked[1:]],
        "without_search": None if found.asked is None else candidate_json(found.asked),
    }


def candidate_json(one: Candidate) -> dict[str, Any]:
    """One layout."""
    return {
        "mesh": mesh_json(one.mesh),
        "micro_batch_size": one.micro_batch_size,
        "overrides": list(one.overrides()),
        "memory_per_rank_bytes": one.memory_bytes,
        "step_time_s": one.step_s,
        "step_time": None if one.step is None else step_json(one.step),
    }


def scaling_json(rows: Sequence[Row], answer: Answer | None) -> dict[str, Any]:
    """A scaling table, and the answer to how many nodes."""
    body: dict[str, Any] = {"scaling": [_row_json(row) for row in rows]}
    if answer is not None:
        chosen = None if answer.row is None else answer.row.nodes
        body["answer"] = {"nodes": chosen, "said": answer.said}
    return body


def _row_json(row: Row) -> dict[str, Any]:
    plan, made = row.plan, row.outlook
    return {
        "nodes": row.nodes,
        "problem": row.problem,
        "mesh": None if plan is None else mesh_json(plan.mesh),
        "micro_batch_size": None if plan is None else plan.micro_batch_size,
        "memory_per_rank_bytes": None if plan is None else plan.memory_per_rank.total_bytes,
        "step_time_s": None if plan is None else plan.step_time_s,
        "mfu": {"causal": None, "palm": None} if plan is None else _mfu(plan),
        "speedup": row.speedup,
        "efficiency": row.efficiency,
        **({} if made is None else {k: v for k, v in outlook_json(made).items()}),
    }


def differences(one: StepTime, other: StepTime, *, most: int = 3) -> list[tuple[str, float]]:
    """Where `other` takes more or less time than `one`: (part, seconds), the largest first."""
    found = [
        (PARTS[part.name], getattr(other, part.name) - getattr(one, part.name))
        for part in fields(one)
    ]
    notable = [pair for pair in found if abs(pair[1]) >= 0.002 * one.total_s]
    return sorted(notable, key=lambda pair: -abs(pair[1]))[:most]


def _mfu(plan: Plan) -> dict[str, float | None]:
    if plan.step_time_s is None or plan.peak_flops_per_device is None:
        return {"causal": None, "palm": None}
    per_device = plan.tokens_per_step / plan.step_time_s / plan.world_size
    per_flop = per_device / plan.peak_flops_per_device
    return {
        "causal": plan.flops_per_token.causal * per_flop,
        "palm": plan.flops_per_token.palm * per_flop,
    }
