"""What MLflow is told of a run besides its steps: params, tags, status, control metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from ClusterShell.NodeSet import NodeSet, NodeSetException

from air_hpc.config.spec import RunSpec
from air_hpc.plan.types import Plan
from air_hpc.rundir.events import Event, Kind
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.state import RunStatus
from air_hpc.rundir.words import RunState
from air_hpc.tracking.uri import scrub

MAX_VALUE_CHARS = 500
"""Of a param or a tag: what every MLflow server of the last years takes (newer ones take more)."""

STATUS = {
    RunState.PENDING: "SCHEDULED",
    RunState.STARTING: "RUNNING",
    RunState.RUNNING: "RUNNING",
    RunState.SAVING: "RUNNING",
    RunState.REQUEUED: "SCHEDULED",
    RunState.HELD: "SCHEDULED",
    RunState.FINISHED: "FINISHED",
    RunState.FAILED: "FAILED",
    RunState.CANCELLED: "KILLED",
}
"""MLflow's word for each run state."""

_UNTOLD = ("cluster.env", "cluster.setup", "tracking.uri")
"""Keys whose values may hold secrets."""


def short(value: object) -> str:
    """A value as a param or tag: one that is too long keeps its beginning."""
    text = scrub("null" if value is None else str(value))
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 1] + "…"


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dataclasses and mappings as dotted keys; empty containers vanish."""
    if is_dataclass(value) and not isinstance(value, type):
        items = [(entry.name, getattr(value, entry.name)) for entry in fields(value)]
    elif isinstance(value, Mapping):
        items = [(str(key), entry) for key, entry in value.items()]
    elif isinstance(value, list | tuple):
        return {prefix: ",".join(map(str, value))} if value else {}
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, entry in items:
        flat.update(flatten(entry, f"{prefix}.{key}" if prefix else key))
    return flat


def params(spec: RunSpec, plan: Plan) -> dict[str, str]:
    """The params of a run: its RunSpec by config key, and its Plan below `plan.`."""
    told = {
        key: value
        for key, value in flatten(spec).items()
        if not any(key == untold or key.startswith(untold + ".") for untold in _UNTOLD)
    }
    resolved = flatten(plan, "plan")
    resolved.pop("plan.tracking_uri", None)
    resolved["plan.world_size"] = plan.world_size
    return {key: short(value) for key, value in {**told, **resolved}.items()}


def tags(
    run: RunDir,
    status: RunStatus,
    events: Sequence[Event],
    *,
    state: RunState,
    rolled_back: Sequence[tuple[int, int]],
    overrides: Sequence[str] = (),
    config_hash: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """The tags of a run as things stand; what is not known yet has no tag."""
    job_id = status.job_id
    found = {
        "air_hpc.run_id": run.run_id,
        "air_hpc.run_dir": run.path,
        "air_hpc.sweep": _sweep(events, extra or {}),
        "air_hpc.overrides": " ".join(_told(overrides)) or None,
        "air_hpc.config_hash": config_hash,
        "air_hpc.state": state,
        "air_hpc.job_id": job_id,
        "air_hpc.array_task_id": status.array_task_id,
        "air_hpc.nodes": _folded(status.nodes),
        "air_hpc.attempts": status.attempt,
        "air_hpc.failure_class": status.failure_class,
        "air_hpc.evidence": status.evidence,
        "air_hpc.rolled_back": ranges_text(rolled_back) or None,
        "air_hpc.stragglers": _stragglers(status, events),
        "air_hpc.device": status.measured.get("device_name"),
        "air_hpc.peak_source": status.measured.get("peak_source"),
    }
    return {key: short(value) for key, value in found.items() if value is not None}


def ranges_text(ranges: Sequence[tuple[int, int]]) -> str:
    """`81-100, 41-60`; the newest are kept when there are too many for a tag."""
    words = [f"{first}-{last}" for first, last in ranges]
    while len(", ".join(words)) > MAX_VALUE_CHARS:
        words = ["…", *words[2:]]
    return ", ".join(words)


def _told(overrides: Sequence[str]) -> list[str]:
    return [text for text in overrides if not text.lstrip("+~").startswith(_UNTOLD)]


def _sweep(events: Sequence[Event], extra: Mapping[str, Any]) -> Any:
    for event in events:
        if event.kind in (Kind.SUBMITTED, Kind.SUBMIT_FAILED):
            label = event.facts.get("sweep") or event.facts.get("submission")
            if label is not None:
                return label
    return extra.get("sweep")


def _stragglers(status: RunStatus, events: Sequence[Event]) -> str | None:
    """The slow ranks; `none` once those that were are slow no more: a tag cannot be taken back."""
    if status.stragglers:
        return "; ".join(map(str, status.stragglers))
    return "none" if any(event.kind == Kind.STRAGGLER for event in events) else None


def _folded(nodes: Sequence[str] | None) -> str | None:
    if not nodes:
        return None
    try:
        return str(NodeSet.fromlist(nodes))
    except NodeSetException:
        return ",".join(nodes)


def control_metrics(
    status: RunStatus,
    plan: Plan,
    *,
    allocated_nodes: int,
    rolled_back_steps: int,
    largest_difference: float | None,
) -> dict[str, float]:
    """Goodput and its parts, cost and recovery, in seconds, device hours and steps.

    The cost is of every node that the job holds, hot spares among them.
    """
    time = status.time
    found: dict[str, float | None] = {
        "goodput/ratio": time.goodput,
        "time/queued_s": time.queued_s,
        "time/starting_s": time.starting_s,
        "time/training_s": time.training_s,
        "time/lost_s": time.lost_s,
        "time/stopping_s": time.stopping_s,
        "cost/device_hours": time.allocated_s / 3600 * allocated_nodes * plan.devices_per_node,
        "recovery/attempts": status.attempt,
        "recovery/stragglers": len(status.stragglers),
        "recovery/rolled_back_steps": rolled_back_steps,
        "recovery/rerun_loss_difference": largest_difference,
    }
    return {key: float(value) for key, value in found.items() if value is not None}


def summary_metrics(
    status: RunStatus, plan: Plan, *, step: int, last_loss: float | None
) -> dict[str, float]:
    """What a finished run comes to: of the steps that were kept, over the time spent training them.

    `summary/mfu` is by the causal convention, and absent where the device's peak is not known.
    """
    tokens = step * plan.tokens_per_step
    found: dict[str, float | None] = {
        "summary/step": step,
        "summary/loss": last_loss,
        "summary/tokens": tokens,
        "summary/wall_s": status.time.wall_s,
    }
    if status.time.training_s > 0:
        rate = tokens / status.time.training_s
        found["summary/tokens_per_second"] = rate
        # What the workers found on the device counts, also where they found no peak for it.
        planned = plan.peak_flops_per_device
        peak = status.measured.get("peak_flops_per_device", planned)
        if isinstance(peak, int | float) and peak > 0:
            achieved = rate * plan.flops_per_token.causal
            found["summary/mfu"] = achieved / (peak * plan.world_size)
    return {key: float(value) for key, value in found.items() if value is not None}
