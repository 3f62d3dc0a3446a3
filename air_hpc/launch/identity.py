"""The names of runs, sweeps and submissions.

A run's id is readable and unique, and is fixed before anything is submitted. The key of a
submission stands at the end of the job's *name*: squeue and sacct both keep the name (a comment is
lost in most sites' accounting), so a submission that got no answer can be looked up by it.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence

MAX_LABEL = 40
"""Of the readable part; with the rest it stays below what accounting keeps of a job's name."""


def run_ids(models: Sequence[str], *, now: float | None = None) -> tuple[str, ...]:
    """An id for each run of one submission: `<model>-<yymmdd>-<hhmmss>-<6 hex digits>`.

    The runs of a sweep share all but a last `-<index>`, so that they sort as they were written.
    """
    common = f"{_stamp(now)}-{secrets.token_hex(3)}"
    if len(models) == 1:
        return (f"{label(models[0])}-{common}",)
    width = len(str(len(models) - 1))
    return tuple(f"{label(m)}-{common}-{index:0{width}d}" for index, m in enumerate(models))


def sweep_id(*, now: float | None = None, unique: str | None = None) -> str:
    """`sweep-<yymmdd>-<hhmmss>-<6 hex digits>`, in local time."""
    return f"sweep-{_stamp(now)}-{unique or secrets.token_hex(3)}"


def submission_key() -> str:
    """Ten random hexadecimal digits: what makes a job's name this submission's alone."""
    return secrets.token_hex(5)


def job_name(name: str, key: str, part: str = "") -> str:
    """The job's name: the user's label (his own words, whole), the key, and which part of it."""
    return f"{name}-{key}{part}"


def label(text: str) -> str:
    """`text` as a piece of a file name: letters, digits, `_`, `.` and `-`."""
    cleaned = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")
    return cleaned[:MAX_LABEL].rstrip("-.") or "run"


def _stamp(now: float | None) -> str:
    return time.strftime("%y%m%d-%H%M%S", time.localtime(now))
