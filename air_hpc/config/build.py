"""Turns a plain mapping into a frozen dataclass, and names everything that is wrong with it.

`build` walks the dataclass's types and checks every value against them. Types are strict (a bool
is no int, a number is no text, nan and infinity are no numbers), with one widening: an int is right
where a float is asked for. A wrong or unknown key never ends the walk: each is a `Problem` with its
dotted key, and the field takes its default, so that later checks still have something to look at.

A mapping of free names to a class (`recovery.rules`) is walked entry by entry; an entry that has a
problem is left out. A class may have `problem()`, which says what is wrong across its own fields
and what is allowed: it is asked once each of them fits.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from air_hpc.errors import Problem, nearest

T = TypeVar("T")


@dataclass(frozen=True)
class Built(Generic[T]):
    """What `build` made of a mapping.

    `value` holds defaults where a key was wrong, and is None only where a field without a default
    is missing or wrong. `unknown` holds the keys that the class does not have, nested as given.
    """

    value: T | None
    problems: list[Problem] = field(default_factory=list)
    unknown: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Walk:
    """What one walk collects; `keep_unknown` turns an unknown key from a problem into a find."""

    root: type[Any]
    keep_unknown: bool
    problems: list[Problem] = field(default_factory=list)

    def report(self, key: str, value: Any, message: str, allowed: str, hint: str = "") -> None:
        self.problems.append(Problem(key, show(value), message, allowed, hint))


class _Wrong(Exception):
    """A value that does not fit its type; `hint` says what to write instead."""

    def __init__(self, hint: str = "") -> None:
        self.hint = hint
        super().__init__(hint)


def build(cls: type[T], values: Mapping[str, Any], *, keep_unknown: bool = False) -> Built[T]:
    """`cls` made from `values`, with every problem of the whole mapping.

    With `keep_unknown` a key that the class does not have is returned in `unknown` instead of
    being a problem: that is how a reader keeps what a later version wrote.
    """
    walk = _Walk(cls, keep_unknown)
    value, unknown = _build_class(cls, values, "", walk)
    return Built(value, walk.problems, unknown)


def show(value: Any) -> str:
    """A config value as a person writes it, in one line: null, true and false in YAML's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        return repr(text)
    return text


def _build_class(
    cls: type[Any], values: Mapping[str, Any], prefix: str, walk: _Walk
) -> tuple[Any, dict[str, Any]]:
    known = fields_of(cls)
    arguments: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in known:
            if walk.keep_unknown:
                unknown[str(name)] = value
            else:
                walk.report(key, value, "unknown key", "", nearest_key(key, walk.root))
            continue
        member = known[name]
        nested = member.nested
        if nested is not None and isinstance(value, Mapping):
            built, below = _build_class(nested, value, f"{key}.", walk)
            if below:
                unknown[name] = below
            if built is not None:
                arguments[name] = built
            continue
        if member.entries is not None and isinstance(value, Mapping):
            entries, below = _build_entries(member, member.entries, value, key, walk)
            if below:
                unknown[name] = below
            _convert_into(arguments, name, entries, key, member, walk)
            continue
        _convert_into(arguments, name, value, key, member, walk)
    missing = [n for n, m in known.items() if m.required and n not in arguments]
    for name in missing:
        if name not in values:
            allowed = known[name].allowed
            walk.report(f"{prefix}{name}", None, "a value is needed", allowed)
    return (None if missing else cls(**arguments)), unknown


def _build_entries(
    member: Member, cls: type[Any], values: Mapping[Any, Any], key: str, walk: _Walk
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries of a map of free names that are right, and what is unknown in them.

    The last table without a problem is kept: a sweep builds the same one for each of its tasks.
    """
    content = repr(values)
    if _last_entries.get(cls, ("", {}))[0] == content:
        return dict(_last_entries[cls][1]), {}
    problems_before = len(walk.problems)
    entries: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    for name, value in values.items():
        below = f"{key}.{name}"
        if not isinstance(name, str):
            walk.report(below, name, "wrong type or value", "a name", "Quote it to make it text")
        elif isinstance(value, Mapping):
            before = len(walk.problems)
            built, more = _build_class(cls, value, f"{below}.", walk)
            if more:
                unknown[name] = more
            if built is None or len(walk.problems) > before:
                continue
            wrong = built.problem() if hasattr(built, "problem") else None
            if wrong is None:
                entries[name] = built
            else:
                walk.report(below, dict(value), *wrong)
        elif value is None and member.null_entries:
            entries[name] = None
        else:
            walk.report(below, value, "wrong type or value", member.allowed)
    if len(walk.problems) == problems_before and not unknown:
        _last_entries[cls] = content, dict(entries)
    return entries, unknown


_last_entries: dict[type[Any], tuple[str, dict[str, Any]]] = {}


def _convert_into(
    arguments: dict[str, Any], name: str, value: Any, key: str, member: Member, walk: _Walk
) -> None:
    try:
        converted = member.convert(value)
    except _Wrong as wrong:
        walk.report(key, value, "wrong type or value", member.allowed, wrong.hint)
        return
    allowed = member.check(converted) if member.check else None
    if allowed is not None:
        walk.report(key, value, "out of range", allowed)
        return
    arguments[name] = converted


@dataclass(frozen=True)
class Member:
    """One field of a config class: its type in words, how a value becomes it, what bounds it."""

    annotation: Any
    allowed: str
    convert: Callable[[Any], Any]
    check: Callable[[Any], str | None] | None
    nested: type[Any] | None
    required: bool
    entries: type[Any] | None = None
    """The class that a map of free names leads to, and whether an entry may be null."""
    null_entries: bool = False


_FIELDS: dict[type[Any], Mapping[str, Member]] = {}


def fields_of(cls: type[Any]) -> Mapping[str, Member]:
    """The fields of a config class by name, in their order; worked out once for each class."""
    if cls not in _FIELDS:
        hints = get_type_hints(cls)
        _FIELDS[cls] = {f.name: _member(f, hints[f.name]) for f in fields(cls)}
    return _FIELDS[cls]


def _member(found: Field[Any], annotation: Any) -> Member:
    classes = (a for a in options_of(annotation) if isinstance(a, type))
    nested = next((a for a in classes if is_dataclass(a)), None)
    return Member(
        annotation=annotation,
        allowed=in_words(annotation),
        convert=_converter(annotation),
        check=found.metadata.get("check"),
        nested=nested,
        required=found.default is MISSING and found.default_factory is MISSING,
        entries=entry_class(annotation),
        null_entries=entry_class(annotation) is not None
        and type(None) in options_of(get_args(options_of(annotation)[0])[1]),
    )


def entry_class(annotation: Any) -> type[Any] | None:
    """The config class that a map of free names leads to, or None for any other type."""
    first = options_of(annotation)[0]
    if get_origin(first) is not Mapping:
        return None
    return next((o for o in options_of(get_args(first)[1]) if is_dataclass(o)), None)  # type: ignore[return-value]


def options_of(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def literals_of(annotation: Any) -> tuple[Any, ...]:
    """The values that a type's `Literal` parts allow, in order."""
    parts = (get_args(a) for a in options_of(annotation) if get_origin(a) is Literal)
    return tuple(value for part in parts for value in part)


_WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
}


def in_words(annotation: Any) -> str:
    """A type as a person would say it."""
    words: list[str] = []
    for option in options_of(annotation):
        origin = get_origin(option)
        if origin is Literal:
            words += [show(value) for value in get_args(option)]
        elif origin is tuple:
            words.append(f"a list of {in_words(get_args(option)[0])}")
        elif origin is not None:
            words.append(f"a mapping to {in_words(get_args(option)[1])}")
        elif is_dataclass(option):
            words.append("a mapping with " + ", ".join(f.name for f in fields(option)))
        else:
            words.append(_WORDS[option])
    return ", ".join(words)


def _converter(annotation: Any) -> Callable[[Any], Any]:
    converters = tuple(_one_converter(option) for option in options_of(annotation))
    if len(converters) == 1:
        return converters[0]

    def convert(value: Any) -> Any:
        hint = ""
        for converter in converters:
            try:
                return converter(value)
            except _Wrong as wrong:
                hint = hint or wrong.hint
        raise _Wrong(hint)

    return convert


def _one_converter(option: Any) -> Callable[[Any], Any]:
    origin = get_origin(option)
    if origin is Literal:
        return _literal_converter(get_args(option))
    if origin is tuple:
        return _tuple_converter(_converter(get_args(option)[0]))
    if origin is not None and entry_class(option) is not None:
        return _built_entries
    if origin is not None:
        return _mapping_converter(_converter(get_args(option)[1]))
    if is_dataclass(option):
        return _refuse
    return _SCALARS[option]


def _refuse(value: Any) -> Any:
    raise _Wrong


def _built_entries(value: Any) -> Any:
    """Entries of a map of classes, which `_build_entries` has made already."""
    if isinstance(value, Mapping):
        return value
    raise _Wrong("Write {name: {key: value}}")


def _literal_converter(values: tuple[Any, ...]) -> Callable[[Any], Any]:
    texts = [value for value in values if isinstance(value, str)]

    def convert(value: Any) -> Any:
        if any(type(value) is type(allowed) and value == allowed for allowed in values):
            return value
        raise _Wrong(nearest(value, texts) if isinstance(value, str) else "")

    return convert


def _tuple_converter(item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(item(entry) for entry in value)
        scalar = isinstance(value, str | int | float) and not isinstance(value, bool)
        raise _Wrong(f"Write [{value}]" if scalar else "")

    return convert


def _mapping_converter(item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _Wrong("Write {name: value}")
        return {_text(key): item(entry) for key, entry in value.items()}

    return convert


_LARGEST = 2**63 - 1


def _whole(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > _LARGEST:
            raise _Wrong("It does not fit in 64 bits")
        return value
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        raise _Wrong(f"Write {int(value)}")
    raise _Wrong


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Wrong
    try:
        number = float(value)
    except OverflowError:
        raise _Wrong from None
    if not math.isfinite(number):
        raise _Wrong("It must be finite")
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Wrong("Quote it to make it text" if isinstance(value, int | float) else "")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _Wrong("It is not valid Unicode") from None
    return value


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise _Wrong


def _null(value: Any) -> None:
    if value is not None:
        raise _Wrong


_SCALARS: Mapping[Any, Callable[[Any], Any]] = {
    int: _whole,
    float: _number,
    str: _text,
    bool: _boolean,
    type(None): _null,
}


def leaf_keys(cls: type[Any], prefix: str = "") -> tuple[str, ...]:
    """Every dotted key of a config class that holds a value, in the order of its fields."""
    keys: list[str] = []
    for name, member in fields_of(cls).items():
        if member.nested is None:
            keys.append(f"{prefix}{name}")
        else:
            keys += leaf_keys(member.nested, f"{prefix}{name}.")
    return tuple(keys)


def entry_maps(cls: type[Any], prefix: str = "") -> dict[str, type[Any]]:
    """The dotted keys of a config class that map free names to a class, each with that class."""
    found: dict[str, type[Any]] = {}
    for name, member in fields_of(cls).items():
        if member.nested is not None:
            found |= entry_maps(member.nested, f"{prefix}{name}.")
        elif member.entries is not None:
            found[f"{prefix}{name}"] = member.entries
    return found


def nearest_key(key: str, root: type[Any], others: Sequence[str] = ()) -> str:
    """A hint that names the key of `root` (or of `others`) nearest to an unknown one, if any is.

    A name that is right but stands in the wrong section is found by its last part.
    """
    for prefix, cls in entry_maps(root).items():
        name, dot, _ = key.removeprefix(f"{prefix}.").partition(".")
        if key.startswith(f"{prefix}.") and dot:
            return nearest(key, [f"{prefix}.{name}.{below}" for below in fields_of(cls)])
    keys = leaf_keys(root)
    last = key.rpartition(".")[2]
    elsewhere = [known for known in keys if known.rpartition(".")[2] == last]
    if elsewhere:
        return f"Did you mean {' or '.join(elsewhere)}?"
    return nearest(key, [*fields_of(root), *keys, *others])
