"""What the probe measured of a device, for a plan that is made where the device may not be.

The files are written by workers into the runs folder (`probes.matmul.calibrated_matmul`). One that
cannot be read counts as none. A GPU is known by the name that its driver reports; a CPU's figure is
one machine's, so only this machine's is taken, for as many threads as a worker gets.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from air_hpc.config.spec import RunSpec
from air_hpc.hardware.accelerator import match_device
from air_hpc.rundir.layout import SHARED_DIR

FOLDER = "calibrations"


def measured_matmul(spec: RunSpec, threads: int = 1) -> float | None:
    """The best matmul rate measured of the spec's accelerator at its precision, in FLOP/s."""
    folder = Path(spec.runs_dir).expanduser() / SHARED_DIR / FOLDER
    device, precision = spec.accelerator, spec.train.precision
    best: float | None = None
    for path, body in _bodies(folder):
        if body.get("precision") != precision:
            continue
        if device.kind == "cpu":
            here = f"{platform.node()}-{body.get('threads')}-threads"
            if body.get("threads") != threads or here not in path.name:
                continue
        elif match_device(str(body.get("device")), [device]) is None:
            continue
        rate = body.get("flops_per_s")
        if isinstance(rate, int | float) and rate > 0:
            best = max(best or 0.0, float(rate))
    return best


def _bodies(folder: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("matmul-*.json")):
            with contextlib.suppress(OSError, ValueError):
                body = json.loads(path.read_bytes())
                if isinstance(body, Mapping):
                    yield path, body
