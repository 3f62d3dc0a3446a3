"""`why`: what failed first in a run, what was done about it, what comes next."""

from __future__ import annotations

import shutil
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from air_hpc.cli.options import JSON, RUNS_DIR, Option, option_lines, parse
from air_hpc.cli.output import print_json, say
from air_hpc.cli.texts import duration
from air_hpc.errors import EXIT_OK, BadInput
from air_hpc.rundir.words import FailureClass, RunState, Verdict
from air_hpc.runs.find import LATEST, default_runs_dir, find_run
from air_hpc.runs.why import EndTold, Why, hint_for, why

OPTIONS = (
    JSON,
    RUNS_DIR,
    Option(("--no-slurm",), "ask nobody: what the run directory says alone"),
)

HELP_TEXT = f"""\
usage: python -m air_hpc why [RUN] [options]

What failed first in a run (the rank, the node, when, the evidence), what was done about it, and
what comes next. A RUN is an id, a piece of one, a path, a Slurm job id, or `latest` (the default).

{option_lines(OPTIONS)}

  python -m air_hpc why                      the newest run
  python -m air_hpc why 4711_3 --json        for a script; null where something is not known
"""

PIPE_WIDTH = 100
"""Columns where stdout is no terminal."""
SHOWN_ENDS = 6
"""Of many ends: how many are shown one by one; the others are folded into counts."""
_LABEL = 9


def main(arguments: Sequence[str]) -> int:
    """Run the verb."""
    parsed = parse(arguments, OPTIONS)
    if parsed.flag("help"):
        say(HELP_TEXT.rstrip())
        return EXIT_OK
    if len(parsed.rest) > 1:
        raise BadInput.single("run", " ".join(parsed.rest), "why tells of one run", allowed="a RUN")
    folder = parsed.text("runs_dir")
    runs_dir = Path(folder).expanduser() if folder else default_runs_dir()
    run = find_run(runs_dir, parsed.rest[0] if parsed.rest else LATEST)
    told = why(run, ask_slurm=not parsed.flag("no_slurm"))
    if parsed.flag("json"):
        print_json(told.to_json())
    else:
        say(describe(told, width()))
    return EXIT_OK


def width() -> int:
    """The columns there are; COLUMNS wins, as everywhere."""
    return max(40, shutil.get_terminal_size((PIPE_WIDTH, 40)).columns)


def describe(told: Why, columns: int = PIPE_WIDTH) -> str:
    """One screen of text."""
    lines: list[str] = [*_wrapped(headline(told), columns)]
    if told.first is not None:
        lines += ["", *_failure(told, told.first, columns)]
    if told.ends:
        lines += ["", *_history(told.ends, columns)]
    lines += ["", *_pair("next", told.next.what, columns)]
    if told.next.at is not None:
        lines += _pair("", f"expected at {_clock(told.next.at)}", columns)
    if told.next.command is not None:
        lines.append(f"{'':{_LABEL}}{told.next.command}")
    for note in told.notes:
        lines += _pair("note", note, columns)
    return "\n".join(line.rstrip() for line in lines)


def headline(told: Why) -> str:
    """The run's state in one sentence."""
    view, status = told.view, told.view.status
    state = status.state
    text = f"{view.run.run_id}: {state}"
    if state in (RunState.RUNNING, RunState.STARTING, RunState.SAVING):
        where = "" if view.step is None else f", at step {view.step}"
        trouble = sum(end.failed for end in told.ends)
        fine = "" if trouble else "; nothing has gone wrong"
        return f"{text}{where}{fine}"
    if state is RunState.FINISHED:
        trouble = sum(end.failed for end in told.ends)
        how = "nothing went wrong" if not trouble else f"after {trouble} failures"
        if trouble == 1:
            how = "after one failure"
        return f"{text}, all steps are done; {how}"
    if state is RunState.FAILED and status.failure_class is not None:
        return f"{text} ({status.failure_class})"
    reason = view.reason if state in (RunState.PENDING, RunState.HELD) else None
    return f"{text}: {reason}" if reason else text


def _failure(told: Why, end: EndTold, columns: int) -> list[str]:
    title = "first" if end.failed else "ended"
    last = told.view.status.state in (RunState.RUNNING, RunState.FINISHED, RunState.STARTING)
    what = f"{end.failure_class}" + (f", by rule {end.rule}" if end.rule else "")
    if last:
        what += " (its newest failure; it went on)"
    lines = _pair(title, what, columns)
    where = _where(end)
    if where:
        lines += _pair("where", where, columns)
    if end.time is not None:
        lines += _pair("when", _when(end), columns)
    if end.evidence:
        lines += _pair("evidence", end.evidence, columns)
    if end.stacks:
        lines += _pair("stacks", str(told.view.run.path / end.stacks), columns)
    if told.log:
        lines += _pair("log", f"the last lines of rank {end.rank}:", columns)
        lines += [f"{'':{_LABEL}}| {line}"[:columns] for line in told.log]
    hint = hint_for(end)
    if hint:
        lines += _pair("hint", hint, columns)
    if told.fit is not None:
        lines += _pair("memory", told.fit.sentence(), columns)
    return lines


def _where(end: EndTold) -> str:
    parts = [] if end.rank is None else [f"rank {end.rank}"]
    if end.node:
        parts.append(f"node {end.node}")
    if end.device:
        parts.append(f"device {end.device}")
    if end.phase:
        parts.append(f"in phase {end.phase}")
    return ", ".join(parts)


def _when(end: EndTold) -> str:
    text = _clock(end.time)
    if end.step is not None:
        text += f", at step {end.step}"
    return f"{text}{_token(end)}"


def _token(end: EndTold) -> str:
    if end.attempt is None:
        return ""
    return f" (attempt {end.attempt}, generation {end.generation})"


def _clock(moment: float | None) -> str:
    if moment is None:
        return "unknown"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


# -- what was done ---------------------------------------------------------------------------------


def _history(ends: Sequence[EndTold], columns: int) -> list[str]:
    folded, shown = ends[:-SHOWN_ENDS], ends[-SHOWN_ENDS:]
    lines: list[str] = []
    if folded:
        lines += _pair("done", f"{len(folded)} ends before these: {_counts(folded)}", columns)
    for index, end in enumerate(shown):
        label = "done" if index == 0 and not folded else ""
        lines += _pair(label, _end_line(end), columns)
    return lines


def _counts(ends: Iterable[EndTold]) -> str:
    counts: dict[FailureClass, int] = {}
    steps = 0
    for end in ends:
        counts[end.failure_class] = counts.get(end.failure_class, 0) + 1
        steps += end.lost_steps or 0
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items(), key=lambda i: -i[1]))
    return f"{kinds}; {steps} steps lost"


def _end_line(end: EndTold) -> str:
    at = "" if end.attempt is None else f"{end.attempt}.{end.generation} "
    text = f"{at}{end.failure_class}"
    if end.failure_class is FailureClass.COMPLETED:
        return text
    if end.verdict is not None:
        text += f" -> {_DONE[end.verdict]}"
    if end.reason:
        text += f" ({end.reason})"
    cost = []
    if end.lost_steps is not None:
        rolled = f" ({duration(end.lost_s)} of training)" if end.lost_s else ""
        cost.append(f"{end.lost_steps} steps lost{rolled}")
    if end.down_s is not None:
        cost.append(f"training again after {duration(end.down_s)}")
    return f"{text}; {', '.join(cost)}" if cost else text


_DONE = {
    Verdict.CONTINUE: "restarted inside the allocation",
    Verdict.REQUEUE: "requeued",
    Verdict.EXCLUDE_AND_REQUEUE: "node excluded, requeued",
    Verdict.STOP: "stopped",
}


def _pair(name: str, text: str, columns: int) -> list[str]:
    room = max(20, columns - _LABEL)
    wrapped = textwrap.wrap(text, room, break_on_hyphens=False) or [""]
    return [f"{name if n == 0 else '':<{_LABEL}}{line}" for n, line in enumerate(wrapped)]


def _wrapped(text: str, columns: int) -> list[str]:
    return textwrap.wrap(text, columns, break_on_hyphens=False, subsequent_indent="  ")
