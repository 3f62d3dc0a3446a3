"""The summary that stands at the end of a run, as text."""

from __future__ import annotations

from air_hpc.cli.output import pairs, say
from air_hpc.cli.texts import UNKNOWN, duration, number, rate, ratio, scaled
from air_hpc.rundir.words import RunState
from air_hpc.runs.summary import Summary


def show_summary(summary: Summary) -> None:
    """Print it, with a blank line before."""
    say()
    say(describe(summary))


def describe(summary: Summary) -> str:
    """What the run did, and what to type next."""
    view = summary.view
    spent = view.status.time
    state = str(view.status.state)
    why = view.reason or view.status.evidence
    rows = [
        ("run", view.run.run_id),
        (
            "state",
            state if not why or view.status.state is RunState.FINISHED else f"{state}: {why}",
        ),
        ("steps", _steps(summary)),
        ("loss", _loss(summary)),
        ("tokens/s", _speed(summary)),
        ("MFU", _mfu(summary)),
        (
            "goodput",
            f"{ratio(spent.goodput)} of {duration(spent.allocated_s)} "
            f"(starting {duration(spent.starting_s)}, lost {duration(spent.lost_s)}, "
            f"stopping {duration(spent.stopping_s)})",
        ),
        ("attempts", str(summary.attempts)),
        ("checkpoints", ", ".join(f"step {s}" for s in summary.checkpoints) or "none"),
        ("directory", str(view.run.path)),
        ("MLflow", _mlflow(summary)),
    ]
    if view.status.state is RunState.FAILED:
        rows.append(("logs", f"python -m air_hpc logs {view.run.path}"))
    return pairs(rows)


def _steps(summary: Summary) -> str:
    step = summary.view.step
    of = "" if summary.steps is None else f" of {summary.steps}"
    return f"{UNKNOWN if step is None else step}{of}"


def _loss(summary: Summary) -> str:
    if summary.first_loss is None or summary.last_loss is None:
        return UNKNOWN
    return f"{number(summary.first_loss)} -> {number(summary.last_loss)}"


def _speed(summary: Summary) -> str:
    """The median step's, as the MFU below it: a mean would count pauses of the machine."""
    said = rate(summary.tokens_per_s)
    return said if summary.tokens_per_s is None else f"{said} in the median step"


def _mfu(summary: Summary) -> str:
    if summary.mfu_causal is None:
        return f"{UNKNOWN} ({_no_mfu(summary)})"
    text = f"{ratio(summary.mfu_causal)} causal, {ratio(summary.mfu_palm)} palm"
    if summary.peak is not None:
        peak = summary.peak
        text += f", of a peak of {scaled(peak.flops_per_device, 'FLOP/s')} ({peak.source})"
    return text


def _no_mfu(summary: Summary) -> str:
    if summary.peak is None:
        return "the device's peak is not known"
    if summary.tokens_per_s is None:
        return "not measured"
    peak = scaled(summary.peak.flops_per_device, "FLOP/s")
    return f"the rate is above the {summary.peak.source} peak of {peak}, so one of them is wrong"


def _mlflow(summary: Summary) -> str:
    if summary.mlflow_command is not None and summary.view.status.mlflow_run_id is not None:
        return summary.mlflow_command
    if summary.tracking_uri is not None:
        return f"nothing was sent; to send it: python -m air_hpc sync {summary.view.run.path}"
    return f"no store yet: python -m air_hpc sync {summary.view.run.path} --uri URI"
