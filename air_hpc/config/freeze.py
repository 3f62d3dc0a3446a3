"""Writes config dataclasses as plain data and YAML, and hashes them.

Plain data is what JSON can hold: mappings with text keys, lists, text, numbers, true, false and
null. Reading back goes through `config.build`, so what was written and what is read are checked by
the same rules. The hash is over canonical JSON: key order and layout do not matter, values do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def to_plain(value: Any) -> Any:
    """A frozen dataclass, and everything in it, as plain data; shares nothing with the original.

    A class that stands in a map of free names is written without what is null or empty there: a
    table of rules would be mostly that.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _entry(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry) for entry in value]
    return value


def _entry(value: Any) -> Any:
    if not is_dataclass(value) or isinstance(value, type):
        return to_plain(value)
    members = [(f, getattr(value, f.name)) for f in fields(value)]
    return {
        f.name: to_plain(held)
        for f, held in members
        if not (f.default in (None, "", ()) and held == f.default)
    }


def canonical_json(plain: Any) -> str:
    """Plain data as JSON with sorted keys and no spaces; ValueError for nan and infinity."""
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical_hash(plain: Any) -> str:
    """The SHA-256 of the canonical JSON, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(plain).encode()).hexdigest()


def dump_yaml(plain: Any) -> str:
    """Plain data as YAML in its own order, ASCII only, so that any reader gets the same text."""
    text: str = yaml.dump(plain, Dumper=_DUMPER, sort_keys=False, allow_unicode=False, width=100)
    return text


def load_yaml(text: str) -> Any:
    """What a YAML text holds; raises yaml.YAMLError."""
    return yaml.load(text, Loader=_LOADER)
