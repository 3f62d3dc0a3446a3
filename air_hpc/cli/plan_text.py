"""A plan's time, search and scaling as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

from air_hpc.cli.output import print_table, say
from air_hpc.cli.texts import UNKNOWN, duration, rate, ratio, scaled, size
from air_hpc.config.spec import RunSpec
from air_hpc.plan.candidate import Candidate, Found
from air_hpc.plan.outlook import Outlook
from air_hpc.plan.report import PARTS, differences
from air_hpc.plan.scaling import Answer, Row
from air_hpc.plan.schedule import stages_per_rank
from air_hpc.plan.step_time import StepTime
from air_hpc.plan.types import MESH_AXES, Mesh


def axes_text(mesh: Mesh) -> str:
    """The axes that divide anything, outermost first."""
    axes = [(axis, getattr(mesh, axis)) for axis in (*MESH_AXES, "ep")]
    used = [f"{axis} {degree}" for axis, degree in axes if degree > 1]
    return " × ".join(used) if used else "one rank"


def precise(seconds: float) -> str:
    """A step's time, with three digits where it is short."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def time_rows(made: Outlook, spec: RunSpec) -> Iterable[tuple[str, str]]:
    """A step's time by its parts, what it comes to, and what failures take."""
    if made.step is None:
        yield "step time", f"{UNKNOWN}: {made.unknown}"
    else:
        yield (
            "step time",
            f"{precise(made.step.total_s)} predicted; {rate(made.tokens_per_s)} tokens/s",
        )
        for name, text in parts_text(made.step):
            yield f"  {name}", text
    yield (
        "MFU",
        (
            UNKNOWN
            if made.mfu is None
            else f"{ratio(made.mfu.causal)} causal, {ratio(made.mfu.palm)} palm"
        ),
    )
    if made.training_s is not None:
        yield "training", _training(made, spec)
    if made.ettr is not None:
        every = (
            ""
            if made.save_interval_s is None
            else (f", saved every {duration(made.save_interval_s)}")
        )
        yield "expected ETTR", f"{ratio(made.ettr)}{every} ({_failures(spec)})"


def parts_text(step: StepTime) -> Iterable[tuple[str, str]]:
    """The parts that take anything, the largest first."""
    parts = [(PARTS[part.name], getattr(step, part.name)) for part in fields(step)]
    for name, seconds in sorted(parts, key=lambda pair: -pair[1]):
        if seconds >= 0.001 * step.total_s:
            yield name, f"{ratio(seconds / step.total_s)}, {precise(seconds)}"


def _training(made: Outlook, spec: RunSpec) -> str:
    text = f"{scaled(made.target_tokens, '')} tokens in {duration(made.training_s)}"
    if made.expected_s is not None:
        text += f", {duration(made.expected_s)} with failures"
    text += f"; {scaled(made.device_hours, '')} device-hours"
    if made.cost is not None:
        text += f", {made.cost:,.0f} at {spec.accelerator.cost_per_device_hour:g} each"
    return text


def _failures(spec: RunSpec) -> str:
    return f"{spec.checkpoint.failures_per_node_day:g} failures a node and day, restarts of 5 min"


def show_search(found: Found, spec: RunSpec) -> None:
    """The winner against the next two and against what the keys alone would have been."""
    order = (
        "predicted step time"
        if found.by_time
        else (f"idle and repeated compute, then bytes sent ({found.reason})")
    )
    say(f"search        {found.tried:,} layouts, {found.too_big:,} of those looked at do not fit;"
        f" ranked by {order}")  # fmt: skip
    best = found.best
    if best is None:
        return
    say(f"  chosen      {_layout(best, spec)}")
    for one in found.ranked[1:]:
        say(f"  next        {_layout(one, spec)}")
        _say_differences(best, one)
    if found.asked is None:
        say("  no search   the keys alone make no mesh that is valid")
    elif same(found.asked, best):
        say("  no search   the keys alone come to the same")
    else:
        has = spec.accelerator.memory_bytes
        over = has is not None and found.asked.memory_bytes > has
        say(f"  no search   {_layout(found.asked, spec)}{' (does not fit)' if over else ''}")
        _say_differences(best, found.asked)


def same(one: Candidate, other: Candidate) -> bool:
    """Whether two layouts are one."""
    return one.overrides() == other.overrides()


def _layout(one: Candidate, spec: RunSpec) -> str:
    used = one.parallelism
    said = [axes_text(one.mesh), f"micro-batch {one.micro_batch_size}"]
    if one.mesh.pp > 1:
        loops = stages_per_rank(used)
        said.append(f"{used.pp_schedule}{f' of {loops} stages a rank' if loops > 1 else ''}")
    if used.recompute != "none":
        said.append(f"recompute {used.recompute}")
    if one.mesh.pp == 1 and one.mesh.shard_size > 1 and not used.reshard_after_forward:
        said.append("weights kept gathered")
    speed = "" if one.step_s is None else f"{precise(one.step_s)} a step, "
    has = spec.accelerator.memory_bytes
    room = size(one.memory_bytes) + ("" if has is None else f" of {size(has)}")
    return f"{', '.join(said)}: {speed}{room}"


def _say_differences(best: Candidate, one: Candidate) -> None:
    if best.step is None or one.step is None or best.step_s is None or one.step_s is None:
        return
    share = one.step_s / best.step_s - 1
    parts = [f"{name} {seconds:+.3g} s" for name, seconds in differences(best.step, one.step)]
    say(f"              {100 * share:+.1f} %{': ' if parts else ''}{', '.join(parts)}")


def show_scaling(rows: Sequence[Row], *, cost: bool) -> None:
    """One line for each number of nodes."""
    titles = ["NODES", "MESH", "MICRO", "MEMORY/RANK", "STEP", "TOKENS/S", "MFU", "EFFICIENCY"]
    titles += ["TIME", "DEVICE-HOURS", *(["COST"] if cost else []), ""]
    shown = [_line(row, cost=cost) for row in rows]
    if not any(line[-1] for line in shown):
        titles, shown = titles[:-1], [line[:-1] for line in shown]
    print_table(titles, shown, right=tuple(t for t in titles if t not in ("MESH", "")))


def _line(row: Row, *, cost: bool) -> list[str]:
    plan, made = row.plan, row.outlook
    if plan is None or made is None:
        blank = ["-"] * (10 if cost else 9)
        return [f"{row.nodes:,}", *blank, row.problem or ""]
    return [
        f"{row.nodes:,}",
        axes_text(plan.mesh),
        str(plan.micro_batch_size),
        size(plan.memory_per_rank.total_bytes),
        UNKNOWN if made.step is None else precise(made.step.total_s),
        rate(made.tokens_per_s),
        UNKNOWN if made.mfu is None else ratio(made.mfu.causal),
        "-" if row.efficiency is None else ratio(row.efficiency),
        duration(row.takes_s),
        scaled(made.device_hours, ""),
        *([UNKNOWN if made.cost is None else f"{made.cost:,.0f}"] if cost else []),
        row.problem or (f"time {UNKNOWN}: {made.unknown}" if made.unknown else ""),
    ]


def show_answer(answer: Answer) -> None:
    """How many nodes."""
    if answer.row is None:
        say(f"how many nodes: {answer.said}")
        return
    made, nodes = answer.row.outlook, answer.row.nodes
    assert made is not None
    price = "" if made.cost is None else f", {made.cost:,.0f}"
    say(f"how many nodes: {nodes:,} ({answer.said}): {duration(answer.row.takes_s)}{price}")
