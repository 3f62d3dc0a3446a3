"""`plan`: what a run would take, before anything is submitted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from air_hpc.cli.composing import (
    CONFIG_OPTIONS,
    OVERRIDES_HELP,
    Task,
    Tasks,
    common_overrides,
    make_tasks,
    print_config,
    sweep_label,
)
from air_hpc.cli.options import JSON, Parsed, option_lines, parse
from air_hpc.cli.output import pairs, print_json, print_table, problem_json, say, tell_warnings
from air_hpc.cli.plan_asks import ASKS, Asks, read_asks
from air_hpc.cli.plan_text import (
    axes_text,
    precise,
    show_answer,
    show_scaling,
    show_search,
    time_rows,
)
from air_hpc.cli.texts import UNKNOWN, duration, ratio, scaled, size
from air_hpc.errors import EXIT_OK, BadInput
from air_hpc.plan.candidate import Found
from air_hpc.plan.outlook import Outlook, outlook
from air_hpc.plan.report import plan_json, scaling_json
from air_hpc.plan.search import search
from air_hpc.recovery.reliability import interval_s, mttf_s

OPTIONS = (JSON, *ASKS, *CONFIG_OPTIONS)

HELP_TEXT = f"""\
usage: python -m air_hpc plan [overrides] [options]

What a run would take: parameters, FLOP for each token by both conventions, the mesh, batch and
accumulation, memory of the fullest rank by part, the time of a step by what takes it, and what the
tokens cost. Arithmetic only: nothing is started, no GPU and no Slurm is needed. What is not known
is said to be unknown. How it is worked out, and how far it is from published runs: docs/planner.md.

parallelism=auto finds the fastest layout that fits; keys that are given stay as they are.

{OVERRIDES_HELP}

{option_lines(OPTIONS)}

  python -m air_hpc plan
  python -m air_hpc plan model=llama_70b parallelism=auto accelerator=h100_sxm \\
      train.precision=bf16 train.compile=true train.global_batch_size=512 \\
      launch.nodes=32 launch.devices_per_node=8 data.sequence_length=8192
  python -m air_hpc plan ... --nodes 4,8,16,32 --target-tokens 1T
  python -m air_hpc plan ... --target-tokens 1T --deadline 30d --budget 2M \\
      accelerator.cost_per_device_hour=2.5 checkpoint.failures_per_node_day=0.0065
  python -m air_hpc plan -m model=llama_8b parallelism=fsdp launch.nodes=2,4 --json

Conventions: `causal` counts the attention that a causal mask leaves, `palm` all of it. Recomputed
FLOP count in neither. With -m and --json: {{"runs": [...]}}. The scaling table keeps the global
batch as it is; its times are with failures where checkpoint.failures_per_node_day is given.
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
    asks, made = _asked(parsed)
    if asks.scaling:
        return _scaling(made.tasks[0], made, asks, as_json=parsed.flag("json"))
    if parsed.flag("json"):
        return _json(parsed, made, asks)
    tell_warnings(made.warnings)
    if parsed.flag("multirun"):
        show_sweep(made.tasks)
        return EXIT_OK
    task = made.tasks[0]
    say(describe(task, asks.target_tokens))
    found = task.found or (_free_search(task) if parsed.flag("search") else None)
    if found is not None:
        show_search(found, task.spec)
    if parsed.flag("trace"):
        from air_hpc.cli.plan_trace import show_trace, traced

        show_trace(traced(task, parsed.whole("rank") or 0), task)
    return EXIT_OK


def _asked(parsed: Parsed) -> tuple[Asks, Tasks]:
    """The options and the tasks; BadInput with what is wrong with either."""
    asks, problems = read_asks(parsed)
    if asks.scaling and parsed.flag("multirun"):
        problems += BadInput.single("-m", "", "a sweep has no scaling table").problems
    try:
        made = make_tasks(parsed, to_run=False)
    except BadInput as error:
        raise BadInput([*problems, *error.problems]) from None
    if problems:
        raise BadInput(problems)
    return asks, made


def _json(parsed: Parsed, made: Tasks, asks: Asks) -> int:
    warnings = [problem_json(problem) for problem in made.warnings]
    bodies = []
    for task in made.tasks:
        found = task.found or (_free_search(task) if parsed.flag("search") else None)
        bodies.append(plan_json(task.plan, task.spec, outlook_of(task, asks.target_tokens), found))
        if parsed.flag("trace"):
            from air_hpc.cli.plan_trace import trace_json, traced

            bodies[-1]["trace"] = trace_json(traced(task, parsed.whole("rank") or 0), task)
    print_json(
        {"runs": bodies, "warnings": warnings}
        if parsed.flag("multirun")
        else {**bodies[0], "warnings": warnings}
    )
    return EXIT_OK


def _scaling(task: Task, made: Tasks, asks: Asks, *, as_json: bool) -> int:
    from air_hpc.plan.scaling import DEFAULT_NODES, how_many, scale

    rows = scale(
        task.asked,
        asks.nodes or DEFAULT_NODES,
        task.overrides,
        target_tokens=asks.target_tokens,
        measured_flops_per_s=task.measured_flops_per_s,
    )
    answer = None
    if asks.how_many:
        answer = how_many(rows, deadline_s=asks.deadline_s, budget=asks.budget)
    if as_json:
        warnings = [problem_json(problem) for problem in made.warnings]
        print_json({**scaling_json(rows, answer), "warnings": warnings})
        return EXIT_OK
    show_scaling(rows, cost=task.spec.accelerator.cost_per_device_hour is not None)
    if answer is not None:
        show_answer(answer)
    return EXIT_OK


def _free_search(task: Task) -> Found:
    """What would be fastest with nothing fixed but the command line."""
    given = {word.lstrip("+~").partition("=")[0] for word in task.overrides}
    fixed = frozenset(key for key in given if key.startswith("parallelism."))
    return search(task.spec, fixed, measured_flops_per_s=task.measured_flops_per_s)


def outlook_of(task: Task, target_tokens: int | None = None) -> Outlook:
    """What a task's plan comes to."""
    return outlook(
        task.spec,
        task.plan,
        target_tokens=target_tokens,
        measured_flops_per_s=task.measured_flops_per_s,
    )


def describe(task: Task, target_tokens: int | None = None) -> str:
    """One plan as text."""
    plan, spec = task.plan, task.spec
    memory, device = plan.memory_per_rank, spec.accelerator.memory_bytes
    held = [
        ("weights", memory.weights_bytes),
        ("gradients", memory.gradients_bytes),
        ("optimizer", memory.optimizer_bytes),
        ("activations", memory.activations_bytes),
        ("logits", memory.logits_bytes),
        ("buffers", memory.buffers_bytes),
        ("margin", memory.margin_bytes),
        ("not at once", -memory.not_at_once_bytes),
    ]
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
                  f"tokens; {saves_text(task)}"),
        ("memory/rank", _memory_total(memory.total_bytes, device)),
        *((f"  {name}", _signed_size(count)) for name, count in held if count),
        ("peak", peak_text(plan.peak_flops_per_device, spec.accelerator.peak_source,
                           spec.train.precision)),
        *time_rows(outlook_of(task, target_tokens), spec),
        ("limits", limits_text(task)),
        ("metrics", plan.tracking_uri or "kept in the run directory, for the verb sync"),
    ]  # fmt: skip
    return pairs(rows)


def _signed_size(count: int) -> str:
    return size(count) if count > 0 else f"-{size(-count)}"


def _memory_total(total: int, device: int | None) -> str:
    if device is None:
        return f"{size(total)} (the device's memory is {UNKNOWN})"
    return f"{size(total)}, {ratio(total / device)} of the device's {size(device)}"


def mesh_text(task: Task) -> str:
    """The mesh with the axes that divide anything, outermost first."""
    text, ranks = axes_text(task.plan.mesh), task.plan.world_size
    return f"{text} = {ranks} ranks" if "×" in text else text


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


def saves_text(task: Task) -> str:
    """How often state is saved; where it is `auto`, from what."""
    spec = task.spec.checkpoint
    if spec.interval_steps != "auto":
        return f"saved every {spec.interval_steps} steps"
    rate, nodes = spec.failures_per_node_day, task.plan.nodes
    bounds = f"{duration(spec.min_interval_s)} to {duration(spec.max_interval_s)}"
    if rate is None:
        every = interval_s(None, nodes, None, low_s=spec.min_interval_s, high_s=spec.max_interval_s)
        return (
            f"saved every {duration(every)}: the rate of failures is {UNKNOWN} "
            "(checkpoint.failures_per_node_day)"
        )
    apart = mttf_s(nodes, rate)
    apart_text = "never" if math.isinf(apart) else f"every {duration(apart)}"
    return (
        f"saved every {bounds}, as measured saves and {rate:g} failures a node and day say "
        f"(this run: {apart_text})"
    )


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
            UNKNOWN if task.plan.step_time_s is None else precise(task.plan.step_time_s),
        )
        for task in tasks
    ]
    numbers = ("RANKS", "FLOP/TOKEN", "MEMORY/RANK", "TOKENS/STEP", "STEP")
    titles = ("RUN", "PARAMETERS", "MESH", *numbers)
    print_table(titles, rows, right=("PARAMETERS", *numbers))
