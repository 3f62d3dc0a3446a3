"""Which nodes are avoided at a time: pure functions of the entries, the clock and the caps.

An exclusion stands from its entry to its end, unless a later entry releases the node; the order is
the file's, since the clocks of nodes differ. Two entries of one node amount to the later one's
reason and the later one of their ends, so that a failure never shortens what a person asked for.

Never are so many nodes avoided that a run could not start: of the nodes that take jobs, at least
those that it needs are left to it. Where an exclusion has to give way it is the one with the oldest
evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from air_hpc.rundir.exclusions import Entry, Exclusion, Release

COMPACT_ABOVE_LINES = 256
"""A file up to here is read in no time, whatever is in it."""

_HOUR_S = 3600.0


def active(entries: Iterable[Entry], now: float) -> tuple[Exclusion, ...]:
    """The exclusions in force at `now`, one a node, the oldest evidence first."""
    standing: dict[str, Exclusion] = {}
    for entry in entries:
        if isinstance(entry, Release):
            if entry.node is None:
                standing.clear()
            else:
                standing.pop(entry.node, None)
            continue
        former = standing.pop(entry.node, None)
        until = entry.until if former is None else max(entry.until, former.until)
        standing[entry.node] = replace(entry, until=until)
    return tuple(found for found in standing.values() if found.until > now)


def exclude_list(
    entries: Iterable[Entry],
    now: float,
    needed: int,
    available: Mapping[str, bool] | None,
    cap: int,
) -> tuple[str, ...]:
    """The nodes that a run is to avoid, sorted by name.

    `needed`: how many nodes its allocation has. `available`: the nodes that could serve it, by
    name, and whether each takes jobs now (None: the site did not say, and only `cap` holds). A
    node that takes no job anyway is avoided at no cost; a node that is none of them is left out.
    """
    standing = list(active(entries, now))
    if available is not None:
        standing = [each for each in standing if each.node in available]
    room = cap if available is None else sum(available.values()) - needed
    chosen: list[str] = []
    for each in reversed(standing):
        costs = available is None or available[each.node]
        if len(chosen) < cap and (room > 0 or not costs):
            chosen.append(each.node)
            room -= costs
    return tuple(sorted(chosen))


def exclusion(
    node: str, *, now: float, hours: float, reason: str, failure_class: str | None, run: str | None,
    by: str = "agent",
) -> Exclusion:  # fmt: skip
    """The entry to write for evidence against a node found at `now`."""
    return Exclusion(
        node=node,
        time=now,
        until=now + hours * _HOUR_S,
        reason=" ".join(reason.split()),
        failure_class=failure_class,
        run=run,
        by=by,
    )


def worth_compacting(entries: tuple[Entry, ...], unreadable_lines: int, now: float) -> bool:
    """Whether most of a file that has grown is over and done with."""
    lines = len(entries) + unreadable_lines
    return lines > COMPACT_ABOVE_LINES and lines > 4 * len(active(entries, now))
