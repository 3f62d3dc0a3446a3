"""A Plan as the JSON object that `plan --json` prints. What is not known is null."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from air_hpc.config.spec import RunSpec
from air_hpc.plan.types import MESH_AXES, Plan


def plan_json(plan: Plan, spec: RunSpec) -> dict[str, Any]:
    """The plan's figures as plain data; FLOP, bytes, seconds and tokens."""
    return {
        "mesh": {axis: getattr(plan.mesh, axis) for axis in (*MESH_AXES, "ep")},
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
        "memory_per_rank": asdict(plan.memory_per_rank),
        "device_memory_bytes": spec.accelerator.memory_bytes,
        "peak_flops_per_device": plan.peak_flops_per_device,
        "step_time_s": plan.step_time_s,
        "mfu": _mfu(plan),
        "lead_s": plan.lead_s,
        "threads_per_worker": plan.threads_per_worker,
        "tracking_uri": plan.tracking_uri,
    }


def _mfu(plan: Plan) -> dict[str, float | None]:
    if plan.step_time_s is None or plan.peak_flops_per_device is None:
        return {"causal": None, "palm": None}
    per_device = plan.tokens_per_step / plan.step_time_s / plan.world_size
    per_flop = per_device / plan.peak_flops_per_device
    return {
        "causal": plan.flops_per_token.causal * per_flop,
        "palm": plan.flops_per_token.palm * per_flop,
    }
