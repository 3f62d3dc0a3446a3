"""What `plan` is asked beside a config: nodes to compare, tokens to train, a deadline, a budget."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from air_hpc.cli.options import Option, Parsed
from air_hpc.errors import Problem

ASKS = (
    Option(("--nodes",), "the scaling table of these numbers of nodes", "text", "N,N,..."),
    Option(("--target-tokens",), "tokens to train on: 15T, 300B, 1e12", "text", "N"),
    Option(("--deadline",), "how many nodes are done in: 30d, 12h, 2d12h", "text", "TIME"),
    Option(("--budget",), "how many nodes cost at most (accelerator.cost_per_device_hour)",
           "text", "AMOUNT"),
    Option(("--search",), "what would be fastest if nothing but the command line were given"),
    Option(("--trace",), "beside it what the real engine counts, built without devices"),
    Option(("--rank",), "with --trace: of this rank (default: 0)", "whole", "N"),
)  # fmt: skip

_SCALES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_NODES_MOST = 100_000


@dataclass(frozen=True)
class Asks:
    """Read and checked; None is not asked for."""

    nodes: tuple[int, ...] | None = None
    target_tokens: int | None = None
    deadline_s: float | None = None
    budget: float | None = None

    @property
    def how_many(self) -> bool:
        """Whether a number of nodes is asked for."""
        return self.deadline_s is not None or self.budget is not None

    @property
    def scaling(self) -> bool:
        """Whether a table of several numbers of nodes is."""
        return self.nodes is not None or self.how_many


def read_asks(parsed: Parsed) -> tuple[Asks, list[Problem]]:
    """The asks of a command line, and everything that is wrong with them."""
    problems: list[Problem] = []

    def read(key: str, of: str, allowed: str, value: float | None) -> float | None:
        if value is None or value <= 0 or math.isinf(value):
            problems.append(Problem(f"--{key.replace('_', '-')}", of, "not understood", allowed))
            return None
        return value

    nodes = None
    text = parsed.text("nodes")
    if text is not None:
        nodes, wrong = _nodes(text)
        problems += wrong
    text = parsed.text("target_tokens")
    tokens = None
    if text is not None:
        tokens = read("target_tokens", text, "such as 15T, 300B, 1e12", amount(text))
    text = parsed.text("deadline")
    deadline = None
    if text is not None:
        deadline = read("deadline", text, "such as 30d, 12h, 2d12h, 90min", seconds(text))
    text = parsed.text("budget")
    budget = None
    if text is not None:
        budget = read("budget", text, "an amount such as 250000, 1.5M", amount(text))
    if parsed.whole("rank") is not None and not parsed.flag("trace"):
        problems.append(Problem("--rank", str(parsed.whole("rank")), "only --trace has a rank"))
    alone = [f"--{name}" for name in ("search", "trace") if parsed.flag(name)]
    asked = Asks(nodes, None if tokens is None else round(tokens), deadline, budget)
    if alone and asked.scaling:
        message = "is about one plan, not several numbers of nodes"
        problems += [Problem(name, "", message) for name in alone]
    return asked, problems


def amount(text: str) -> float | None:
    """`15T`, `1.5M`, `1e12`, `1_000`; None for anything else."""
    match = re.fullmatch(
        r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([kKMBGT]?)\s*", text
    )
    if match is None:
        return None
    return float(match[1].replace("_", "")) * _SCALES[match[2].upper()]


def seconds(text: str) -> float | None:
    """`30d`, `12h`, `2d12h`, `90min`; None for anything else."""
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)\s*(min|[smhdw])", text)
    if not parts or re.sub(r"[0-9.]+\s*(?:min|[smhdw])", "", text).strip():
        return None
    if any(unit == "m" for _, unit in parts):
        return None  # minutes or months?
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def _nodes(text: str) -> tuple[tuple[int, ...] | None, list[Problem]]:
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if not word.isdecimal() or not 1 <= int(word) <= _NODES_MOST]
    allowed = f"numbers from 1 to {_NODES_MOST:,} with commas between: 1,2,4,8"
    if wrong:
        return None, [Problem("--nodes", word, "no number of nodes", allowed) for word in wrong]
    return tuple(dict.fromkeys(int(word) for word in words)), []
