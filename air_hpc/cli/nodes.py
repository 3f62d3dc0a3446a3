"""`nodes`: the nodes that all runs of the user avoid; excluding and releasing them by hand."""

from __future__ import annotations

import getpass
import math
import time
from collections.abc import Sequence
from pathlib import Path

from air_hpc.cli.options import JSON, RUNS_DIR, Option, Parsed, option_lines, parse
from air_hpc.cli.output import note, print_json, print_table, say
from air_hpc.cli.texts import duration
from air_hpc.config.spec import ExclusionSpec
from air_hpc.errors import EXIT_OK, EnvironmentFailure, Problem, nearest, raise_if_any
from air_hpc.recovery.exclusions import active, exclusion, worth_compacting
from air_hpc.rundir import exclusions
from air_hpc.rundir.exclusions import Exclusion, Exclusions, Release, is_node_name
from air_hpc.rundir.layout import SHARED_DIR, runs_dir_problems
from air_hpc.runs.find import default_runs_dir
from air_hpc.slurm import hostlist, snapshot

ACTIONS = ("exclude", "release")
ASK_TIMEOUT_S = 10.0
LONGEST_H = 24.0 * 366
_NAMED = 8

OPTIONS = (
    JSON,
    RUNS_DIR,
    Option(("--reason",), "with exclude: why, for whoever wonders later", "text", "TEXT"),
    Option(("--hours",), f"with exclude: for how long (default: {ExclusionSpec().expiry_h:g})",
           "text", "H"),
    Option(("--all",), "with release: every node"),
)  # fmt: skip

HELP_TEXT = f"""\
usage: python -m air_hpc nodes [options]
       python -m air_hpc nodes exclude NODE [NODE ...] --reason TEXT [--hours H] [options]
       python -m air_hpc nodes release NODE [NODE ...] | --all [options]

The nodes that your runs avoid: those that failed one of them (a device, a hang, a node lost), and
those that you excluded. Every run below the runs folder heeds the list when it is submitted and
when it is started again; each entry ends by itself. NODE may be a list: n[3-5],n9

{option_lines(OPTIONS)}

  python -m air_hpc nodes
  python -m air_hpc nodes exclude n3 --reason "slow link, ticket 4711" --hours 72
  python -m air_hpc nodes release n3
"""


def main(arguments: Sequence[str]) -> int:
    """Run the verb."""
    parsed = parse(arguments, OPTIONS)
    if parsed.flag("help"):
        say(HELP_TEXT.rstrip())
        return EXIT_OK
    folder = parsed.text("runs_dir")
    runs_dir = Path(folder).expanduser() if folder else default_runs_dir()
    action, names = (parsed.rest[0], parsed.rest[1:]) if parsed.rest else ("", ())
    nodes, problems = _expanded(names)
    raise_if_any([*_word_problems(parsed, action, names), *(problems if action in ACTIONS else [])])
    known = exclusions.read_exclusions(runs_dir)
    done: list[str] = []
    if action == "exclude":
        done = _exclude(runs_dir, parsed, nodes)
    elif action == "release":
        done = _release(runs_dir, parsed, nodes, known)
    known = exclusions.read_exclusions(runs_dir) if done else known
    _show(known, parsed, action, done)
    now = time.time()
    if done and worth_compacting(known.entries, known.unreadable_lines, now):
        exclusions.compact(runs_dir, active(known.entries, now))
    return EXIT_OK


def _word_problems(parsed: Parsed, action: str, names: Sequence[str]) -> list[Problem]:
    """Everything wrong with the command line itself, but for the names of nodes."""
    found = []
    if action and action not in ACTIONS:
        hint = nearest(action, ACTIONS)
        found.append(Problem("action", action, "no such action", ", ".join(ACTIONS), hint))
    if action == "exclude":
        if not names:
            found.append(Problem("node", "", "name the nodes to exclude"))
        if not (parsed.text("reason") or "").strip():
            found.append(Problem("--reason", "", "say why", "some text"))
        found += [p for p in [_hours_problem(parsed.text("hours"))] if p is not None]
    elif parsed.text("reason") is not None or parsed.text("hours") is not None:
        found.append(Problem("", "", "--reason and --hours are for `nodes exclude`"))
    if action == "release" and bool(names) == parsed.flag("all"):
        found.append(Problem("node", " ".join(names), "name the nodes to release, or --all"))
    elif action != "release" and parsed.flag("all"):
        found.append(Problem("", "", "--all is for `nodes release`"))
    return found


def _hours_problem(text: str | None) -> Problem | None:
    if text is None:
        return None
    try:
        hours = float(text)
    except ValueError:
        hours = math.nan
    if 0 < hours <= LONGEST_H:
        return None
    return Problem("--hours", text, "for how long", f"a number above 0, at most {LONGEST_H:g}")


def _exclude(runs_dir: Path, parsed: Parsed, nodes: list[str]) -> list[str]:
    raise_if_any([*runs_dir_problems(runs_dir), *_unknown_problems(runs_dir, nodes)])
    hours = float(parsed.text("hours") or ExclusionSpec().expiry_h)
    now, reason, user = time.time(), parsed.text("reason") or "", getpass.getuser()
    exclusions.append_exclusions(
        runs_dir,
        [
            exclusion(
                node, now=now, hours=hours, reason=reason, failure_class=None, run=None, by=user
            )
            for node in nodes
        ],
    )
    return nodes


def _release(runs_dir: Path, parsed: Parsed, nodes: list[str], known: Exclusions) -> list[str]:
    now, user = time.time(), getpass.getuser()
    standing = [each.node for each in active(known.entries, now)]
    if parsed.flag("all"):
        if standing:
            exclusions.append_exclusions(runs_dir, [Release(None, now, user)])
        return standing
    raise_if_any(
        Problem(
            "node",
            node,
            "is not excluded",
            _some(standing) or "no node is",
            nearest(node, standing),
        )
        for node in nodes
        if node not in standing
    )
    exclusions.append_exclusions(runs_dir, [Release(node, now, user) for node in nodes])
    return nodes


def _expanded(names: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """The nodes that the words name, each once, and every word that names none."""
    nodes: dict[str, None] = {}
    found = []
    for name in names:
        try:
            expanded = hostlist.expand(name)
        except EnvironmentFailure:
            expanded = ()
        if not expanded or not all(map(is_node_name, expanded)):
            found.append(Problem("node", name, "names no node", "a name or a list: n3, n[3-5],n9"))
        nodes.update(dict.fromkeys(expanded))
    return list(nodes), found


def _unknown_problems(runs_dir: Path, nodes: Sequence[str]) -> list[Problem]:
    """The nodes that Slurm does not have; where it does not answer, none (and it is said)."""
    shared = runs_dir / SHARED_DIR
    cache = shared / "site.json" if shared.is_dir() else None
    try:
        site = snapshot.take(timeout_s=ASK_TIMEOUT_S, cache=cache)
    except EnvironmentFailure:
        note("Slurm does not answer: the names are not checked.")
        return []
    known = [node.name for node in site.nodes]
    where = f"{site.config.cluster_name} has no such node"
    return [
        Problem("node", node, where, _some(known), nearest(node, known))
        for node in nodes
        if node not in known
    ]


def _some(nodes: Sequence[str]) -> str:
    folded = hostlist.fold(nodes)
    return folded if len(folded) < 100 else ", ".join([*nodes[:_NAMED], "..."])


def _show(known: Exclusions, parsed: Parsed, action: str, done: Sequence[str]) -> None:
    now = time.time()
    standing = sorted(active(known.entries, now), key=lambda each: each.node)
    if parsed.flag("json"):
        body: dict[str, object] = {
            "excluded": [_json(each, now) for each in standing],
            "unreadable_lines": known.unreadable_lines,
        }
        if action:
            body["changed"] = list(done)
        print_json(body)
        return
    if known.unreadable_lines:
        note(f"{known.unreadable_lines} line(s) of the file could not be read and are left out.")
    if action == "release":
        say(f"released: {hostlist.fold(done)}" if done else "no node was excluded")
    elif action == "exclude":
        say(f"excluded: {hostlist.fold(done)}")
    elif not standing:
        say("No node is excluded.")
    if standing and action != "release":
        titles = ("NODE", "CLASS", "SINCE", "UNTIL", "LEFT", "RUN", "BY", "REASON")
        print_table(titles, [_row(each, now) for each in standing], right=("LEFT",))


def _row(each: Exclusion, now: float) -> tuple[str, ...]:
    return (
        each.node,
        each.failure_class or "-",
        _clock(each.time),
        _clock(each.until),
        duration(each.until - now),
        each.run or "-",
        each.by or "-",
        each.reason,
    )


def _clock(seconds: float) -> str:
    try:
        return time.strftime("%F %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g}"


def _json(each: Exclusion, now: float) -> dict[str, object]:
    return {
        "node": each.node,
        "failure_class": each.failure_class,
        "reason": each.reason,
        "run_id": each.run,
        "since": each.time,
        "until": each.until,
        "left_s": each.until - now,
        "by": each.by or None,
    }
