"""`run`, the verb when none is given: start a run here, or submit it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from air_hpc.cli.composing import (
    CONFIG_OPTIONS,
    OVERRIDES_HELP,
    Task,
    Tasks,
    common_overrides,
    launch_tasks,
    make_tasks,
    print_config,
    sweep_label,
)
from air_hpc.cli.dry_run import show_dry_run
from air_hpc.cli.options import JSON, RUNS_DIR, Option, Parsed, option_lines, parse
from air_hpc.cli.output import note, print_json, problem_json, say, tell_warnings
from air_hpc.cli.site_checks import SiteProblems
from air_hpc.cli.submitted import submitted_json, tell_submitted
from air_hpc.errors import EXIT_OK, BadInput, Problem

if TYPE_CHECKING:
    from air_hpc.config.spec import RunSpec
    from air_hpc.launch.result import Result

OPTIONS = (
    JSON,
    *CONFIG_OPTIONS,
    Option(("--dry-run",), "print config, plan and the exact script; touch nothing"),
    Option(("--detach",), "on this machine: start the run and return at once"),
    Option(
        ("--resume",), "finish an interrupted submission, without doubles", "text", "SUBMISSION"
    ),
    RUNS_DIR,
)

HELP_TEXT = f"""\
usage: python -m air_hpc [run] [overrides] [options]

Trains. With cluster=local (the default) the run starts on this machine and is followed on the
screen; Ctrl-C asks it to save and end. With cluster=slurm it is submitted, and the command returns
at once with the run's id and its job. A sweep (-m) is submitted as arrays; here, its runs go one
after another.

{OVERRIDES_HELP}

{option_lines(OPTIONS)}

  python -m air_hpc                                      the tiny model, here
  python -m air_hpc experiment=smoke train.steps=50 launch.devices_per_node=2
  python -m air_hpc cluster=slurm model=llama_1b parallelism=fsdp launch.nodes=2 --dry-run
  python -m air_hpc cluster=slurm -m optimizer.lr=1e-3,3e-4 train.seed=1,2
  python -m air_hpc --cfg job model=llama_8b             the composed config

Exit codes: 0 finished or submitted, 1 the environment failed, 2 bad input (nothing was started),
93 the run stopped for a reason that another start would meet again, 130 ended by Ctrl-C.
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
    if parsed.text("resume") is not None:
        return _resume(parsed)
    made = make_tasks(_with_runs_dir(parsed), more=_script_problems, when_wrong=SiteProblems().of)
    if parsed.flag("dry_run"):
        return show_dry_run(made, as_json=parsed.flag("json"))
    return _start(made, parsed)


def _with_runs_dir(parsed: Parsed) -> Parsed:
    """`--runs-dir` means the same as `runs_dir=` here."""
    folder = parsed.text("runs_dir")
    if folder is None:
        return parsed
    quoted = "'" + folder.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return Parsed(parsed.values, (*parsed.rest, f"runs_dir={quoted}"))


def _script_problems(spec: RunSpec) -> list[Problem]:
    from air_hpc.launch import options, script

    return [*options.problems(spec), *script.problems(spec)]


def _start(made: Tasks, parsed: Parsed) -> int:
    from air_hpc.launch.submit import submit

    progress = _prepared if sys.stderr.isatty() and len(made.tasks) > 1 else None
    result = submit(launch_tasks(made.tasks), progress=progress)
    warnings = tuple(dict.fromkeys((*made.warnings, *result.warnings)))
    if not parsed.flag("json"):
        tell_warnings(warnings)
    kind = made.tasks[0].spec.cluster.kind
    if kind != "slurm" and not parsed.flag("detach"):
        return _follow(result, made.tasks, warnings, parsed)
    if parsed.flag("json"):
        print_json(submitted_json(result, warnings, single=not parsed.flag("multirun")))
    else:
        tell_submitted(result, made.tasks, kind)
    return EXIT_OK


def _prepared(done: int, total: int) -> None:
    end = "\r\033[K" if done == total else ""
    sys.stderr.write(f"\rprepared {done} of {total} runs{end}")
    sys.stderr.flush()


def _follow(
    result: Result, tasks: Sequence[Task], warnings: Sequence[Problem], parsed: Parsed
) -> int:
    """Follow the runs of this machine one after another; the worst end gives the exit code."""
    from air_hpc.cli import foreground
    from air_hpc.cli.summary import show_summary
    from air_hpc.rundir.layout import RunDir
    from air_hpc.runs.summary import summarize

    as_json = parsed.flag("json")
    tell = note if as_json else say
    runs = [RunDir(run.run_dir) for run in result.runs]
    summaries, code = [], EXIT_OK
    common = common_overrides(tasks)
    for number, (run, task) in enumerate(zip(runs, tasks, strict=True)):
        place = ""
        if len(runs) > 1:
            place = f" ({number + 1} of {len(runs)}: {sweep_label(task, common)})"
        if number > 0:
            tell("")
        tell(f"Run {run.run_id}{place} in {run.path}")
        outcome = foreground.follow(
            run, task.spec.train.steps, others=runs[number + 1 :], on_stderr=as_json
        )
        code = max(code, outcome.exit_code)
        summary = summarize(run)
        summaries.append(summary)
        if not as_json:
            show_summary(summary)
        if outcome.left:
            break
    if as_json:
        bodies = [summary.to_json() for summary in summaries]
        told = [problem_json(problem) for problem in warnings]
        multirun = parsed.flag("multirun")
        print_json(
            {"submission": result.submission_id, "runs": bodies, "warnings": told}
            if multirun
            else {**bodies[0], "warnings": told}
        )
    return code


def _resume(parsed: Parsed) -> int:
    from air_hpc.launch.submission import load, submission_dir
    from air_hpc.launch.submit import resume_submission
    from air_hpc.runs.find import default_runs_dir

    if parsed.rest:
        raise BadInput.single(
            "--resume",
            " ".join(parsed.rest),
            "an interrupted submission keeps its own config",
            hint="Leave the overrides out; --runs-dir names another folder of runs",
        )
    folder = parsed.text("runs_dir")
    runs_dir = Path(folder).expanduser().absolute() if folder else default_runs_dir()
    record = submission_dir(runs_dir, parsed.text("resume") or "")
    result = resume_submission(record)
    if parsed.flag("json"):
        print_json(submitted_json(result, result.warnings, single=False))
    else:
        tell_warnings(result.warnings)
        known = load(record)
        tell_submitted(result, None, "slurm" if known is None else known.kind)
    return EXIT_OK
