"""What is told after runs were submitted or started: their ids, and what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from air_hpc.cli.composing import Task, common_overrides, sweep_label
from air_hpc.cli.output import print_table, problem_json, say
from air_hpc.errors import Problem
from air_hpc.runs.find import default_runs_dir

if TYPE_CHECKING:
    from air_hpc.launch.result import Result, Submitted


def submitted_json(result: Result, warnings: Sequence[Problem], *, single: bool) -> dict[str, Any]:
    """The one object on stdout: with `single` the run itself, else a list of runs."""
    rows = [_row(run) for run in result.runs]
    common = {
        "submission": result.submission_id,
        "complete": result.complete,
        "warnings": [problem_json(problem) for problem in warnings],
    }
    return {**rows[0], **common} if single else {**common, "runs": rows}


def _row(run: Submitted) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "state": "PENDING",
        "job_id": run.job,
        "job_ids": list(run.job_ids),
        "run_dir": str(run.run_dir),
    }


def tell_submitted(result: Result, tasks: Sequence[Task] | None, kind: str) -> None:
    """The ids, and what to type next."""
    verb = "Submitted" if kind == "slurm" else "Started"
    first = result.runs[0]
    if len(result.runs) == 1:
        job = f" as Slurm job {first.job}" if kind == "slurm" and first.job else ""
        say(f"{verb} {first.run_id}{job}")
        say(f"  in {first.run_dir}")
    else:
        _show_table(result, tasks, kind)
        say(f"{verb} {len(result.runs)} runs as {result.submission_id}")
    if not result.complete:
        say(f"Some wait for room in the queue. Later: {_ourselves('run')} --resume "
            f"{result.submission_id}{_where(first)}")  # fmt: skip
    name = first.run_id
    where = _where(first)
    cancel = name if len(result.runs) == 1 else f"--all-of {result.submission_id}"
    say("Next:")
    say(f"  {_ourselves('status')} {name if len(result.runs) == 1 else ''}{where}".rstrip())
    say(f"  {_ourselves('logs')} {name} --follow{where}")
    say(f"  {_ourselves('cancel')} {cancel}{where}")


def _show_table(result: Result, tasks: Sequence[Task] | None, kind: str) -> None:
    common = common_overrides(tasks or ())
    labels = [sweep_label(task, common) for task in tasks] if tasks else [""] * len(result.runs)
    rows = [
        (run.run_id, (run.job or "waits") if kind == "slurm" else "here", label)
        for run, label in zip(result.runs, labels, strict=True)
    ]
    print_table(("RUN", "JOB", "OVERRIDES"), rows)


def _ourselves(verb: str) -> str:
    return f"python -m air_hpc {verb}"


def _where(run: Submitted) -> str:
    """The option that names the runs folder, where it is not the one that is looked in anyway."""
    folder = Path(run.run_dir).parent
    same = folder.resolve() == default_runs_dir().resolve()
    return "" if same else f" --runs-dir {shlex.quote(str(folder))}"
