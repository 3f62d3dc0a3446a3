"""`status`: how runs stand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from air_hpc.cli.options import JSON, RUNS_DIR, Option, option_lines, parse
from air_hpc.cli.output import note, pairs, print_json, print_table, say
from air_hpc.cli.texts import UNKNOWN, duration, number, or_dash, rate, ratio
from air_hpc.errors import EXIT_OK
from air_hpc.rundir.spool import LOSS, MFU, TOKENS_PER_S
from air_hpc.runs.find import default_runs_dir, find_runs, runs_of_sweep
from air_hpc.runs.status import RunView, view_runs

OPTIONS = (
    JSON,
    RUNS_DIR,
    Option(("--all-of",), "the runs of one sweep", "text", "SWEEP"),
    Option(("--no-slurm",), "ask nobody: what the run directories say alone"),
)

HELP_TEXT = f"""\
usage: python -m air_hpc status [RUN ...] [options]

How runs stand: state, step, attempt, loss, and why one waits or ended. A RUN is an id, a piece of
one, a path, a Slurm job id, or `latest`; none means every run of the folder. Slurm is asked once
for all of them; where it does not answer, the run directories speak alone and the status says so.

{option_lines(OPTIONS)}

  python -m air_hpc status                   every run, one line each
  python -m air_hpc status latest            the newest, in full
  python -m air_hpc status 4711_3 --json     by Slurm's job id, for a script

With --json one RUN gives one object (run_id, state, step, attempt, generation, job_id, nodes,
mlflow_run_id and more; null where not known), several or none give {{"runs": [...]}}.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the verb."""
    parsed = parse(arguments, OPTIONS)
    if parsed.flag("help"):
        say(HELP_TEXT.rstrip())
        return EXIT_OK
    folder = parsed.text("runs_dir")
    runs_dir = Path(folder).expanduser() if folder else default_runs_dir()
    sweep = parsed.text("all_of")
    runs = runs_of_sweep(runs_dir, sweep) if sweep else find_runs(runs_dir, parsed.rest)
    views = view_runs(runs, ask_slurm=not parsed.flag("no_slurm"))
    single = len(parsed.rest) == 1 and sweep is None
    if parsed.flag("json"):
        print_json(views[0].to_json() if single else {"runs": [view.to_json() for view in views]})
    elif single:
        say(describe(views[0]))
    elif views:
        show_table(views)
    else:
        note(f"There are no runs in {runs_dir}. Start one: python -m air_hpc")
    return EXIT_OK


def show_table(views: Sequence[RunView]) -> None:
    """One line a run, the newest last."""
    rows = []
    for view in views:
        metrics = view.progress.metrics if view.progress else {}
        loss = metrics.get(LOSS)
        rows.append(
            (
                view.run.run_id,
                str(view.status.state),
                or_dash(view.step),
                or_dash(view.status.attempt),
                or_dash(view.jobs.last),
                "-" if loss is None else number(loss),
                "-" if view.status.time.goodput is None else ratio(view.status.time.goodput),
                view.reason or "",
            )
        )
    titles = ("RUN", "STATE", "STEP", "ATTEMPT", "JOB", "LOSS", "GOODPUT", "WHY")
    print_table(titles, rows, right=("STEP", "ATTEMPT", "LOSS", "GOODPUT"))


def describe(view: RunView) -> str:
    """One run in full, as text."""
    status, spent = view.status, view.status.time
    metrics = view.progress.metrics if view.progress else {}
    where = ", ".join(view.nodes) if view.nodes else UNKNOWN
    state = str(status.state)
    if view.source != "ledger":
        state += f" (by {view.source}; the run's own ledger does not say so)"
    rows = [
        ("run", view.run.run_id),
        ("state", state),
        ("why", view.reason or status.evidence or ""),
        ("step", _steps(view)),
        ("attempt", _attempt(view)),
        ("job", view.jobs.last or ("this machine" if view.jobs.local else "not submitted")),
        ("nodes", where),
        ("loss", number(metrics.get(LOSS))),
        ("tokens/s", rate(metrics.get(TOKENS_PER_S))),
        ("MFU", f"{ratio(metrics.get(MFU))} (causal convention)"),
        ("goodput", ratio(spent.goodput)),
        (
            "time",
            f"queued {duration(spent.queued_s)}, starting {duration(spent.starting_s)}, "
            f"training {duration(spent.training_s)}, lost {duration(spent.lost_s)}, "
            f"stopping {duration(spent.stopping_s)}",
        ),
        ("slow", "; ".join(map(str, status.stragglers))),
        ("failure", str(status.failure_class) if status.failure_class else ""),
        ("MLflow run", status.mlflow_run_id or UNKNOWN),
        ("directory", str(view.run.path)),
    ]
    return pairs(row for row in rows if row[1])


def _steps(view: RunView) -> str:
    if view.step is None:
        return UNKNOWN
    committed = view.status.committed_step
    saved = "nothing saved yet" if committed is None else f"saved up to {committed}"
    return f"{view.step} ({saved})"


def _attempt(view: RunView) -> str:
    if view.status.attempt is None:
        return "none yet"
    return f"{view.status.attempt}, generation {or_dash(view.status.generation)}"
