"""Text on its way into a script: it comes out exactly as it went in, or it is refused.

Two readers take our scripts apart. bash reads the body, where `shlex.quote` is exact for anything
but control characters. sbatch reads the `#SBATCH` lines with a parser of its own: it takes the
quotes of `shlex.quote` as bash does, but a backslash is an escape for it even between single
quotes (seen on 22.05.8: `'a\\b'` arrives as `ab`, a trailing one is a fatal error), and a newline
ends the line, after which the rest of the value would run as shell. So header values are refused
with a backslash or a control character.
"""

from __future__ import annotations

import shlex
import unicodedata

from air_hpc.errors import BadInput, Problem

NO_CONTROL = "one line without control characters"
NO_BACKSLASH = "no backslash (sbatch takes it for an escape)"


def bash(value: str, key: str = "") -> str:
    """`value` as one word of bash that expands to exactly itself.

    Raises BadInput, naming `key`, for control characters and for text that is not UTF-8.
    """
    _raise(bash_problem(value, key))
    return shlex.quote(value)


def bash_words(values: list[str], key: str = "") -> str:
    """A command line whose words are exactly `values`."""
    return " ".join(bash(value, key) for value in values)


def header_problem(value: str, key: str) -> Problem | None:
    """Why `value` cannot stand in an #SBATCH line, or None."""
    if "\\" in value:
        return Problem(key, repr(value), "cannot be given to sbatch exactly", NO_BACKSLASH)
    if not value:
        return Problem(key, "''", "is empty", "some text, or null to leave it out")
    return bash_problem(value, key)


def bash_problem(value: str, key: str) -> Problem | None:
    """Why `value` cannot stand in a script, or None."""
    if any(unicodedata.category(char) in {"Cc", "Zl", "Zp"} for char in value):
        return Problem(key, repr(value), "has a control character", NO_CONTROL)
    try:
        value.encode()
    except UnicodeEncodeError:
        return Problem(key, repr(value), "is not valid UTF-8", NO_CONTROL)
    return None


def _raise(problem: Problem | None) -> None:
    if problem is not None:
        raise BadInput([problem])
