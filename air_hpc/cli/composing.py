"""The options and the work that `run` and `plan` share: overrides in, specs and plans out.

Every problem of the config and of the plan is reported together, each once, however many tasks of
a sweep have it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from air_hpc.cli.options import Option, Parsed
from air_hpc.cli.output import print_json, say
from air_hpc.errors import BadInput, Problem, raise_if_any

if TYPE_CHECKING:
    from air_hpc.config.compose import Composer, SweepTask
    from air_hpc.config.spec import RunSpec
    from air_hpc.launch.prepare import Task as LaunchTask
    from air_hpc.plan.candidate import Found
    from air_hpc.plan.types import Plan

_PROGRESS_FROM_TASKS = 50

CONFIG_OPTIONS = (
    Option(("-cd", "--config-dir"), "a folder of more configs", "text", "DIR"),
    Option(("-cn", "--config-name"), "the root config (default: config)", "text", "NAME"),
    Option(
        ("-c", "--cfg"),
        "print the composed config and do nothing else",
        "text",
        "job",
        ("job", "all", "hydra"),
    ),
    Option(("--resolve",), "with --cfg: fill in interpolations"),
    Option(("-m", "--multirun"), "sweep: every combination of values given as a,b,c"),
)  # fmt: skip

OVERRIDES_HELP = """\
Overrides are Hydra's: group=option (model=llama_8b), key=value (train.steps=100), +key=value to
add, ~key to delete; their order among options does not matter."""


@dataclass(frozen=True)
class Task:
    """One run to be: its overrides, and what they come to.

    `asked` is the spec as it was composed, which differs from `spec` where the planner decided
    parallelism=auto (`found`: how).
    """

    overrides: tuple[str, ...]
    spec: RunSpec
    plan: Plan
    asked: RunSpec
    found: Found | None = None
    measured_flops_per_s: float | None = None


@dataclass(frozen=True)
class Tasks:
    """All tasks of a command line, with the warnings that stop none of them."""

    tasks: tuple[Task, ...]
    warnings: tuple[Problem, ...] = ()


def composer_of(parsed: Parsed) -> Composer:
    """The composer for `--config-dir` and `--config-name`; BadInput where they do not exist."""
    from air_hpc.config.compose import Composer

    return Composer(parsed.text("config_dir"), parsed.text("config_name"))


def require_overrides(words: Sequence[str]) -> None:
    """Refuse words that are no override, such as a verb that is not the first word."""
    from air_hpc.cli.main import VERBS

    problems = []
    for word in words:
        if "=" in word or word.startswith(("~", "+")):
            continue
        hint = "A verb goes first: python -m air_hpc " + word if word in VERBS else ""
        problems.append(Problem("", word, "is no override", "key=value, +key=value, ~key", hint))
    raise_if_any(problems)


def print_config(parsed: Parsed) -> None:
    """`--cfg job`: the composed config as YAML, or with `--json` as an object."""
    which = parsed.text("cfg")
    if which != "job":
        raise BadInput.single(
            "--cfg",
            which,
            "there is no config of Hydra's own here",
            allowed="job",
            hint="Run folders, logs and sweeps are air_hpc's; see runs_dir and -m",
        )
    if parsed.flag("json"):
        from air_hpc.config.freeze import to_plain

        print_json({"config": to_plain(composer_of(parsed).compose(parsed.rest))})
    else:
        text = composer_of(parsed).job_yaml(parsed.rest, resolve=parsed.flag("resolve"))
        say(text.rstrip())


def make_tasks(
    parsed: Parsed,
    *,
    more: Checks | None = None,
    when_wrong: Checks | None = None,
    to_run: bool = True,
) -> Tasks:
    """Compose and plan everything that the command line asks for.

    `more` checks each spec further; `when_wrong` does so where there is a problem already, with
    checks that are made later anyway where there is none. Unless it is `to_run`, what only stops a
    run is a warning.

    Raises BadInput with every problem of every task.
    """
    require_overrides(parsed.rest)
    composer = composer_of(parsed)
    found: dict[Problem, None] = {}
    if parsed.flag("multirun"):
        with _progress() as advance:
            sweep, problems = composer.try_compose_sweep(parsed.rest, advance)
        composed = [(task.overrides, task.spec) for task in sweep]
    else:
        spec, problems = composer.try_compose(parsed.rest)
        composed = [(tuple(parsed.rest), spec)]
    found.update(dict.fromkeys(problems))
    unsure = frozenset(problem.key for problem in problems if not problem.warning)
    tasks = []
    for overrides, spec in composed:
        task, problems = _planned(spec, overrides, unsure, to_run)
        found.update(dict.fromkeys(problems))
        if more is not None:
            found.update(dict.fromkeys(more(spec)))
        if task is not None:
            tasks.append(task)
    if when_wrong is not None and not all(problem.warning for problem in found):
        for _, spec in composed:
            found.update(dict.fromkeys(when_wrong(spec)))
    raise_if_any(found)
    return Tasks(tuple(tasks), tuple(problem for problem in found if problem.warning))


Checks = Callable[["RunSpec"], Sequence[Problem]]
"""More checks of one task's spec."""


def _planned(
    spec: RunSpec, overrides: tuple[str, ...], unsure: frozenset[str], to_run: bool
) -> tuple[Task | None, list[Problem]]:
    from air_hpc.plan.calibration import measured_matmul
    from air_hpc.plan.make import make_plan, threads_per_worker
    from air_hpc.plan.search import resolve_auto

    measured = measured_matmul(spec, threads_per_worker(spec))
    if unsure:
        return None, make_plan(spec, unsure=unsure, to_run=to_run)[1]
    decided, found, problems = resolve_auto(spec, overrides, measured_flops_per_s=measured)
    plan, more = make_plan(decided, to_run=to_run, measured_flops_per_s=measured)
    if plan is None or problems:
        return None, [*problems, *more]
    return Task(overrides, decided, plan, spec, found, measured), more


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A line on stderr while a large sweep is composed; nothing where that is no terminal."""
    shown = False

    def advance(done: int, total: int) -> None:
        nonlocal shown
        if (
            total >= _PROGRESS_FROM_TASKS
            and sys.stderr.isatty()
            and (done % 25 == 0 or done == total)
        ):
            shown = True
            sys.stderr.write(f"\rcomposing {done} of {total} runs")
            sys.stderr.flush()

    try:
        yield advance
    finally:
        if shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def sweep_label(task: SweepTask | Task, common: frozenset[str]) -> str:
    """The overrides that make a task differ from the others of its sweep."""
    return " ".join(text for text in task.overrides if text not in common) or "-"


def common_overrides(tasks: Sequence[Task]) -> frozenset[str]:
    """The overrides that all tasks have."""
    if len(tasks) < 2:
        return frozenset()
    return frozenset.intersection(*(frozenset(task.overrides) for task in tasks))


def launch_tasks(tasks: Sequence[Task]) -> list[LaunchTask]:
    """The tasks as `launch` takes them."""
    from air_hpc.launch.prepare import Task as Made

    return [Made(task.spec, task.plan, task.overrides) for task in tasks]
