"""When a run must begin its last save before the time limit of its job.

The scheduler is told a lead at submission (`plan.lead_s`), an estimate; its signal may come 60 s
earlier still. Once saves were measured the agent knows better: it goes by a timer of its own, and
takes the signal for a reason to ask what the limit is now, since a site or its user may move it.
One that comes long before the scheduler's could was sent by somebody who wants the run to stop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from air_hpc.agent.ending import Ask, Question
from air_hpc.config.spec import RunSpec
from air_hpc.plan.types import Plan
from air_hpc.recovery.reliability import last_save_lead_s

LIMIT_SIGNAL = "SIGUSR2"
_BASE_S = 60.0
"""To agree, to end the step, and for what Slurm may be late or early by."""
_EARLY_S = 60.0 + 30.0
"""How much ahead of its time the scheduler's signal may come: sbatch(1) says 60 s; and clocks."""


class LimitTimer:
    """The timer of one attempt. Times are the coordinator's monotonic clock, in seconds."""

    def __init__(self, spec: RunSpec, plan: Plan, ask: Ask) -> None:
        limit_min = spec.launch.time_limit_min
        self._first_s = plan.lead_s
        self._measures = spec.launch.lead_s == "auto"
        self._base_s = _BASE_S + spec.cluster.grace_s
        self._ceiling_s = math.inf if limit_min is None else 30.0 * limit_min
        self._ask = ask
        self._durations_s: list[float] = []
        self._ends_at: float | None = None
        self._rang = False
        self._question: Question | None = None

    @property
    def lead_s(self) -> float:
        """How long ahead of the limit the run is told to stop."""
        if not self._measures:
            return self._first_s
        return last_save_lead_s(
            self._durations_s,
            first_s=self._first_s,
            base_s=self._base_s,
            ceiling_s=self._ceiling_s,
        )

    def set(self, end: float | None, now: float, wall_now: float) -> None:
        """The job ends at `end` (wall clock; None: no limit is known)."""
        self._ends_at = None if end is None else now + (end - wall_now)

    def saved_in(self, duration_s: Any) -> None:
        """A save took so long, from the copy in training to its commit."""
        if isinstance(duration_s, int | float) and math.isfinite(duration_s):
            self._durations_s.append(float(duration_s))

    def asks_again(self, end_time: Callable[[], float | None], now: float) -> bool:
        """The scheduler's signal came: whether it is enough to ask what the limit is now."""
        if self._ends_at is None or not self._durations_s or not self._measures or self._rang:
            return False
        if now < self._ends_at - self._first_s - _EARLY_S:
            return False
        if self._question is None:
            self._question = self._ask(end_time)
        return True

    def rings(self, now: float, wall_now: float) -> str | None:
        """Who asks for the stop now, once: our own timer, or the signal that was right."""
        if self._rang:
            return None
        signalled = False
        if self._question is not None:
            answered, end = self._question.answer()
            if answered:
                self._question = None
                self.set(end, now, wall_now)
                signalled = True
        due = self._ends_at is not None and now >= self._ends_at - self.lead_s
        if due or (signalled and self._ends_at is None):
            self._rang = True
            return LIMIT_SIGNAL if signalled else "timer"
        return None
