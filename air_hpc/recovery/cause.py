"""Who ended it? scancel, preemption and the time limit look alike as signals; Slurm's word differs.

The table (seen on real schedulers; `scontrol -o show job` after the save):

| what happened                  | JobState   | Restarts | PreemptTime | Reason    |
|--------------------------------|------------|----------|-------------|-----------|
| preempted, with grace          | RUNNING    | own      | set         |           |
| preempted, without grace       | COMPLETING | own + 1  |             |           |
| preempted, --no-requeue        | COMPLETING | own      | set         |           |
| time limit                     | COMPLETING | own      |             | TimeLimit |
| `scontrol requeue`, node lost  | COMPLETING | own + 1  |             |           |
| scancel                        | COMPLETING | own      |             |           |

A word that cannot be read never leads to a requeue of ours: one after a scancel would succeed and
bring back what its owner had ended. Nor does it end the run for good, since Slurm may be starting
it again by itself: it is left to Slurm.
"""

from __future__ import annotations

from dataclasses import dataclass

from air_hpc.rundir.words import FailureClass

_RUNNING = frozenset({"RUNNING", "SUSPENDED", "SIGNALING", "RESIZING", "STOPPED", "CONFIGURING"})
"""SIGNALING is shown in place of RUNNING while Slurm delivers a signal (seen on 22.05.8)."""
_GONE_FOR_TIME = frozenset({"TIMEOUT", "DEADLINE"})


@dataclass(frozen=True)
class SlurmWord:
    """What `scontrol show job` said, reduced to what tells the causes apart."""

    state: str
    restarts: int
    reason: str = ""
    preempted: bool = False
    version: tuple[int, int] = (0, 0)

    @property
    def running(self) -> bool:
        """Whether Slurm still holds the job to be running."""
        return self.state in _RUNNING


@dataclass(frozen=True)
class Cause:
    """The class of an end that a signal announced, with the line of evidence."""

    failure_class: FailureClass
    evidence: str


def cause_of_stop(signal_name: str, word: SlurmWord | None, own_restarts: int) -> Cause:
    """The cause behind a stop asked for by `signal_name` (SIGTERM, SIGUSR2, SIGINT or `timer`).

    `own_restarts` is SLURM_RESTART_COUNT of this start. `word` is None where Slurm could not be
    asked: then a SIGTERM leaves the next start to Slurm, and only our own clock or USR2 means the
    time limit.
    """
    announced = signal_name in ("SIGUSR2", "timer")
    if word is None:
        if announced:
            return Cause(FailureClass.TIME_LIMIT, f"{signal_name} ahead of the time limit")
        return Cause(
            FailureClass.REQUEUED, f"{signal_name}, and Slurm could not be asked who sent it"
        )
    said = f"{signal_name}; Slurm: {word.state}, Restarts={word.restarts}"
    if word.reason:
        said += f", Reason={word.reason}"
    if word.restarts > own_restarts:
        return Cause(FailureClass.REQUEUED, said)
    if word.preempted or word.state == "PREEMPTED":
        return Cause(FailureClass.PREEMPTED, said + (", PreemptTime set" if word.preempted else ""))
    if announced and word.running:
        return Cause(FailureClass.TIME_LIMIT, f"{signal_name} ahead of the time limit")
    if "TimeLimit" in word.reason or word.state in _GONE_FOR_TIME:
        return Cause(FailureClass.TIME_LIMIT, said)
    if word.state == "NODE_FAIL":
        return Cause(FailureClass.NODE_LOST, said)
    return Cause(FailureClass.CANCELLED, said)


REQUEUES_PREEMPTED_SINCE = (24, 11)
"""From this version Slurm itself requeues a preempted job that exits inside its grace.

Seen: on 22.05.8 exit 0 ends COMPLETED and exit 3 FAILED, neither requeued; on 24.11.5 and 26.05.5
both are requeued, and a further `scontrol requeue` gave a start too many.
"""


def requeued_already(word: SlurmWord | None, own_restarts: int) -> bool:
    """Whether Slurm has requeued the job since this start: whatever is asked for is too much."""
    return word is not None and word.restarts > own_restarts


def slurm_requeues_itself(
    failure_class: FailureClass, word: SlurmWord | None, own_restarts: int
) -> bool:
    """Whether Slurm starts the job again without being asked, or has been asked already.

    Between 22.05 and 24.11 nobody has looked; an own requeue too many costs one start that finds a
    terminal verdict and leaves at once, a missing one costs the run, so those are asked for.
    """
    if failure_class is FailureClass.REQUEUED:
        return True
    if requeued_already(word, own_restarts):
        return True
    if failure_class is FailureClass.PREEMPTED and word is not None and word.running:
        return word.version >= REQUEUES_PREEMPTED_SINCE
    return False
