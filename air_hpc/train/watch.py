"""What the loop does about its guard's alarms: told, and turned into a step left out or an error.

The guard decides (`train.guard`); this is where its decisions meet the session, the saver and the
order of the batches. All of it comes to the same on every rank.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from torch import Tensor

from air_hpc.checkpoint.saver import SaveOutcome, Saver
from air_hpc.data.batches import Batches
from air_hpc.session.messages import Message
from air_hpc.session.session import Session
from air_hpc.train.guard import Action, Alarm, Guard, LossDiverged


class LossWatch:
    """One rank's watch over loss, gradients and states. Methods raise LossDiverged."""

    def __init__(self, session: Session, guard: Guard, batches: Batches, saver: Saver) -> None:
        self._session = session
        self._guard = guard
        self._batches = batches
        self._saver = saver
        self._unseen: tuple[int, Tensor] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of the guard's state."""
        return self._guard.facts

    def look(self, step: int, norm: float | None, loss: float | None) -> bool:
        """Judge a step now; whether the optimizer is to step."""
        return self._heed(self._guard.look(step, norm, loss))

    def look_later(self, step: int, norm: Tensor) -> None:
        """Keep a norm that the device may not have computed yet, for `look_back`."""
        self._unseen = (step, norm)

    def look_back(self) -> None:
        """Judge the norm that was kept, if one was. Waits for the device to have computed it."""
        if self._unseen is not None:
            (step, norm), self._unseen = self._unseen, None
            self._heed(self._guard.look(step, float(norm), None))

    def hear_save(self, outcome: SaveOutcome | None) -> None:
        """Hear of a state that held a NaN or Inf although neither loss nor norm had shown it."""
        if outcome is not None and outcome.not_finite:
            self._heed(self._guard.harmed(outcome.step, str(outcome.reason)))

    def lost_state(self, outcome: SaveOutcome) -> LossDiverged:
        """The error of a run whose last state is of no use, whatever the guard's action is."""
        return self._diverged(Alarm(outcome.step, Action.STOP, str(outcome.reason), None))

    def _heed(self, alarm: Alarm | None) -> bool:
        if alarm is None:
            return True
        loss = alarm.loss if alarm.loss is not None and math.isfinite(alarm.loss) else None
        told = {"step": alarm.step, "reason": alarm.reason, "loss": loss}
        if self._session.is_first and alarm.tell:
            self._session.note(Message.LOSS_ALARM, **told, action=alarm.action.value)
            print(f"warning: step {alarm.step}: {alarm.reason}: {alarm.action}", file=sys.stderr)
        if alarm.action is Action.LOG:
            return True
        if alarm.action is Action.SKIP:
            if self._session.is_first:
                self._session.note(Message.BATCH_SKIPPED, **told)
            return False
        raise self._diverged(alarm)

    def _diverged(self, alarm: Alarm) -> LossDiverged:
        """The error to leave with. A save in flight is awaited: the batches to step over are those
        since the newest checkpoint, on every rank the same."""
        self._saver.wait()
        newest = self._saver.newest_step or 0
        facts = {
            "action": alarm.action.value,
            "reason": alarm.reason,
            "bad_step": alarm.step,
            "from_step": newest,
            "first_batch": self._batches.batch_at(newest),
            "last_batch": self._batches.batch_at(alarm.step - 1),
        }
        return LossDiverged(f"step {alarm.step}: {alarm.reason}: {alarm.action}", facts)
