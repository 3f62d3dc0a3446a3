"""What one check of a machine says: measured value, floor, and whether that is fit to train on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Check:
    """One check of one node, or of one rank.

    `ok` is None where nothing can be said (no device, not asked, a deadline that passed in a probe
    that only informs). `value` and `floor` are in `unit` ("" for a count or a text); a null floor
    is held against nobody. `said` is one line for people, `seconds` how long it took.
    """

    name: str
    ok: bool | None
    value: float | str | None = None
    floor: float | str | None = None
    unit: str = ""
    said: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """For a message or the ledger."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Read back `to_json`; keys that are not known are passed over. Raises KeyError."""
        known = {key: body[key] for key in cls.__dataclass_fields__ if key in body}
        return cls(**{"name": body["name"], "ok": body["ok"], **known})

    def __str__(self) -> str:
        word = {True: "ok", False: "FAILED", None: "not told"}[self.ok]
        return f"{self.name}: {word}{f' ({self.said})' if self.said else ''}"


def nothing_to_say(name: str, said: str) -> Check:
    """A check that could not be made, and why."""
    return Check(name, None, said=said)


def worst(checks: Iterable[Check]) -> list[Check]:
    """One check of each name, for a node whose ranks all made them: a failed one before all
    others, else the lowest rate or the longest time."""
    found: dict[str, Check] = {}
    for check in checks:
        known = found.get(check.name)
        if known is None or _badness(check) > _badness(known):
            found[check.name] = check
    return list(found.values())


def _badness(check: Check) -> tuple[int, float]:
    value = check.value if isinstance(check.value, int | float) else 0.0
    rank = {False: 2, None: 0, True: 1}[check.ok]
    return rank, -value if check.unit.endswith("/s") else value
