"""Applies parsed overrides to a composed config held as plain data, one problem for each mistake.

The meaning is Hydra's: `key=value` changes a key that exists, `+key=value` adds one, `++key=value`
does either, `~key` deletes. A key exists when the composed config has it or the RunSpec does (a
site's file may leave out what has a default), and a map of free names (`launch.sbatch`,
`cluster.env`) takes new names without a `+`. Values that are mappings are merged, others replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_origin

from air_hpc.config.build import fields_of, nearest_key, options_of, show
from air_hpc.config.spec import RunSpec
from air_hpc.errors import Problem

_GROUPS_OF_NO_SECTION = ("experiment",)

Action = Literal["change", "add", "force", "delete"]


@dataclass(frozen=True)
class Assignment:
    """One override of a value: where, what, and the text it was written as.

    `literal` is the value as written when it is a bare number or word that the grammar turned into
    another type (`0123`, `1_000`, `true`): a key that wants text takes it letter by letter.
    """

    action: Action
    key: str
    value: Any
    text: str
    literal: str | None = None


def schema_at(path: list[str]) -> Any:
    """The type that a RunSpec holds at a dotted path, or None where it has no such key.

    Below a map of free names any one name has the type of the map's values.
    """
    current: Any = RunSpec
    for part in path:
        options = options_of(current)
        classes = [option for option in options if isinstance(option, type)]
        nested = next((c for c in classes if hasattr(c, "__dataclass_fields__")), None)
        if nested is not None:
            member = fields_of(nested).get(part)
            if member is None:
                return None
            current = member.annotation
        elif is_open_map(current):
            current = options_of(current)[0].__args__[1]
        else:
            return None
    return current


def is_open_map(annotation: Any) -> bool:
    """Whether a type is a map of free names."""
    return get_origin(annotation) is Mapping


def apply(config: dict[str, Any], assignment: Assignment) -> Problem | None:
    """Change `config` in place as the assignment says, or return what is wrong with it."""
    *parents, last = path = assignment.key.split(".")
    if assignment.action == "delete":
        return _delete(config, assignment)
    known = schema_at(path)
    if assignment.action == "change" and known is None and not _present(config, path):
        return Problem(
            assignment.key,
            show(assignment.value),
            "unknown key",
            hint=nearest_key(assignment.key, RunSpec, _GROUPS_OF_NO_SECTION),
        )
    holder = config
    for depth, part in enumerate(parents):
        below = holder.get(part)
        if below is None:
            below = holder[part] = {}
        if not isinstance(below, dict):
            above = ".".join(parents[: depth + 1])
            return Problem(
                assignment.key, show(assignment.value), f"{above} is no mapping but {show(below)}"
            )
        holder = below
    value = _as_wanted(assignment, known)
    present = holder.get(last)
    if assignment.action == "add" and present is not None and not isinstance(value, dict | list):
        return Problem(
            assignment.key,
            show(value),
            f"the config already has it ({show(present)}), so it cannot be added",
            hint=f"Write {assignment.text.removeprefix('+')} to change it",
        )
    if isinstance(value, dict) and isinstance(present, dict):
        _merge(present, value)
    else:
        holder[last] = copy.deepcopy(value)
    return None


def _as_wanted(assignment: Assignment, known: Any) -> Any:
    """The value, or its letters where the key takes text and no number, truth or null."""
    value = assignment.value
    if assignment.literal is None or known is None:
        return value
    options = options_of(known)
    if str in options and type(value) not in options:
        return assignment.literal
    return value


def _present(config: Mapping[str, Any], path: list[str]) -> bool:
    current: Any = config
    for part in path:
        if not isinstance(current, Mapping) or part not in current:
            return False
        current = current[part]
    return True


def _delete(config: dict[str, Any], assignment: Assignment) -> Problem | None:
    *parents, last = path = assignment.key.split(".")
    if not _present(config, path):
        return Problem(
            assignment.key,
            "~",
            "the config has no such key to delete",
            hint=nearest_key(assignment.key, RunSpec, _GROUPS_OF_NO_SECTION),
        )
    holder: Any = config
    for part in parents:
        holder = holder[part]
    if assignment.value is not None and assignment.value != holder[last]:
        return Problem(
            assignment.key,
            show(assignment.value),
            f"its value is {show(holder[last])}, so it is not deleted",
            hint=f"Write ~{assignment.key} to delete any value",
        )
    del holder[last]
    return None


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        present = into.get(name)
        if isinstance(value, dict) and isinstance(present, dict):
            _merge(present, value)
        else:
            into[name] = copy.deepcopy(value)
