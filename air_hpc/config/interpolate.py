"""Fills `${...}` in a composed config (`${oc.env:USER}`, `${model.dim}`), through OmegaConf.

Most configs have none, and then nothing is built: that is what keeps a task of a sweep cheap.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from air_hpc.config.hydra_words import told_by
from air_hpc.errors import Problem

_MISSING = "???"
"""OmegaConf's mark for a value that somebody else must give."""


def resolve(config: dict[str, Any]) -> list[Problem]:
    """Fill `${...}` in place; a problem for each that cannot be filled (then without its key)."""
    if not _has_marks(config):
        return []
    _fill_from_environment(config)
    if not _has_marks(config):
        return []
    problems: list[Problem] = []
    _drop_malformed(config, "", problems)
    _fill(config, OmegaConf.create(config), "", problems)
    return problems


def _has_marks(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_marks(entry) for entry in value.values())
    if isinstance(value, list):
        return any(_has_marks(entry) for entry in value)
    return _is_marked(value)


def _is_marked(value: Any) -> bool:
    return isinstance(value, str) and ("${" in value or value == _MISSING)


_OF_ENVIRONMENT = re.compile(r"\$\{oc\.env:[^${}]*\}")


def _fill_from_environment(plain: Any) -> None:
    """Fill values that are an environment variable and nothing more: they need no other key, so
    the whole config need not be built for them. What cannot be filled is left for `_fill`."""
    for name, value in list(_entries(plain)):
        if isinstance(value, dict | list):
            _fill_from_environment(value)
        elif isinstance(value, str) and _OF_ENVIRONMENT.fullmatch(value):
            with contextlib.suppress(*_UNFILLED):
                plain[name] = OmegaConf.create({"value": value}).value


def _drop_malformed(plain: Any, prefix: str, problems: list[Problem]) -> None:
    """Take out what OmegaConf would not even hold, so that it can hold the rest."""
    for name, value in list(_entries(plain)):
        key = f"{prefix}{name}"
        if isinstance(value, dict | list):
            _drop_malformed(value, f"{key}.", problems)
        elif value == _MISSING:
            problems.append(Problem(key, value, "a value is needed here and none was given"))
            _drop(plain, name)
        elif _is_marked(value):
            try:
                OmegaConf.create({"value": value})
            except (OmegaConfBaseException, ValueError) as error:
                hint = "Write ${key} or ${oc.env:NAME}, and \\${ to mean the characters"
                problems.append(Problem(key, value, told_by(error), hint=hint))
                _drop(plain, name)


def _fill(plain: Any, node: Any, prefix: str, problems: list[Problem]) -> None:
    for name, value in list(_entries(plain)):
        key = f"{prefix}{name}"
        if isinstance(value, dict | list):
            _fill(value, node[name], f"{key}.", problems)
        elif _is_marked(value):
            try:
                filled = node[name]
                if OmegaConf.is_config(filled):
                    filled = OmegaConf.to_container(filled, resolve=True)
            except _UNFILLED as error:
                hint = "Set what it names, or give the value itself"
                problems.append(Problem(key, value, told_by(error), hint=hint))
                _drop(plain, name)
                continue
            plain[name] = filled


_UNFILLED = (OmegaConfBaseException, ValueError, KeyError, OSError, RecursionError)


def _drop(plain: Any, name: Any) -> None:
    """Remove a key; an entry of a list becomes empty text, so that its neighbours keep places."""
    if isinstance(plain, dict):
        del plain[name]
    else:
        plain[name] = ""


def _entries(plain: Mapping[Any, Any] | list[Any]) -> Iterator[tuple[Any, Any]]:
    return iter(plain.items()) if isinstance(plain, Mapping) else enumerate(plain)
