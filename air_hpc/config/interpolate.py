"""Fills `${...}` in a composed config (`${oc.env:USER}`, `${model.dim}`), through OmegaConf.

Most configs have none, and then nothing is built: that is what keeps a task of a sweep cheap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from air_hpc.config.hydra_words import told_by
from air_hpc.errors import Problem


def resolve(config: dict[str, Any]) -> list[Problem]:
    """Fill `${...}` in place; a problem for each that cannot be filled (then without its key)."""
    if not _interpolates(config):
        return []
    problems: list[Problem] = []
    _resolve_below(config, OmegaConf.create(config), "", problems)
    return problems


def _interpolates(value: Any) -> bool:
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, dict):
        return any(_interpolates(entry) for entry in value.values())
    return isinstance(value, list) and any(_interpolates(entry) for entry in value)


def _resolve_below(plain: Any, node: Any, prefix: str, problems: list[Problem]) -> None:
    for name, value in list(_entries(plain)):
        key = f"{prefix}{name}"
        if isinstance(value, dict | list):
            _resolve_below(value, node[name], f"{key}.", problems)
        elif isinstance(value, str) and "${" in value:
            try:
                filled = node[name]
                if OmegaConf.is_config(filled):
                    filled = OmegaConf.to_container(filled, resolve=True)
            except (OmegaConfBaseException, ValueError, KeyError, OSError) as error:
                hint = "Set what it names, or give the value itself"
                problems.append(Problem(key, value, told_by(error), hint=hint))
                if isinstance(plain, dict):
                    del plain[name]
                continue
            plain[name] = filled


def _entries(plain: Mapping[Any, Any] | list[Any]) -> Iterator[tuple[Any, Any]]:
    return iter(plain.items()) if isinstance(plain, Mapping) else enumerate(plain)
