"""Reads a verb's options out of arguments in any order, as Hydra's users expect.

An option may stand before, between or after overrides; `--name=value` and `--name value` are the
same; `--` ends the options. Every mistake of a command line is found in one pass. (argparse would
cost as much time as the rest of `--help`, and takes no positionals between options it may not
know.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from air_hpc.errors import Problem, nearest, raise_if_any

Kind = Literal["flag", "text", "whole", "texts"]


@dataclass(frozen=True)
class Option:
    """One option: its names, the longest of which names its value, and what follows it.

    `flag` takes nothing, `text` any text, `whole` a number from 0, `texts` may be given repeatedly.
    """

    names: tuple[str, ...]
    help: str
    kind: Kind = "flag"
    metavar: str = ""
    choices: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name that its value is found under."""
        return max(self.names, key=len).lstrip("-").replace("-", "_")

    @property
    def usage(self) -> str:
        """As help shows it: `-m, --multirun`."""
        shown = ", ".join(self.names)
        return f"{shown} {self.metavar}" if self.metavar else shown


@dataclass(frozen=True)
class Parsed:
    """What a command line holds: values by key, and the rest in order."""

    values: dict[str, str | int | bool | list[str]] = field(default_factory=dict)
    rest: tuple[str, ...] = ()

    def flag(self, key: str) -> bool:
        """Whether a flag was given."""
        return bool(self.values.get(key, False))

    def text(self, key: str) -> str | None:
        """The text of an option, or None where it was not given."""
        value = self.values.get(key)
        return value if isinstance(value, str) else None

    def whole(self, key: str) -> int | None:
        """The number of an option, or None where it was not given."""
        value = self.values.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def texts(self, key: str) -> list[str]:
        """Every text of an option that may be repeated."""
        value = self.values.get(key)
        return value if isinstance(value, list) else []


HELP = Option(("-h", "--help"), "show this text")
JSON = Option(("--json",), "print one JSON object on stdout, and nothing else there")
RUNS_DIR = Option(
    ("--runs-dir",), "the folder of runs (default: $AIR_HPC_RUNS_DIR, or ./runs)", "text", "DIR"
)


def parse(arguments: Sequence[str], options: Sequence[Option]) -> Parsed:
    """Read `arguments`; raises BadInput with every option that is unknown or lacks its value."""
    known = {name: option for option in (*options, HELP) for name in option.names}
    values: dict[str, str | int | bool | list[str]] = {}
    rest: list[str] = []
    problems: list[Problem] = []
    pending = list(arguments)
    while pending:
        word = pending.pop(0)
        if word == "--":
            rest += pending
            break
        if not word.startswith("-") or word == "-":
            rest.append(word)
            continue
        name, equals, attached = word.partition("=")
        option = known.get(name)
        if option is None:
            hint = nearest(name, [n for n in known if n.startswith("--")])
            problems.append(Problem("", "", f"unknown option {name}", hint=hint))
            continue
        if option.kind == "flag":
            if equals:
                problems.append(Problem(name, attached, "takes no value"))
            values[option.key] = True
            continue
        if not equals:
            if not pending:
                problems.append(Problem("", "", f"{name} needs a value", option.metavar))
                continue
            attached = pending.pop(0)
        problem = _store(values, option, name, attached)
        if problem is not None:
            problems.append(problem)
    if not values.get("help"):
        raise_if_any(problems)
    return Parsed(values, tuple(rest))


def _store(
    values: dict[str, str | int | bool | list[str]], option: Option, name: str, text: str
) -> Problem | None:
    if option.choices and text not in option.choices:
        allowed = ", ".join(option.choices)
        return Problem(name, text, "not a choice", allowed, nearest(text, option.choices))
    if option.kind == "whole":
        if not text.isdecimal():
            return Problem(name, text, "not a number", "a whole number from 0")
        values[option.key] = int(text)
    elif option.kind == "texts":
        held = values.setdefault(option.key, [])
        assert isinstance(held, list)
        held.append(text)
    else:
        values[option.key] = text
    return None


def option_lines(options: Sequence[Option]) -> str:
    """The options as help lists them."""
    shown = [*options, HELP]
    width = max(len(option.usage) for option in shown)
    return "\n".join(f"  {option.usage:<{width}}  {option.help}" for option in shown)
