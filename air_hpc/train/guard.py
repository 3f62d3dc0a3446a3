"""Loss guards: what is done about a loss or a gradient that went wrong.

Promises: a pure decision from numbers that are the same on every rank (the gradient norm over all
shards, the loss reduced at log steps) and a state that is a function of those numbers. So all ranks
decide alike, and no step has a collective that it would not have without a guard.

How it works: each step's norm is looked at where there is one (clipping computes it each step;
without clipping it is there at log steps), the loss at log steps. NaN and Inf are `nonfinite`. A
loss is a `spike` where it lies more than `spike_mads` median absolute deviations above the median
of the last `window` logged losses. The deviation has a floor, so that a flat loss does not alarm;
and a quarter of the window must be there before anything is judged. The action is the config's:

    log       said and nothing else (at the 1st, 2nd, 4th, 8th ... time: it may be every step)
    skip      the optimizer does not step; the step counts and the schedule goes on
    rollback  back to the newest checkpoint, and over the batches since
    stop      the run ends

Skips and rollbacks are bounded over the whole run; past the bound the run stops. What is counted
travels: the losses and the skips in the manifest of each checkpoint, the rollbacks as the ranges of
batches that the coordinator hands to each generation.

What may go wrong: `skip` must know before the optimizer steps, which on a GPU waits for the device
once a step. The other actions look at a step's norm after the next one's work was queued, and at
the latest before a save. A harm that is not seen in loss or norm is seen by the saver, which never
commits a state with a NaN or Inf in it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from air_hpc.config.spec import GuardSpec
from air_hpc.errors import AirHpcError

MAD_FLOOR_RATIO = 0.005
"""The deviation that is assumed at least, over the median: with the default of 20 deviations a loss
must rise by a tenth to be a spike, however flat the window was."""
_LOSSES = "recent_losses"
_SKIPS = "skipped_steps"


class Action(StrEnum):
    """What a guard asks for."""

    LOG = "log"
    SKIP = "skip"
    ROLLBACK = "rollback"
    STOP = "stop"


class LossDiverged(AirHpcError):
    """The loss went wrong, and the guard asks for a rollback or a stop. Raised on every rank.

    `facts`: action (`rollback`, `stop`), reason, bad_step, from_step (the newest checkpoint, 0 for
    none), first_batch and last_batch (what was trained on since it, both counted from 0).
    """

    def __init__(self, message: str, facts: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.facts = dict(facts)


@dataclass(frozen=True)
class Alarm:
    """What a guard saw at `step`, and what it asks for. `tell` is False where it was said often."""

    step: int
    action: Action
    reason: str
    loss: float | None
    tell: bool = True


class Guard:
    """The guard of one run on one rank; its state is the same on all of them.

    `rollbacks` is how many the run has had; `facts` are those of the checkpoint that was resumed
    from, if any.
    """

    def __init__(
        self, spec: GuardSpec, rollbacks: int = 0, facts: Mapping[str, Any] | None = None
    ) -> None:
        kept = facts or {}
        self._spec = spec
        self._rollbacks = rollbacks
        self._losses: deque[float] = deque(kept.get(_LOSSES, ()), maxlen=spec.window)
        self._skips = int(kept.get(_SKIPS, 0))
        self._logged = 0

    @property
    def decides_early(self) -> bool:
        """Whether it must see a step's numbers before the optimizer steps."""
        return "skip" in (self._spec.nonfinite, self._spec.spike)

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of the state, for the next `Guard`."""
        return {_LOSSES: list(self._losses), _SKIPS: self._skips}

    def look(self, step: int, norm: float | None, loss: float | None) -> Alarm | None:
        """Judge a step by what is known of it, and remember its loss; None where nothing is wrong.

        Each number is given once.
        """
        wrong = _not_finite(norm, loss)
        wanted = self._spec.nonfinite
        if wrong is None and loss is not None:
            wrong = spike_in(loss, self._losses, self._spec)
            wanted = self._spec.spike
        if loss is not None and math.isfinite(loss):
            self._losses.append(loss)
        return None if wrong is None else self._alarm(step, Action(wanted), wrong, loss)

    def harmed(self, step: int, reason: str) -> Alarm:
        """The alarm for a state that the saver found to hold a NaN or Inf.

        Leaving a batch out does not mend weights: `skip` becomes a rollback.
        """
        wanted = self._spec.nonfinite
        action = Action.ROLLBACK if wanted == "skip" else Action(wanted)
        return self._alarm(step, action, reason, None)

    def _alarm(self, step: int, action: Action, reason: str, loss: float | None) -> Alarm:
        spec = self._spec
        if action is Action.SKIP:
            if self._skips >= spec.max_skips:
                reason += f"; {self._skips} batches were skipped (train.guard.max_skips)"
                return Alarm(step, Action.STOP, reason, loss)
            self._skips += 1
        if action is Action.ROLLBACK and self._rollbacks >= spec.max_rollbacks:
            reason += f"; {self._rollbacks} rollbacks were made (train.guard.max_rollbacks)"
            return Alarm(step, Action.STOP, reason, loss)
        tell = True
        if action is Action.LOG:
            self._logged += 1
            tell = self._logged & (self._logged - 1) == 0
            if self._logged > 1:
                reason += f" (alarm {self._logged})"
        return Alarm(step, action, reason, loss, tell)


def _not_finite(norm: float | None, loss: float | None) -> str | None:
    named = {"the loss": loss, "the gradient's norm": norm}
    wrong = [
        f"{name} is {v}" for name, v in named.items() if v is not None and not math.isfinite(v)
    ]
    return " and ".join(wrong) or None


def spike_in(loss: float, losses: Sequence[float], spec: GuardSpec) -> str | None:
    """Why `loss` is a spike after `losses`, or None; all of them finite, oldest first."""
    if len(losses) < max(2, spec.window // 4):
        return None
    median = statistics.median(losses)
    deviation = statistics.median(abs(value - median) for value in losses)
    scale = max(deviation, MAD_FLOOR_RATIO * abs(median))
    above = loss - median
    if scale <= 0 or above <= spec.spike_mads * scale:
        return None
    return (
        f"the loss is {loss:.4g}, {above / scale:.3g} deviations above the median {median:.4g} "
        f"of {len(losses)} (train.guard.spike_mads={spec.spike_mads:g})"
    )
