"""The errors of the whole project: one root, and problems that are collected before they are shown.

A wrong input is never reported one mistake at a time. Checks return `Problem`s; whoever owns the
whole input raises `BadInput` with all of them. A failure of the environment (a command that is
missing, a scheduler that does not answer) is an `EnvironmentFailure`: it says what was tried and
what to do next. The command line turns these into exit codes; nothing else prints a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

EXIT_OK: Final = 0
EXIT_ENVIRONMENT: Final = 1
EXIT_BAD_INPUT: Final = 2
EXIT_DO_NOT_RESTART: Final = 93
"""A verdict not to restart: what a batch script, a chain or a person must not run again."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with an input.

    `key` is the dotted config key (or option) it is about, `value` what was given as text,
    `message` what is wrong, `allowed` what would be right, and `hint` what to do or the nearest
    valid name. A `warning` is shown and does not stop a submission.
    """

    key: str
    value: str
    message: str
    allowed: str = ""
    hint: str = ""
    warning: bool = False

    def __str__(self) -> str:
        text = f"{self.key}={self.value}: {self.message}" if self.key else self.message
        if self.allowed:
            text += f"; allowed: {self.allowed}"
        if self.hint:
            text += f". {self.hint}"
        return text


class AirHpcError(Exception):
    """The root of every error this project raises on purpose."""

    exit_code: int = EXIT_ENVIRONMENT


class BadInput(AirHpcError):
    """The input is wrong: `problems` holds every reason, in the order they were found."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @classmethod
    def single(
        cls, key: str, value: object, message: str, *, allowed: str = "", hint: str = ""
    ) -> BadInput:
        """The error for one problem found where no more can be collected."""
        return cls([Problem(key, str(value), message, allowed, hint)])


class EnvironmentFailure(AirHpcError):
    """Something outside the input failed: `tried` says what was done, `next_step` what to do."""

    exit_code = EXIT_ENVIRONMENT

    def __init__(self, message: str, *, tried: str = "", next_step: str = "") -> None:
        self.tried = tried
        self.next_step = next_step
        parts = [message]
        if tried:
            parts.append(f"tried: {tried}")
        if next_step:
            parts.append(f"next: {next_step}")
        super().__init__("; ".join(parts))


_MOST_NAMED = 3


def nearest(name: str, valid: Sequence[str]) -> str:
    """A hint that names the nearest valid name, or an empty text when none is near.

    What was begun and not finished has several (h100: h100_nvl, h100_pcie, h100_sxm): up to three
    are named, before any that merely looks alike (v100).
    """
    folded = {each.casefold(): each for each in valid}
    begun = [each for text, each in folded.items() if name and text.startswith(name.casefold())]
    if 0 < len(begun) <= _MOST_NAMED:
        return f"Did you mean {' or '.join(filter(None, (', '.join(begun[:-1]), begun[-1])))}?"
    matches = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)
    return f"Did you mean {folded[matches[0]]}?" if matches else ""


def raise_if_any(problems: Iterable[Problem]) -> None:
    """Raise `BadInput` with the problems that are not warnings, if there are any."""
    errors = [problem for problem in problems if not problem.warning]
    if errors:
        raise BadInput(errors)
