"""What was shipped of a run to one store: a small file in the run's metrics folder.

It is written after the store has taken what it says, and whole or not at all. When it is lost or
older than the truth, samples are sent again, which changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from air_hpc.rundir.atomic import write_atomic
from air_hpc.rundir.fence import Token
from air_hpc.rundir.layout import RunDir
from air_hpc.tracking.coverage import Coverage, StepRun

VERSION = 1


@dataclass(frozen=True)
class ControlPoint:
    """Metrics of the run as a whole at one step; kept until the store has taken exactly them."""

    step: int
    time: float
    metrics: Mapping[str, float]
    final: bool = False


@dataclass
class Position:
    """How far the shipping of one run to one store has come."""

    mlflow_run_id: str
    offsets: dict[Token, int] = field(default_factory=dict)
    """For each spool the byte up to which every sample is decided."""
    lasts: dict[Token, int] = field(default_factory=dict)
    """For each spool the highest step read."""
    coverage: Coverage = field(default_factory=Coverage)
    control_step: int = -1
    control_time: float = 0.0
    pending: ControlPoint | None = None
    largest_difference: float | None = None
    """Over all re-run steps, of the loss, from what was shipped before; None: none re-run yet."""
    last_loss: float | None = None
    described: bool = False
    artifacts_done: bool = False
    tags: dict[str, str] = field(default_factory=dict)
    """As last sent."""
    status: str | None = None
    final: bool = False
    """The run's end was shipped whole: nothing is left to do."""

    @property
    def progress(self) -> tuple[bool, int, int]:
        """Grows with everything that is shipped or noted to be."""
        noted = self.control_step if self.pending is None else self.pending.step
        return self.final, sum(self.offsets.values()), noted

    def to_json(self) -> bytes:
        """One JSON object."""
        body = {
            **{entry.name: getattr(self, entry.name) for entry in fields(self)},
            "version": VERSION,
            "offsets": {str(token): offset for token, offset in self.offsets.items()},
            "lasts": {str(token): step for token, step in self.lasts.items()},
            "coverage": [
                [str(run.token), run.first, run.last, run.stride] for run in self.coverage.runs
            ],
            "pending": None if self.pending is None else asdict(self.pending),
        }
        return json.dumps(body).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self | None:
        """What `to_json` wrote, or None for anything else (another version, a damaged file)."""
        try:
            body: dict[str, Any] = json.loads(data)
            if body.pop("version") != VERSION:
                return None
            body["offsets"] = {Token.parse(k): int(v) for k, v in body["offsets"].items()}
            body["lasts"] = {Token.parse(k): int(v) for k, v in body["lasts"].items()}
            body["coverage"] = Coverage(
                [StepRun(Token.parse(t), a, b, n) for t, a, b, n in body["coverage"]]
            )
            if body["pending"] is not None:
                body["pending"] = ControlPoint(**body["pending"])
            return cls(**body)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def position_path(run: RunDir, store: str) -> Path:
    """Where the position for a store is; `store` is its address and experiment, without secrets."""
    digest = hashlib.sha256(store.encode()).hexdigest()[:12]
    return run.metrics_dir / f"position-{digest}.json"


def load_position(path: Path) -> Position | None:
    """The position at `path`, or None where there is none that can be read."""
    try:
        return Position.from_json(path.read_bytes())
    except OSError:
        return None


def newer(stored: Position | None, held: Position | None) -> Position | None:
    """Of a position on disk and one in memory, the one that is further.

    The file is behind when it could not be written, and ahead when another shipper wrote it.
    """
    if stored is None or held is None:
        return stored or held
    if stored.mlflow_run_id != held.mlflow_run_id:
        return stored
    return stored if stored.progress > held.progress else held


def save_position(path: Path, position: Position) -> None:
    """Write a position durably; raises OSError (a full disk)."""
    write_atomic(path, position.to_json())
