"""Hydra's overrides and complaints, in this project's words.

Hydra speaks to whoever writes a Hydra program: its messages name its own options, span lines and
point at its documentation. What a user of this project gets is a `Problem`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hydra.core.override_parser.types import Override, QuotedString, Sweep, ValueType
from hydra.errors import HydraException

from air_hpc.errors import Problem

MAX_SWEEP_TASKS = 100_000
"""More tasks than this are taken for a mistake in a range."""


def told_by(error: BaseException) -> str:
    """What an exception of Hydra says, as one line, without its advice for other programs."""
    parts = [str(error), str(error.__cause__ or "")]
    text = next((part for part in parts if part.strip()), type(error).__name__)
    kept = itertools.takewhile(
        lambda line: not line.startswith(("Config search path", "See http", "    full_key")),
        (line for line in text.splitlines() if line.strip()),
    )
    return "; ".join(line.strip() for line in kept) or type(error).__name__


def syntax_problem(text: str, error: HydraException) -> Problem:
    """The problem of an override that Hydra's parser refused with `error`."""
    key, equals, value = text.partition("=")
    if not equals and not text.startswith("~"):
        return Problem(key, "", "an override needs a value", "key=value, +key=value or ~key")
    lines = [line for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("See http", "Error parsing", "Avail"))]
    said = told[0].strip() if told else "it does not parse"
    if said.startswith("LexerNoViableAltException"):
        said = "a character that the override grammar does not take here"
    return Problem(
        key.lstrip("+~"),
        value,
        f"not an override: {said}",
        "key=value",
        f"Quote a value with special characters: {key}='\"...\"'",
    )


def sweep_texts(override: Override, text: str) -> tuple[list[str], Problem | None]:
    """One override text for each point of a swept override, or none and what is wrong with it."""
    key, value = override.get_key_element(), written(text)
    if override.value_type == ValueType.INTERVAL_SWEEP:
        message = "an interval has no points to run"
        return [], Problem(key, value, message, "range(start,stop,step) or a list of values")
    try:
        points = list(itertools.islice(override.sweep_string_iterator(), MAX_SWEEP_TASKS + 1))
    except (HydraException, ValueError) as error:
        return [], Problem(key, value, f"not a sweep: {told_by(error)}")
    if not points:
        return [], Problem(key, value, "a sweep over nothing", "at least one value")
    if len(points) > MAX_SWEEP_TASKS:
        return [], Problem(key, value, "too many points", f"at most {MAX_SWEEP_TASKS}")
    return [f"{key}={point}" for point in points], None


def literal(override: Override, text: str) -> str | None:
    """The value as written, if it is a bare scalar that became something other than text."""
    value, typed = override._value, written(text).strip()
    if isinstance(value, QuotedString | str | Sweep | list | dict) or "(" in typed:
        return None
    return typed


def written(text: str) -> str:
    """The value of an override as it was typed."""
    return text.partition("=")[2]


def quoted_list(texts: Sequence[str]) -> str:
    """A list of texts in the grammar of overrides."""
    escaped = (text.replace("\\", "\\\\").replace("'", "\\'") for text in texts)
    return "[" + ",".join(f"'{text}'" for text in escaped) + "]"
