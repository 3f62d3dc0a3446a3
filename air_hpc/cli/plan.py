"""`plan`: what a run would take."""

from __future__ import annotations

from collections.abc import Sequence

from air_hpc.cli.composing import (
    CONFIG_OPTIONS,
    OVERRIDES_HELP,
    Task,
    common_overrides,
    make_tasks,
    print_config,
    sweep_label,
)
from air_hpc.cli.options import JSON, option_lines, parse
from air_hpc.cli.output import pairs, print_json, print_table, problem_json, say, tell_warnings
from air_hpc.cli.texts import UNKNOWN, duration, ratio, scaled, size
from air_hpc.errors import EXIT_OK
from air_hpc.plan.report import plan_json
from air_hpc.plan.types import MESH_AXES

OPTIONS = (JSON, *CONFIG_OPTIONS)

HELP_TEXT = f"""\
usage: python -m air_hpc plan [overrides] [options]

What a run would take: parameters, FLOP for each token by both conventions, the mesh, batch and
accumulation, memory of the fullest rank by part, and the device's peak. Arithmetic only: nothing is
started, no GPU and no Slurm is needed. What is not known is said to be unknown.

{OVERRIDES_HELP}

{option_lines(OPTIONS)}

  python -m air_hpc plan
  python -m air_hpc plan model=llama_70b parallelism=fsdp_tp parallelism.tp=8 \\
      accelerator=h100_sxm launch.nodes=16 launch.devices_per_node=8 data.sequence_length=4096
  python -m air_hpc plan -m model=llama_8b parallelism=fsdp launch.nodes=2,4 --json

Conventions: `causal` counts the attention that a causal mask leaves, `palm` all of it. Recomputed
FLOP count in neither. With -m and --json: {{"runs": [...]}}.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the verb."""
    parsed = parse(arguments, OPTIONS)
    if parsed.flag("help"):
        say(HELP_TEXT.rstrip())
        return EXIT_OK
    if parsed.text("cfg"):
        print_config(parsed)
        return EXIT_OK
    made = make_tasks(parsed, to_run=False)
    if parsed.flag("json"):
        warnings = [problem_json(problem) for problem in made.warnings]
        bodies = [plan_json(task.plan, task.spec) for task in made.tasks]
        print_json(
            {"runs": bodies, "warnings": warnings}
            if parsed.flag("multirun")
            else {**bodies[0], "warnings": warnings}
        )
        return EXIT_OK
    tell_warnings(made.warnings)
    if parsed.flag("multirun"):
        show_sweep(made.tasks)
    else:
        say(describe(made.tasks[0]))
    return EXIT_OK


def describe(task: Task) -> str:
    """One plan as text."""
    plan, spec = task.plan, task.spec
    memory, device = plan.memory_per_rank, spec.accelerator.memory_bytes
    rows = [
        ("model", f"{spec.model.name}: {scaled(plan.counts.parameters, '')} parameters, "
                  f"{scaled(plan.counts.matmul_parameters, '')} in matrix products"),
        ("FLOP/token", f"{scaled(plan.flops_per_token.causal, 'FLOP')} causal, "
                       f"{scaled(plan.flops_per_token.palm, 'FLOP')} palm (forward and backward)"),
        ("mesh", f"{mesh_text(task)}, on {plan.nodes} node{'' if plan.nodes == 1 else 's'} × "
                 f"{plan.devices_per_node} {spec.accelerator.name}{spares_text(task)}"),
        ("batch", f"{spec.train.global_batch_size} sequences of {spec.data.sequence_length} tokens "
                  f"= {plan.tokens_per_step:,} tokens a step; on each rank {plan.micro_batch_size} "
                  f"at once, {plan.accumulation_steps} times"),
        ("steps", f"{spec.train.steps:,} = {scaled(plan.tokens_per_step * spec.train.steps, '')} "
                  f"tokens; saved every {spec.checkpoint.interval_steps} steps"),
        ("memory/rank", _memory_total(memory.total_bytes, device)),
        ("  weights", size(memory.weights_bytes)),
        ("  gradients", size(memory.gradients_bytes)),
        ("  optimizer", size(memory.optimizer_bytes)),
        ("  activations", size(memory.activations_bytes)),
        ("peak", peak_text(plan.peak_flops_per_device, spec.accelerator.peak_source,
                           spec.train.precision)),
        ("step time", duration(plan.step_time_s) if plan.step_time_s is not None
                      else f"{UNKNOWN} (not calibrated)"),
        ("MFU", mfu_text(task)),
        ("limits", limits_text(task)),
        ("metrics", plan.tracking_uri or "kept in the run directory, for the verb sync"),
    ]  # fmt: skip
    return pairs(rows)


def _memory_total(total: int, device: int | None) -> str:
    if device is None:
        return f"{size(total)} (the device's memory is {UNKNOWN})"
    return f"{size(total)}, {ratio(total / device)} of the device's {size(device)}"


def mesh_text(task: Task) -> str:
    """The mesh with the axes that divide anything, outermost first."""
    mesh = task.plan.mesh
    axes = [(axis, getattr(mesh, axis)) for axis in (*MESH_AXES, "ep")]
    used = [f"{axis} {degree}" for axis, degree in axes if degree > 1]
    if len(used) < 2:
        return used[0] if used else "one rank"
    return f"{' × '.join(used)} = {task.plan.world_size} ranks"


def spares_text(task: Task) -> str:
    """The nodes that are asked for beside those that train; empty where there are none."""
    spares = task.spec.allocated_nodes - task.plan.nodes
    if not spares:
        return ""
    return f", and {spares} spare node{'' if spares == 1 else 's'}"


def peak_text(peak: float | None, source: str, precision: str) -> str:
    """A device's peak with its source, or that there is none."""
    if peak is None:
        return f"{UNKNOWN} in {precision}: no MFU until it is measured"
    return f"{scaled(peak, 'FLOP/s')} dense in {precision} ({source})"


def mfu_text(task: Task) -> str:
    """The predicted MFU in both conventions."""
    mfu = plan_json(task.plan, task.spec)["mfu"]
    if mfu["causal"] is None:
        return UNKNOWN
    return f"{ratio(mfu['causal'])} causal, {ratio(mfu['palm'])} palm"


def limits_text(task: Task) -> str:
    """The time limit, and how far ahead of it the run saves."""
    limit = task.spec.launch.time_limit_min
    if task.spec.cluster.kind == "local" and task.plan.nodes > 1:
        return "this machine is one node; to start it: cluster=slurm"
    if task.spec.cluster.kind == "local" and limit is None:
        return "none on this machine"
    told = "the site's default" if limit is None else f"{limit} min"
    return f"time {told}; told to save {duration(task.plan.lead_s)} ahead of it"


def show_sweep(tasks: Sequence[Task]) -> None:
    """One line a task."""
    common = common_overrides(tasks)
    rows = [
        (
            sweep_label(task, common),
            scaled(task.plan.counts.parameters, ""),
            mesh_text(task),
            str(task.plan.world_size),
            scaled(task.plan.flops_per_token.causal, ""),
            size(task.plan.memory_per_rank.total_bytes),
            f"{task.plan.tokens_per_step:,}",
        )
        for task in tasks
    ]
    titles = ("RUN", "PARAMETERS", "MESH", "RANKS", "FLOP/TOKEN", "MEMORY/RANK", "TOKENS/STEP")
    print_table(titles, rows, right=tuple(t for t in titles if t not in ("RUN", "MESH")))
