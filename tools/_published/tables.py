"""The tables of docs/planner.md that set the planner against published runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence

from air_hpc.plan.rates import FITTED

from .runs import Run, all_runs, notes, sources

BEGIN = "<!-- {name}: made by tools/plan-published -->"
END = "<!-- end of {name} -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def percent(value: float) -> str:
    """An error with its sign."""
    return f"{100 * value:+.1f} %"


def groups(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs by group, in order."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.group, []).append(run)
    return found


def constants_table() -> str:
    """The constants and what they were fitted on."""
    body = json.loads(FITTED.read_text(encoding="utf-8"))
    rows = [(name, f"{value:.3f}") for name, value in body["constants"].items()]
    note = (
        f"\nFitted on {len(body['fitted_on'])} runs, torchtitan's 8B and no other, by"
        f" `{body['command']}` on {body['date']}; root of the mean square of"
        f" log(predicted / measured) there: {body['rms_log_error']:.3f}.\n"
    )
    return table(("constant", "value"), rows) + note


def summary() -> str:
    """The errors of each group, and of all that was held out."""
    rows = []
    held: list[float] = []
    medians: list[float] = []
    for name, runs in groups(all_runs()).items():
        errors = [run.error() for run in runs]
        sizes = [abs(error) for error in errors]
        fit = runs[0].fit
        if not fit:
            held += sizes
            medians.append(statistics.median(sizes))
        rows.append(
            (
                name,
                "fitted" if fit else "held out",
                str(len(runs)),
                f"{100 * statistics.median(sizes):.1f} %",
                percent(statistics.fmean(errors)),
                f"{percent(min(errors))} … {percent(max(errors))}",
            )
        )
    head = ("runs", "", "number", "median of the size", "mean", "range")
    within = sum(size <= 0.15 for size in held)
    return table(head, rows) + (
        f"\nAll {len(held)} runs that were held out: median {100 * statistics.median(held):.1f} %,"
        f" {within} of them within 15 %; median over the {len(medians)} groups"
        f" {100 * statistics.median(medians):.1f} %.\n"
    )


def every_run() -> str:
    """Each run with what was measured, what is predicted and the error."""
    parts = []
    said = notes()
    for name, runs in groups(all_runs()).items():
        rows = [
            (
                run.name,
                f"{run.tokens_per_s:,.1f}",
                f"{run.predicted():,.1f}",
                percent(run.error()),
            )
            for run in runs
        ]
        title = f"### {name}{' (fitted)' if runs[0].fit else ''}\n\n"
        devices = {run.accelerator.name for run in runs}
        told = [f"{said[name][0].upper()}{said[name][1:]}"] if name in said else []
        told += [f"`{device}`: {said[device]}" for device in sorted(devices) if device in said]
        note = "".join(f"{line}.\n" for line in told)
        where = sorted({run.source for run in runs})
        cited = f"Source: {', '.join(where)}. {note}".strip() + "\n\n"
        head = ("run", "measured tokens/s a GPU", "predicted", "error")
        parts.append(title + cited + table(head, rows))
    listed = "\n".join(f"- {name}: {text}" for name, text in sources().items())
    return "\n".join(parts) + "\n### Sources\n\n" + listed + "\n"


SECTIONS = {"constants": constants_table, "summary": summary, "every run": every_run}


def filled(text: str, sections: Mapping[str, str] | None = None) -> str:
    """`text` with every generated section made anew, or with `sections`. Raises ValueError where
    the page has no place for one."""
    made = sections or {name: make() for name, make in SECTIONS.items()}
    for name, body in made.items():
        begin, end = BEGIN.format(name=name), END.format(name=name)
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"the page has not one section {begin}")
        head, _, rest = text.partition(begin)
        tail = rest.partition(end)[2]
        text = f"{head}{begin}\n\n{body}\n{end}{tail}"
    return text
