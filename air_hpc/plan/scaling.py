"""The same run on several numbers of nodes, and how many of them a deadline or a budget asks for.

The global batch stays as it is (strong scaling), so tokens a step do too; degrees that are `auto`
are filled anew for each number, and with parallelism=auto each is searched for. A number on which
the run is not valid or does not fit has a row that says so. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from air_hpc.config.spec import RunSpec
from air_hpc.plan.make import make_plan
from air_hpc.plan.outlook import Outlook, outlook
from air_hpc.plan.search import resolve_auto
from air_hpc.plan.types import Plan

DEFAULT_NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""What is tried where a question is asked without --nodes."""


@dataclass(frozen=True)
class Row:
    """One number of nodes. `problem` says why there is no plan, or that it does not fit; `speedup`
    and `efficiency` are against the first row that has a time."""

    nodes: int
    spec: RunSpec | None = None
    plan: Plan | None = None
    outlook: Outlook | None = None
    problem: str | None = None
    speedup: float | None = None
    efficiency: float | None = None

    @property
    def usable(self) -> bool:
        """Whether it would run, and how fast is known."""
        return self.problem is None and self.outlook is not None and bool(self.outlook.step)

    @property
    def takes_s(self) -> float | None:
        """Seconds to the target, with failures where their rate is known."""
        if self.outlook is None:
            return None
        return self.outlook.expected_s or self.outlook.training_s


@dataclass(frozen=True)
class Answer:
    """The row that a deadline or a budget asks for (None: none does), and a sentence."""

    row: Row | None
    said: str


def scale(
    spec: RunSpec,
    nodes: Iterable[int],
    overrides: Collection[str] = (),
    *,
    target_tokens: int | None = None,
    measured_flops_per_s: float | None = None,
) -> tuple[Row, ...]:
    """A row for each number of nodes, in the order given."""
    rows = [_row(spec, number, overrides, target_tokens, measured_flops_per_s) for number in nodes]
    first = next((row for row in rows if row.usable), None)
    return tuple(row if first is None else _against(row, first) for row in rows)


def _row(
    spec: RunSpec,
    nodes: int,
    overrides: Collection[str],
    target_tokens: int | None,
    measured: float | None,
) -> Row:
    on = replace(spec, launch=replace(spec.launch, nodes=nodes))
    decided, _, problems = resolve_auto(on, overrides, measured_flops_per_s=measured)
    plan = None
    if not problems:
        plan, problems = make_plan(
            decided, local_cpu_count=1, to_run=False, measured_flops_per_s=measured
        )
    stops = [problem for problem in problems if not problem.warning]
    if plan is None or stops:
        said = stops[0].message if stops else "is not valid"
        return Row(nodes, problem=said)
    made = outlook(decided, plan, target_tokens=target_tokens, measured_flops_per_s=measured)
    has, needs = decided.accelerator.memory_bytes, plan.memory_per_rank.total_bytes
    problem = None
    if has is not None and needs > has:
        problem = f"needs {needs / 1e9:.0f} GB a rank, the device has {has / 1e9:.0f} GB"
    return Row(nodes, decided, plan, made, problem)


def _against(row: Row, first: Row) -> Row:
    if not row.usable or row.outlook is None or first.outlook is None:
        return row
    mine, its = row.outlook.tokens_per_s, first.outlook.tokens_per_s
    if mine is None or its is None:
        return row
    speedup = mine / its
    return replace(row, speedup=speedup, efficiency=speedup * first.nodes / row.nodes)


def how_many(
    rows: Sequence[Row], *, deadline_s: float | None = None, budget: float | None = None
) -> Answer:
    """The fewest nodes that keep a deadline; the most that a budget pays for; with both, the fewest
    that keep both."""
    usable = [row for row in rows if row.usable]
    if not usable:
        return Answer(None, "no number of nodes that was tried gives a run with a known time")
    if budget is not None and all(_cost(row) is None for row in usable):
        return Answer(None, "the cost is unknown: set accelerator.cost_per_device_hour")
    kept = [
        row
        for row in usable
        if (deadline_s is None or (row.takes_s or 0.0) <= deadline_s)
        and (budget is None or (_cost(row) or 0.0) <= budget)
    ]
    if not kept:
        fastest = min(usable, key=lambda row: row.takes_s or 0.0)
        said = f"none of those tried does; the fastest is {fastest.nodes} nodes"
        if budget is not None:
            cheapest = min(usable, key=lambda row: _cost(row) or 0.0)
            said += f", the cheapest {cheapest.nodes}"
        return Answer(None, said)
    if deadline_s is not None:
        chosen = min(kept, key=lambda row: row.nodes)
        return Answer(chosen, "the fewest nodes that do")
    chosen = min(kept, key=lambda row: row.takes_s or 0.0)
    return Answer(chosen, "the fastest that the budget pays for")


def _cost(row: Row) -> float | None:
    return None if row.outlook is None else row.outlook.cost
