"""A campaign as markdown: what was injected, what came of it, and the story of every violation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from _chaos.check import ELASTIC_TOLERANCE, LOST
from _chaos.drive import Injected, Outcome
from _chaos.plan import Kind


@dataclass(frozen=True)
class Circumstances:
    """Where and how the campaign ran."""

    seed: int
    faults: int
    runs_at_once: int
    commit: str
    date: str
    machine: str
    took_s: float
    command: str


def violations(outcomes: Sequence[Outcome]) -> int:
    """How many runs broke a promise."""
    return sum(bool(outcome.violations) for outcome in outcomes)


def injected(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Injected]]:
    """All faults that were done, each with its run."""
    return [(o, entry) for o in outcomes for entry in o.injected if entry.done is not None]


_PREFACE = (
    "Runs of two nodes with two workers each train a small model on a real Slurm of one machine, "
    "with dropout and accumulation, under each restart policy in turn. Faults come at random "
    "moments of training, of a start and of a save, up to three together, before the run has "
    "recovered from those before. After its end each run must be FINISHED, with every loss "
    f"bit-equal to an undisturbed run's (within {ELASTIC_TOLERANCE:.0%} from where an elastic run "
    "went on with fewer nodes), with each step once in exactly one MLflow run, a ledger whose "
    "times sum to the wall time, and no process, port or temporary file left. A seed gives the "
    "same plan each time; what comes of it also depends on the machine's timing.",
)


def _lost(outcomes: Sequence[Outcome]) -> int:
    """Runs that did not finish, or whose numbers are not the undisturbed run's."""
    return sum(any(p.startswith(LOST) for p in outcome.violations) for outcome in outcomes)


def render(outcomes: Sequence[Outcome], about: Circumstances) -> str:
    """The whole report."""
    done = injected(outcomes)
    bad = violations(outcomes)
    skipped = sum(len(o.plan.faults) for o in outcomes) - len(done)
    lines = [
        "# Chaos: runs under random faults",
        "",
        *_PREFACE,
        "",
        f"Written by `{about.command}` on {about.date}, commit {about.commit}, {about.machine}, "
        f"{about.runs_at_once} runs at once, in {about.took_s / 60:.1f} minutes.",
        "",
        f"**{len(outcomes)} runs, {len(done)} faults injected, {_lost(outcomes)} runs lost, "
        f"{bad} with a violation of any kind.** {skipped} planned faults found no moment: their "
        "run had ended, or nothing was there to be hit.",
        "",
        *_table(outcomes),
        "",
        "Survived: the run trained again and its end held every check. Time and lost steps: medians"
        " over faults that came alone; seen from outside, so a poll later than they were.",
        "",
        "| run | policy | faults | attempts | violations |",
        "|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        attempts = outcome.story.count(" attempt_started ")
        hits = sum(entry.done is not None for entry in outcome.injected)
        lines.append(
            f"| {outcome.plan.number} | {outcome.plan.policy} | {hits} | {attempts} | "
            f"{len(outcome.violations)} |"
        )
    for outcome in outcomes:
        if outcome.violations:
            lines += _story(outcome)
    return "\n".join(lines) + "\n"


def _table(outcomes: Sequence[Outcome]) -> list[str]:
    lines = [
        "| fault | injected | survived | alone | median s to the next step | median lost steps |",
        "|---|---|---|---|---|---|",
    ]
    done = injected(outcomes)
    for kind in Kind:
        mine = [(o, e) for o, e in done if e.fault.kind is kind]
        if not mine:
            continue
        survived = sum(not o.violations for o, _ in mine)
        alone = [e for _, e in mine if e.alone and e.recovered_s is not None]
        took = [e.recovered_s for e in alone if e.recovered_s is not None]
        lost = [e.lost_steps for e in alone if e.lost_steps is not None]
        lines.append(
            f"| {kind} | {len(mine)} | {survived} | {len(alone)} | "
            f"{f'{statistics.median(took):.1f}' if took else '—'} | "
            f"{f'{statistics.median(lost):g}' if lost else '—'} |"
        )
    return lines


def _story(outcome: Outcome) -> list[str]:
    lines = ["", f"## Run {outcome.plan.number} ({outcome.plan.policy}, {outcome.run_id})", ""]
    lines += [f"- **{problem}**" for problem in outcome.violations]
    lines += [""]
    for entry in outcome.injected:
        what = entry.done or "found no moment"
        lines.append(f"- {entry.fault.number} {entry.fault.kind} ({entry.when}): {what}")
    return [*lines, "", "```", outcome.story, "```"]
