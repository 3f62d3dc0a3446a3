"""`logs`: what a run printed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from air_hpc.cli.options import JSON, RUNS_DIR, Option, Parsed, option_lines, parse
from air_hpc.cli.output import note, print_json, say
from air_hpc.errors import EXIT_OK, BadInput
from air_hpc.rundir.layout import RunDir
from air_hpc.runs.find import LATEST, default_runs_dir, find_run
from air_hpc.runs.logs import LogFile, LogLine, Selection, follow, log_files, read_lines, tail
from air_hpc.runs.status import view_run

_ASK_AGAIN_S = 2.0
_ASK_SLURM_S = 60.0

OPTIONS = (
    JSON,
    RUNS_DIR,
    Option(("-f", "--follow"), "go on with what comes, through restarts, until the run ends"),
    Option(("-n", "--tail"), "only the last N lines (with --follow: begin there)", "whole", "N"),
    Option(("--rank",), "only what this rank printed", "whole", "R"),
    Option(("--attempt",), "only this attempt", "whole", "K"),
    Option(("--generation",), "only this generation of an attempt", "whole", "G"),
    Option(("--node",), "only this node", "text", "NAME"),
)

HELP_TEXT = f"""\
usage: python -m air_hpc logs [RUN] [options]

What a run printed: the batch script's log, then each attempt, generation and node. Without a RUN
the newest is meant. A line begins with its rank.

{option_lines(OPTIONS)}

  python -m air_hpc logs latest --follow
  python -m air_hpc logs 4711_3 --rank 0 --attempt 2 --tail 50

With --json: {{"run_id": ..., "lines": [{{"attempt", "generation", "node", "rank", "text"}}]}}.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the verb."""
    parsed = parse(arguments, OPTIONS)
    if parsed.flag("help"):
        say(HELP_TEXT.rstrip())
        return EXIT_OK
    if len(parsed.rest) > 1:
        raise BadInput.single("run", " ".join(parsed.rest), "logs takes one run")
    if parsed.flag("json") and parsed.flag("follow"):
        raise BadInput.single("--json", "--follow", "one object cannot be followed")
    folder = parsed.text("runs_dir")
    runs_dir = Path(folder).expanduser() if folder else default_runs_dir()
    run = find_run(runs_dir, parsed.rest[0] if parsed.rest else LATEST)
    selection = Selection(
        rank=parsed.whole("rank"),
        attempt=parsed.whole("attempt"),
        generation=parsed.whole("generation"),
        node=parsed.text("node"),
    )
    if parsed.flag("follow"):
        count = parsed.whole("tail")
        print_lines(follow(run, selection, ended=has_ended(run), count=count))
        return EXIT_OK
    lines = _lines(run, selection, parsed)
    if parsed.flag("json"):
        print_json({"run_id": run.run_id, "lines": [_json(line) for line in lines]})
    elif not print_lines(lines):
        _explain_nothing(run, selection)
    return EXIT_OK


def _lines(run: RunDir, selection: Selection, parsed: Parsed) -> Iterable[LogLine]:
    count = parsed.whole("tail")
    if count is not None:
        return tail(run, selection, count)
    return (
        line
        for file in log_files(run, selection)
        for line in read_lines(file)
        if selection.wants(line)
    )


def print_lines(lines: Iterable[LogLine | None]) -> int:
    """Print lines below the name of the file that each is from; returns how many."""
    current: LogFile | None = None
    count = 0
    for line in lines:
        if line is None:
            sys.stdout.flush()
            continue
        if line.file != current:
            current = line.file
            sys.stdout.write(f"==> {current.label} <==\n")
        who = "" if line.rank is None else f"[{line.rank}] "
        sys.stdout.write(f"{who}{line.text}\n")
        count += 1
    sys.stdout.flush()
    return count


def has_ended(run: RunDir) -> Callable[[], bool]:
    """Whether the run is over: its ledger is read every few seconds, Slurm asked once a minute."""
    answers = _ends(run)
    return lambda: next(answers)


def _ends(run: RunDir) -> Iterator[bool]:
    looked, asked = -_ASK_AGAIN_S, time.monotonic()
    over = False
    while True:
        now = time.monotonic()
        if not over and now - looked >= _ASK_AGAIN_S:
            ask = now - asked >= _ASK_SLURM_S
            view = view_run(run, ask_slurm=ask)
            over = view.status.terminal
            looked = time.monotonic()
            asked = looked if ask else asked
        yield over


def _explain_nothing(run: RunDir, selection: Selection) -> None:
    files = log_files(run)
    if not files:
        view = view_run(run)
        why = f" ({view.reason})" if view.reason else ""
        note(f"{run.run_id} has printed nothing yet; it is {view.status.state}{why}")
    else:
        shown = "; ".join(file.label for file in files[-8:])
        note(f"Nothing of {run.run_id} fits. There are: {shown}")


def _json(line: LogLine) -> dict[str, object]:
    token = line.file.token
    return {
        "attempt": None if token is None else token.attempt,
        "generation": None if token is None else token.generation,
        "node": line.file.node,
        "rank": line.rank,
        "text": line.text,
    }
