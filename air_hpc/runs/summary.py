"""What a run did: the summary that stands at its end, from its ledger, spool and run.yaml.

Rates are medians over the steps that count, without the first of each generation (it pays for
compilation, caches and first communication). A peak that is not known gives no MFU, and every MFU
names its convention. Steps that were rolled back count for nothing here.
"""

from __future__ import annotations

import shlex
import shutil
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from air_hpc.errors import BadInput
from air_hpc.plan.frozen import FrozenRun, read_run_yaml
from air_hpc.rundir.commit import committed_steps
from air_hpc.rundir.events import Kind, read_ledger
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.spool import LOSS, MFU, MFU_PALM, TOKENS_PER_S, Sample, effective_samples
from air_hpc.runs.status import RunView, view_run


@dataclass(frozen=True)
class Peak:
    """What MFU is measured against: dense FLOP/s of one device, and where the figure is from."""

    flops_per_device: float
    source: str
    device: str


@dataclass(frozen=True)
class Summary:
    """The figures of one run. None: not known."""

    view: RunView
    steps: int | None
    first_loss: float | None
    last_loss: float | None
    tokens_per_s: float | None
    mfu_causal: float | None
    mfu_palm: float | None
    peak: Peak | None
    checkpoints: tuple[int, ...]
    attempts: int
    tracking_uri: str | None
    mlflow_command: str | None

    def to_json(self) -> dict[str, Any]:
        """The status, and the figures beside it."""
        return {
            **self.view.to_json(),
            "steps": self.steps,
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
            "tokens_per_second": self.tokens_per_s,
            "mfu": {"causal": self.mfu_causal, "palm": self.mfu_palm},
            "peak": None if self.peak is None else asdict(self.peak),
            "checkpoints": list(self.checkpoints),
            "attempts": self.attempts,
            "tracking_uri": self.tracking_uri,
            "mlflow_command": self.mlflow_command,
        }


def summarize(run: RunDir, *, ask_slurm: bool = True) -> Summary:
    """The summary of a run, also of one that has not ended yet."""
    view = view_run(run, ask_slurm=ask_slurm)
    events = read_ledger(run).events
    frozen = _frozen(run)
    samples = list(effective_samples(run).values())
    steady = _steady(samples)
    uri = next(
        (e.facts.get("uri") for e in reversed(events) if e.kind == Kind.TRACKING_STARTED), None
    )
    if uri is None and frozen is not None:
        uri = frozen.plan.tracking_uri
    losses = [s.metrics[LOSS] for s in samples if LOSS in s.metrics]
    return Summary(
        view=view,
        steps=None if frozen is None else frozen.spec.train.steps,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        tokens_per_s=_median(steady, TOKENS_PER_S),
        mfu_causal=_median(steady, MFU),
        mfu_palm=_median(steady, MFU_PALM),
        peak=_peak(view, frozen),
        checkpoints=tuple(sorted(_kept(run))),
        attempts=sum(1 for event in events if event.kind == Kind.ATTEMPT_STARTED),
        tracking_uri=None if uri is None else str(uri),
        mlflow_command=None if uri is None else mlflow_command(str(uri)),
    )


def mlflow_command(uri: str) -> str:
    """What opens MLflow on a store: a command for a file, the address of a server."""
    if uri.startswith(("http://", "https://", "databricks")):
        return uri
    beside = Path(sys.executable).with_name("mlflow")
    program = "mlflow"
    if shutil.which("mlflow") is None and beside.is_file():
        program = shlex.quote(str(beside))
    return f"{program} ui --backend-store-uri {shlex.quote(uri)}"


def _frozen(run: RunDir) -> FrozenRun | None:
    try:
        return read_run_yaml(run.run_yaml.read_text("utf-8"), str(run.run_yaml))
    except (OSError, BadInput):
        return None


def _kept(run: RunDir) -> list[int]:
    try:
        return committed_steps(run)
    except OSError:
        return []


def _steady(samples: Iterable[Sample]) -> list[Sample]:
    """The samples without the first of each generation."""
    seen = set()
    kept = []
    for sample in samples:
        if sample.token in seen:
            kept.append(sample)
        seen.add(sample.token)
    return kept


def _median(samples: Iterable[Sample], name: str) -> float | None:
    values = [sample.metrics[name] for sample in samples if name in sample.metrics]
    return statistics.median(values) if values else None


def _peak(view: RunView, frozen: FrozenRun | None) -> Peak | None:
    measured = view.status.measured
    value = measured.get("peak_flops_per_device")
    device = measured.get("device_name")
    name = str(device) if device else (frozen.spec.accelerator.name if frozen else "device")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Peak(float(value), str(measured.get("peak_source") or "measured"), name)
    # A device that is not the one configured has none: the plan's figure is another device's.
    unknown = "peak_flops_per_device" in measured
    if not unknown and frozen is not None and frozen.plan.peak_flops_per_device is not None:
        spec = frozen.spec.accelerator
        return Peak(frozen.plan.peak_flops_per_device, spec.peak_source, name)
    return None
