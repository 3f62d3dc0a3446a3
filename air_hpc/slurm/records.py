"""Parsers of what Slurm prints: `Key=Value` lines, durations, times and gres. Pure functions.

A line of `scontrol -o` does not quote: a value may hold spaces and '='. What a user wrote (a job's
name, its comment) is therefore cut out first, by what Slurm prints after it; in the rest a new
value begins wherever a key does. Keys that are not known are kept and do no harm.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

_UNSET = {"", "(null)", "N/A", "None", "NONE", "Unknown", "NOT_SET", "n/a"}
_KEY = r"[A-Za-z][A-Za-z0-9_/:]*"


def text_or_none(value: str | None) -> str | None:
    """The value, or None for any of Slurm's ways to print that there is none."""
    return None if value is None or value.strip() in _UNSET else value


def split_record(line: str, free_text: tuple[tuple[str, str], ...] = ()) -> dict[str, str]:
    """The keys and values of one `scontrol -o` line; the first of two equal keys counts.

    `free_text` names keys whose value a user wrote, each with the pattern of what follows it:
    they are cut out first, so that `JobName=a JobState=FAILED` cannot pass for a state.
    """
    found: dict[str, str] = {}
    for key, follows in free_text:
        match = re.search(rf"(?:^| ){key}=(.*?)(?={follows})", line)
        if match:
            found[key] = match[1]
            line = line[: match.start()] + " " + line[match.end() :]
    for match in re.finditer(rf"(?:^|\s)({_KEY})=(.*?)(?=\s{_KEY}=|\s*$)", line):
        found.setdefault(match[1], match[2].strip())
    return found


def minutes(value: str | None) -> int | None:
    """A Slurm duration (`D-HH:MM:SS`, `HH:MM:SS`, `MM:SS`, minutes) in minutes, rounded up.

    None where there is no limit or none is known.
    """
    if value is None or value.strip().upper() in {"UNLIMITED", "INFINITE", "PARTITION_LIMIT"}:
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", value.strip())
    if match is None:
        return None
    days, first, second, third = match.groups()
    if days is not None:
        hours, mins, secs = int(first), int(second or 0), int(third or 0)
    elif third is not None:
        hours, mins, secs = int(first), int(second), int(third)
    elif second is not None:
        hours, mins, secs = 0, int(first), int(second)
    else:
        hours, mins, secs = 0, int(first), 0
    return int(days or 0) * 1440 + hours * 60 + mins + (1 if secs else 0)


def timestamp(value: str | None) -> float | None:
    """Seconds since the epoch of `2026-01-31T10:11:12` in this machine's zone, or None."""
    if text_or_none(value) is None or value is None:
        return None
    try:
        return datetime.fromisoformat(value.strip()).timestamp()
    except ValueError:
        return None


def integer(value: str | None) -> int | None:
    """An integer, or None where Slurm prints none (UNLIMITED, N/A, an empty field)."""
    if value is None:
        return None
    match = re.match(r"\s*(-?\d+)", value)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class Gres:
    """One generic resource: `gpu:h100:4(S:0)` is Gres("gpu", "h100", 4)."""

    name: str
    type: str | None
    count: int


def parse_gres(text: str | None) -> tuple[Gres, ...]:
    """The resources of a node's `Gres=` value."""
    if text_or_none(text) is None or text is None:
        return ()
    found = []
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        parts = item.strip().split(":")
        if not parts[0]:
            continue
        count = 1
        if len(parts) > 1 and re.fullmatch(r"\d+[KkMm]?", parts[-1]):
            count = _scaled(parts.pop())
        found.append(Gres(parts[0], ":".join(parts[1:]) or None, count))
    return tuple(found)


def _scaled(text: str) -> int:
    scale = {"K": 1024, "M": 1024**2}.get(text[-1].upper())
    return int(text[:-1]) * scale if scale else int(text)
