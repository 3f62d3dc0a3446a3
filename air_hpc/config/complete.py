"""Shell completion of overrides: groups and their options, dotted keys and their values.

It lists folders and dataclasses and imports no Hydra, so that a key press is answered at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from air_hpc.config.build import entry_maps, fields_of, leaf_keys, literals_of, options_of, show
from air_hpc.config.freeze import load_yaml
from air_hpc.config.groups import ConfigFolders
from air_hpc.config.overrides import schema_at
from air_hpc.config.spec import RunSpec
from air_hpc.errors import BadInput


def complete(words: Sequence[str], config_dir: str | Path | None = None) -> list[str]:
    """Candidates for the last of `words`, each a whole word that begins with it.

    Group options and the values of a closed set are completed after `=`; before it, groups and
    keys, whose candidates end in `=` or `.`. Never raises: a wrong folder gives no candidates.
    """
    try:
        folders = ConfigFolders.find(config_dir)
        return _candidates(words[-1] if words else "", folders)
    except (BadInput, OSError):
        return []


def _candidates(word: str, folders: ConfigFolders) -> list[str]:
    bare = word.lstrip("+~")
    prefix = word[: len(word) - len(bare)]
    key, equals, value = bare.partition("=")
    if equals:
        before, _, last = value.rpartition(",")
        head = f"{prefix}{key}=" + (f"{before}," if before else "")
        return [f"{head}{v}" for v in _values(key, folders) if v.startswith(last)]
    end = "" if prefix == "~" else "="
    for entry_map, cls in entry_maps(RunSpec).items():
        if key.startswith(f"{entry_map}."):
            found = _entries(key, entry_map, cls, end, folders)
            return [f"{prefix}{name}" for name in found if name.startswith(key)]
    names = [f"{group}{end}" for group in folders.groups()]
    names += [f"{section}." for section in _sections()]
    if "." in key or not any(name.startswith(key) for name in names):
        names = [f"{leaf}{end}" for leaf in leaf_keys(RunSpec)]
    else:
        names += [f"{leaf}{end}" for leaf in leaf_keys(RunSpec) if "." not in leaf]
    return [f"{prefix}{name}" for name in names if name.startswith(key)]


def _entries(
    key: str, entry_map: str, cls: type[Any], end: str, folders: ConfigFolders
) -> list[str]:
    """What may follow `recovery.rules.`: the names in its files, then the keys of one entry."""
    name, dot, _ = key.removeprefix(f"{entry_map}.").partition(".")
    if dot:
        return [f"{entry_map}.{name}.{below}{end}" for below in fields_of(cls)]
    after = "" if end == "" else "."
    return [f"{entry_map}.{known}{after}" for known in _names_in(entry_map, folders)]


def _names_in(entry_map: str, folders: ConfigFolders) -> list[str]:
    """The names that the option files of a nested group hold (recovery/rules)."""
    group = entry_map.replace(".", "/")
    names: dict[str, None] = {}
    for option in folders.options(group):
        path = folders.file(group, option)
        try:
            body = load_yaml(path.read_text(encoding="utf-8")) if path else None
        except (OSError, ValueError, yaml.YAMLError):
            continue
        if isinstance(body, dict):
            names |= dict.fromkeys(name for name in map(str, body) if name != "defaults")
    return list(names)


def _sections() -> list[str]:
    return list(dict.fromkeys(leaf.split(".")[0] for leaf in leaf_keys(RunSpec) if "." in leaf))


def _values(key: str, folders: ConfigFolders) -> list[str]:
    if folders.is_group(key):
        return folders.options(key)
    annotation = schema_at(key.split("."))
    if annotation is None:
        return []
    values = [show(value) for value in literals_of(annotation)]
    if bool in options_of(annotation):
        values += ["true", "false"]
    if type(None) in options_of(annotation):
        values.append("null")
    return values
