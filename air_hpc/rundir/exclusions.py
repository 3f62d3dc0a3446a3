"""The nodes that a user's runs avoid: one file that all of them share, one JSON object a line.

`<runs_dir>/.air_hpc/exclusions.jsonl` holds exclusions (node, until when, why, by whom) and
releases, in the order in which they came; what they amount to at a time is `recovery.exclusions`'.
Agents of several runs and the user's commands append to it without a lock. Like the ledger, it is
read up to what can be read: a line that was cut or mixed up (an append over NFS is no atomic one)
is skipped and counted. To lose a line costs one more failure of that node, which writes the next.

Only `compact` rewrites it, for the verb `nodes`; see docs/decisions/0011-node-exclusions.md.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from air_hpc.errors import EnvironmentFailure
from air_hpc.rundir.atomic import fsync_dir, open_file, write_all, write_atomic
from air_hpc.rundir.layout import SHARED_DIR, make_shared_dir

SCHEMA_VERSION = 1
FILE_NAME = "exclusions.jsonl"
PRIVATE = 0o600
_LONGEST_READ_BYTES = 16 * 1024 * 1024
"""Of the file's end: it holds some tens of lines; a file beyond that is not ours to load."""


@dataclass(frozen=True)
class Exclusion:
    """One node, avoided from `time` to `until` (seconds since the epoch).

    `failure_class` is None where a person asked for it; `run` is the run whose failure it was.
    `by` names who wrote it: `agent`, or the user.
    """

    node: str
    time: float
    until: float
    reason: str
    failure_class: str | None = None
    run: str | None = None
    by: str = "agent"


@dataclass(frozen=True)
class Release:
    """A node that may be used again, whatever was written before; None: every node."""

    node: str | None
    time: float
    by: str = "agent"


Entry = Exclusion | Release


@dataclass(frozen=True)
class Exclusions:
    """All entries in the order of the file, and how many lines could not be read."""

    entries: tuple[Entry, ...] = ()
    unreadable_lines: int = 0


def exclusions_file(runs_dir: Path) -> Path:
    """The file of a runs folder; it need not exist."""
    return runs_dir / SHARED_DIR / FILE_NAME


def read_exclusions(runs_dir: Path) -> Exclusions:
    """What the file says; nothing where there is none.

    Never raises for what it contains; EnvironmentFailure where it may not be read.
    """
    path = exclusions_file(runs_dir)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _LONGEST_READ_BYTES))
            return parse(file.read())
    except FileNotFoundError:
        return Exclusions()
    except OSError as error:
        raise _failure("read", path, error) from None


def append_exclusions(runs_dir: Path, entries: Iterable[Entry]) -> None:
    """Add entries, durable before the call returns. Raises EnvironmentFailure."""
    path = exclusions_file(runs_dir)
    data = "".join(f"{to_line(entry)}\n" for entry in entries).encode()
    try:
        make_shared_dir(runs_dir)
        is_new = not path.exists()
        fd = open_file(path, os.O_RDWR | os.O_APPEND)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                data = b"\n" + data
            # One write for all: other writers' lines come before or after, not between.
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        if is_new:
            fsync_dir(path.parent)
    except OSError as error:
        raise _failure("write", path, error) from None


def compact(runs_dir: Path, kept: Iterable[Entry]) -> None:
    """Replace the file by these entries alone. Raises EnvironmentFailure.

    What another process appends in this moment may be lost, which the module's docstring allows.
    """
    path = exclusions_file(runs_dir)
    try:
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else PRIVATE
        write_atomic(path, "".join(f"{to_line(entry)}\n" for entry in kept).encode(), mode)
    except OSError as error:
        raise _failure("rewrite", path, error) from None


def parse(text: bytes) -> Exclusions:
    """The entries of a file's text."""
    found: list[Entry] = []
    unreadable = 0
    for line in text.decode("utf-8", errors="replace").split("\n"):
        if not line.strip():
            continue
        entry = from_line(line)
        if entry is None:
            unreadable += 1
        else:
            found.append(entry)
    return Exclusions(tuple(found), unreadable)


def to_line(entry: Entry) -> str:
    """One line, without its newline."""
    body: dict[str, Any] = {"v": SCHEMA_VERSION, "time": entry.time, "by": entry.by}
    if isinstance(entry, Release):
        body |= {"kind": "release", "node": entry.node}
    else:
        body |= {
            "kind": "exclude",
            "node": entry.node,
            "until": entry.until,
            "class": entry.failure_class,
            "reason": entry.reason,
            "run": entry.run,
        }
    return json.dumps(body, separators=(",", ":"))


def from_line(line: str) -> Entry | None:
    """The entry in a line, or None where there is none."""
    try:
        body = json.loads(line)
        node, moment, by = body["node"], float(body["time"]), str(body.get("by", ""))
        if not math.isfinite(moment) or not (node is None or is_node_name(node)):
            return None
        if body["kind"] == "release":
            return Release(node, moment, by)
        until = float(body["until"])
        if body["kind"] != "exclude" or node is None or not math.isfinite(until):
            return None
        return Exclusion(
            node=node,
            time=moment,
            until=until,
            reason=str(body.get("reason") or ""),
            failure_class=_text(body.get("class")),
            run=_text(body.get("run")),
            by=by,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def is_node_name(text: object) -> bool:
    """Whether this can be one node's name: nothing else reaches sbatch and the batch script.

    RFC 952's letters, and the underscore that sites use; never a dash first, which would be read
    as an option.
    """
    if not isinstance(text, str) or not 0 < len(text) <= 253 or not text.isascii():
        return False
    return text[0].isalnum() and all(char.isalnum() or char in "._-" for char in text)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _failure(what: str, path: Path, error: OSError) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"cannot {what} {path}: {error.strerror}",
        tried=f"{what} the nodes that all runs avoid",
        next_step="check space and permissions there",
    )
