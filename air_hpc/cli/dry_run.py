"""`--dry-run`: the config, the plan and the exact script; nothing is written or submitted."""

from __future__ import annotations

from collections.abc import Sequence

from air_hpc.cli.composing import Task, Tasks, common_overrides, launch_tasks, sweep_label
from air_hpc.cli.output import note, print_json, problem_json, say, tell_warnings
from air_hpc.errors import EXIT_OK


def show_dry_run(made: Tasks, *, as_json: bool) -> int:
    """Print what `run` would do; the exit code."""
    from air_hpc.cli.plan import describe
    from air_hpc.config.freeze import dump_yaml, to_plain
    from air_hpc.launch.submit import dry_run
    from air_hpc.plan.report import plan_json

    scripts = dry_run(launch_tasks(made.tasks))
    if as_json:
        print_json(
            {
                "dry_run": True,
                "runs": [
                    {
                        "overrides": list(task.overrides),
                        "config": to_plain(task.spec),
                        "plan": plan_json(task.plan, task.spec),
                    }
                    for task in made.tasks
                ],
                "script": scripts,
                "warnings": [problem_json(problem) for problem in made.warnings],
            }
        )
        return EXIT_OK
    tell_warnings(made.warnings)
    first = made.tasks[0]
    of = f" (the first of {len(made.tasks)} runs)" if len(made.tasks) > 1 else ""
    say(f"# config{of}")
    say(dump_yaml(to_plain(first.spec)).rstrip())
    say(f"\n# plan{of}")
    say(describe(first))
    if len(made.tasks) > 1:
        _show_sweep_overrides(made.tasks)
    say("\n# script")
    say(scripts.rstrip())
    note("Nothing was written and nothing was submitted (--dry-run).")
    return EXIT_OK


def _show_sweep_overrides(tasks: Sequence[Task]) -> None:
    common = common_overrides(tasks)
    say("\n# runs of the sweep")
    for number, task in enumerate(tasks):
        say(f"{number:>5}  {sweep_label(task, common)}")
