"""Hypothesis strategies for config dataclasses, drawn from their types and constraints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, Literal, get_args, get_origin

from hypothesis import strategies as st

from air_hpc.config.build import entry_class, fields_of, options_of
from air_hpc.config.spec import RunSpec
from air_hpc.plan.types import Plan

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
NAMES = st.from_regex(r"[a-z][a-z0-9_-]{0,6}", fullmatch=True)
NUMBERS = st.one_of(
    st.floats(0, 1, exclude_max=True),
    st.floats(allow_nan=False, allow_infinity=False, min_value=0),
)


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    return st.one_of([_of_option(option) for option in options_of(annotation)])


def _of_option(option: Any) -> st.SearchStrategy[Any]:
    origin = get_origin(option)
    if origin is Literal:
        return st.sampled_from(get_args(option))
    if origin is tuple:
        return st.lists(values_of(get_args(option)[0]), max_size=3).map(tuple)
    if origin is not None:
        names = NAMES if entry_class(option) is not None else TEXT
        return st.dictionaries(names, values_of(get_args(option)[1]), max_size=3)
    if is_dataclass(option):
        return instances_of(option)
    scalars = {
        int: st.integers(0, 100_000),
        float: NUMBERS,
        str: TEXT,
        bool: st.booleans(),
        type(None): st.none(),
    }
    return scalars[option]


def instances_of(cls: Any) -> st.SearchStrategy[Any]:
    members = {}
    defaults = {field.name: field for field in dataclasses.fields(cls)}
    for name, member in fields_of(cls).items():
        strategy = values_of(member.annotation)
        if member.check is not None:
            strategy = strategy.map(_within(member.check, default_of(defaults[name])))
        members[name] = strategy
    made = st.builds(cls, **members)
    return made.filter(lambda value: not value.problem()) if hasattr(cls, "problem") else made


def default_of(field: dataclasses.Field[Any]) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def _within(check: Callable[[Any], str | None], default: Any) -> Callable[[Any], Any]:
    """A value that the check allows as it is, the default for any other."""
    return lambda value: value if check(value) is None else default


RUN_SPECS: st.SearchStrategy[RunSpec] = st.deferred(lambda: instances_of(RunSpec))
PLANS: st.SearchStrategy[Plan] = st.deferred(lambda: instances_of(Plan))
