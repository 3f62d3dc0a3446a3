"""`verify`: whether checkpoints are what was committed, byte by byte."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from air_hpc.cli.options import JSON, RUNS_DIR, Option, option_lines, parse
from air_hpc.cli.output import console, note, print_json, print_table, say
from air_hpc.cli.texts import or_dash, size
from air_hpc.errors import EXIT_ENVIRONMENT, EXIT_OK, BadInput
from air_hpc.runs.find import default_runs_dir, find_run
from air_hpc.runs.verify import Progress, Verified, mark, resume_step, verify_run

OPTIONS = (
    JSON,
    RUNS_DIR,
    Option(("--step",), "only the checkpoint of this step", "whole", "N"),
    Option(("--mark",), "mark the bad ones, so that no start takes them"),
)

HELP_TEXT = f"""\
usage: python -m air_hpc verify RUN [options]

Reads the checkpoints of a run and compares every file with the manifest that was committed: names,
sizes and digests. The run may be training meanwhile. A start reads its checkpoint too and takes the
next older one where it differs; this finds out before. The exit code is 1 where a checkpoint is
bad, was marked before, or cannot be read.

{option_lines(OPTIONS)}

  python -m air_hpc verify latest
  python -m air_hpc verify latest --step 500 --json
  python -m air_hpc verify RUN --mark

States: `good`; `bad` (why is said); `marked` before and not read again; `void`, committed by an
attempt that had been given up, never used; `unreadable` now; `removed` by retention meanwhile.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the verb."""
    parsed = parse(arguments, OPTIONS)
    if parsed.flag("help"):
        say(HELP_TEXT.rstrip())
        return EXIT_OK
    if len(parsed.rest) != 1:
        raise BadInput.single(
            "RUN", " ".join(parsed.rest), "verify takes one run", allowed="an id or `latest`"
        )
    folder = parsed.text("runs_dir")
    runs_dir = Path(folder).expanduser() if folder else default_runs_dir()
    run = find_run(runs_dir, parsed.rest[0])
    step = parsed.whole("step")
    with _progress() as progress:
        found = verify_run(run, step, progress)
    marked = mark(run, found) if parsed.flag("mark") else []
    resume = resume_step(found)
    if parsed.flag("json"):
        print_json(
            {
                "run_id": run.run_id,
                "checkpoints": [one.to_json() for one in found],
                "resume_step": resume,
                "marked": marked,
            }
        )
    else:
        _tell(run.run_id, found, resume, marked, every=step is None)
    return EXIT_ENVIRONMENT if any(one.failed for one in found) else EXIT_OK


def _tell(
    run_id: str, found: Sequence[Verified], resume: int | None, marked: list[int], *, every: bool
) -> None:
    if not found:
        note(f"{run_id} has no checkpoint yet.")
        return
    rows = [
        (str(one.step), str(one.state), or_dash(one.files), _size(one), one.reason or "")
        for one in found
    ]
    print_table(("STEP", "STATE", "FILES", "SIZE", "WHY"), rows, right=("STEP", "FILES", "SIZE"))
    if marked:
        say(f"marked: {', '.join(map(str, marked))}")
    if every:
        say("no checkpoint can be resumed from" if resume is None else f"resumes from: {resume}")


def _size(one: Verified) -> str:
    return "-" if one.total_bytes is None else size(one.total_bytes)


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal's stderr; nothing where there is none."""
    if not sys.stderr.isatty():
        yield lambda step, done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("step {task.description}"), BarColumn(), DownloadColumn())
    with Bar(*columns, TransferSpeedColumn(), console=console(stderr=True), transient=True) as bar:
        tasks = {}

        def show(step: int, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bar.add_task(str(step), total=total)
            bar.update(tasks[step], completed=done, total=total)

        yield show
