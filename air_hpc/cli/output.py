"""What goes where: results to stdout, errors to stderr; with --json one object on stdout alone.

Text is printed as it is: no markup, no emoji; colour only where rich finds a terminal that takes it
(NO_COLOR is respected). Where stdout is no terminal, tables keep a width of their own, so that a
file or a pipe never gets cut columns.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from air_hpc.errors import AirHpcError, BadInput, EnvironmentFailure, Problem

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 250
_GAP = 2
"""Between two columns of a table."""
_READABLE = 30
"""Characters that a wrapped text needs, to be read with ease."""


def print_json(body: Any) -> None:
    """The one object of a `--json` verb; what JSON has no number for (NaN, infinity) is null."""
    text = json.dumps(_finite(body), indent=2, default=str, allow_nan=False)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def say(text: str = "") -> None:
    """A line of the result."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A line beside the result: a warning, or what is being done."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def console(*, stderr: bool = False) -> Console:
    """A rich console that prints text as it is."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None
    if not stream.isatty():
        columns = os.environ.get("COLUMNS", "")
        width = int(columns) if columns.isdecimal() and int(columns) > 0 else _PIPE_WIDTH
    return Console(
        file=stream, width=width, markup=False, emoji=False, highlight=False, soft_wrap=False
    )


def print_table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()
) -> None:
    """Print a plain table; columns named in `right` are aligned to the right, the last may wrap.

    Where a narrow terminal leaves a last column of text no room to be read in, its texts stand each
    on a line of its own below its row.
    """
    from rich.cells import cell_len
    from rich.table import Table

    kept, printer = [list(row) for row in rows], console()
    widths = [max(map(cell_len, column)) for column in zip(titles, *kept, strict=True)]
    room = printer.width - sum(widths[:-1]) - _GAP * (len(widths) - 1)
    below = titles[-1] not in right and room < min(widths[-1], _READABLE)
    shown = len(titles) - below
    made = Table(box=None, pad_edge=False, header_style="bold")
    for number, title in enumerate(titles[:shown]):
        last = number == len(titles) - 1
        justify: Any = "right" if title in right else "left"
        made.add_column(title, justify=justify, no_wrap=not last, overflow="fold")
    for row in kept:
        made.add_row(*row[:shown])
    with printer.capture() as captured:
        printer.print(made)
    # Without the column that wraps, every row is one line, and the titles are the first.
    for number, line in enumerate(captured.get().splitlines()):
        say(line.rstrip())
        if below and 0 < number <= len(kept) and kept[number - 1][-1]:
            say(f"  {kept[number - 1][-1]}")


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Two columns of text: names and what they are."""
    kept = list(rows)
    width = max((len(name) for name, _ in kept), default=0)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in kept)


def tell_error(error: AirHpcError, *, as_json: bool) -> None:
    """Tell people or a program what was wrong: every problem, each with what is allowed."""
    if as_json:
        print_json(error_json(error))
    elif isinstance(error, BadInput):
        count = len(error.problems)
        head = "The input has a problem:" if count == 1 else f"The input has {count} problems:"
        note("\n".join([head, *(f"  {line}" for p in error.problems for line in _lines(p))]))
    elif isinstance(error, EnvironmentFailure):
        tail = []
        if error.tried:
            tail.append(f"  tried: {error.tried}")
        if error.next_step:
            tail.append(f"  next:  {error.next_step}")
        note("\n".join([f"Failed: {message_of(error)}", *tail]))
    else:
        note(f"Failed: {error}")


def error_json(error: AirHpcError) -> dict[str, Any]:
    """An error as the one object on stdout."""
    body: dict[str, Any] = {"error": str(error), "exit_code": error.exit_code, "problems": []}
    if isinstance(error, BadInput):
        body["error"] = "the input is wrong"
        body["problems"] = [problem_json(problem) for problem in error.problems]
    elif isinstance(error, EnvironmentFailure):
        body["error"] = message_of(error)
        body["tried"] = error.tried or None
        body["next_step"] = error.next_step or None
    return body


def problem_json(problem: Problem) -> dict[str, Any]:
    """A problem as plain data."""
    return {
        "key": problem.key or None,
        "value": problem.value,
        "message": problem.message,
        "allowed": problem.allowed or None,
        "hint": problem.hint or None,
        "warning": problem.warning,
    }


def message_of(error: EnvironmentFailure) -> str:
    """An environment failure's message without what was tried and what is next."""
    text = str(error)
    if error.next_step:
        text = text.removesuffix(f"; next: {error.next_step}")
    if error.tried:
        text = text.removesuffix(f"; tried: {error.tried}")
    return text


def tell_warnings(problems: Iterable[Problem]) -> None:
    """Warnings go to stderr and stop nothing."""
    for problem in problems:
        first, *more = _lines(problem)
        note("\n".join([f"Warning: {first}", *(f"  {line}" for line in more)]))


def _lines(problem: Problem) -> list[str]:
    subject = ""
    if problem.key:
        subject = f"{problem.key}={problem.value}: " if problem.value else f"{problem.key}: "
    if not problem.key and problem.value:
        subject = f"{problem.value}: "
    lines = [f"{subject}{problem.message}"]
    if problem.allowed:
        lines.append(f"  allowed: {problem.allowed}")
    if problem.hint:
        lines.append(f"  {problem.hint}")
    return lines
