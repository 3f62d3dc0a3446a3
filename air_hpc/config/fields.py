"""Constraints of config fields, declared where the field is and checked in one place.

`config.build` turns a mapping into a dataclass; it reads the constraint out of the field's
metadata. So the range of a value stands beside its type and its meaning, once.
"""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Callable
from dataclasses import MISSING, field
from typing import Any, Literal

_ENTRY_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")

AUTO: Literal["auto"] = "auto"
Auto = Literal["auto"]
"""A value the plan resolves: it never reaches run.yaml's Plan."""

Check = Callable[[Any], str | None]
"""Returns what is allowed, as text, when the value is not allowed; else None."""


def _constrained(check: Check, default: Any, factory: Any) -> Any:
    metadata = {"check": check}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    if default is not MISSING:
        return field(default=default, metadata=metadata)
    return field(metadata=metadata)


def at_least(minimum: float, default: Any = MISSING) -> Any:
    """A number (or `auto`, or null where the type allows it) not below `minimum`."""

    def check(value: Any) -> str | None:
        if value is None or value == AUTO or value >= minimum:
            return None
        return f"at least {minimum:g}"

    return _constrained(check, default, MISSING)


def above(minimum: float, default: Any = MISSING) -> Any:
    """A number (or `auto`, or null where the type allows it) strictly above `minimum`."""

    def check(value: Any) -> str | None:
        if value is None or value == AUTO or value > minimum:
            return None
        return f"above {minimum:g}"

    return _constrained(check, default, MISSING)


def between(low: float, high: float, default: Any = MISSING, *, high_open: bool = False) -> Any:
    """A number from `low` to `high`, the upper end left out when `high_open`."""

    def check(value: Any) -> str | None:
        if value is None or (low <= value < high if high_open else low <= value <= high):
            return None
        return f"from {low:g} to {'below ' if high_open else ''}{high:g}"

    return _constrained(check, default, MISSING)


def _is_one_line(text: str) -> bool:
    return not any(ord(char) < 32 or ord(char) == 127 for char in text)


def one_line(default: Any = MISSING) -> Any:
    """Text without control characters: it ends up in a script, a job name or a header."""

    def check(value: Any) -> str | None:
        if value is None or _is_one_line(value):
            return None
        return "one line without control characters"

    return _constrained(check, default, MISSING)


def lines() -> Any:
    """A list of texts, empty by default, each of them one line without control characters."""

    def check(value: Any) -> str | None:
        if all(_is_one_line(entry) for entry in value):
            return None
        return "entries of one line without control characters"

    return _constrained(check, (), MISSING)


def named_lines() -> Any:
    """A mapping, empty by default, whose names and texts are one line each."""

    def check(value: Any) -> str | None:
        if all(_is_one_line(f"{name}{entry}") for name, entry in value.items()):
            return None
        return "names and values of one line without control characters"

    return _constrained(check, MISSING, dict)


def named_entries() -> Any:
    """A mapping, empty by default, of free names to config classes.

    A name is one that an override can address: `recovery.rules.my_site.pattern=...`.
    """

    def check(value: Any) -> str | None:
        if all(_ENTRY_NAME.fullmatch(name) for name in value):
            return None
        return "names of letters, digits, _ and -, beginning with a letter"

    return _constrained(check, MISSING, dict)


def regular_expression(default: Any = MISSING) -> Any:
    """A regular expression of Python's `re`, or null."""

    def check(value: Any) -> str | None:
        if value is None:
            return None
        try:
            re.compile(value)
        except (re.error, RecursionError, OverflowError) as error:
            return f"a regular expression ({error})"
        return None

    return _constrained(check, default, MISSING)


def signal_names() -> Any:
    """A list of signals by name (SIGKILL), empty by default."""
    return _names_of(frozenset(number.name for number in signal.Signals), "names like SIGKILL")


def errno_names() -> Any:
    """A list of system errors by name (ENOSPC), empty by default."""
    return _names_of(frozenset(errno.errorcode.values()), "names like ENOSPC, see errno(3)")


def _names_of(valid: frozenset[str], words: str) -> Any:
    def check(value: Any) -> str | None:
        return None if valid.issuperset(value) else words

    return _constrained(check, (), MISSING)
