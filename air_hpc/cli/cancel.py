"""`cancel`: ask runs to save and end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from air_hpc.cli.options import JSON, RUNS_DIR, Option, option_lines, parse
from air_hpc.cli.output import print_json, say
from air_hpc.errors import EXIT_OK, BadInput
from air_hpc.rundir.layout import RunDir
from air_hpc.runs.cancel import Cancelled, cancel_runs
from air_hpc.runs.find import default_runs_dir, find_runs, runs_of_sweep

OPTIONS = (
    JSON,
    RUNS_DIR,
    Option(("--all-of",), "cancel every run of a sweep", "text", "SWEEP"),
)

HELP_TEXT = f"""\
usage: python -m air_hpc cancel RUN [RUN ...] [options]
       python -m air_hpc cancel --all-of SWEEP [options]

Asks runs to end. A run that trains saves its state first and ends CANCELLED; one in the queue is
taken out of it; one that has ended is left alone. Nothing starts a cancelled run again. Asking
twice is the same as asking once.

{option_lines(OPTIONS)}

  python -m air_hpc cancel latest
  python -m air_hpc cancel tiny-261130-1015 4711_3
"""


def main(arguments: Sequence[str]) -> int:
    """Run the verb."""
    parsed = parse(arguments, OPTIONS)
    if parsed.flag("help"):
        say(HELP_TEXT.rstrip())
        return EXIT_OK
    folder = parsed.text("runs_dir")
    runs_dir = Path(folder).expanduser() if folder else default_runs_dir()
    results = cancel_runs(_chosen(runs_dir, parsed.rest, parsed.text("all_of")))
    if parsed.flag("json"):
        rows = [_json(result) for result in results]
        single = len(parsed.rest) == 1 and parsed.text("all_of") is None
        print_json(rows[0] if single else {"runs": rows})
    else:
        for result in results:
            say(f"{result.run.run_id} {result.done}")
    return EXIT_OK


def _chosen(runs_dir: Path, names: Sequence[str], sweep: str | None) -> list[RunDir]:
    if not names and sweep is None:
        raise BadInput.single("run", "", "name the runs to cancel", hint="Or --all-of SWEEP")
    chosen = {run.path: run for run in (runs_of_sweep(runs_dir, sweep) if sweep else [])}
    if names:
        chosen.update((run.path, run) for run in find_runs(runs_dir, names))
    return list(chosen.values())


def _json(result: Cancelled) -> dict[str, object]:
    return {
        "run_id": result.run.run_id,
        "state": str(result.view.status.state),
        "job_id": result.view.jobs.last,
        "requested": result.asked,
        "done": result.done,
    }
