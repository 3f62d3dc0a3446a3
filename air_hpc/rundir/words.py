"""The words of the ledger: failure classes, verdicts and run states."""

from __future__ import annotations

from enum import StrEnum


class FailureClass(StrEnum):
    """What ended a generation or an attempt."""

    COMPLETED = "completed"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    REQUEUED = "requeued"
    """Slurm restarts the job already, or nobody does: a `scontrol requeue` by hand, preemption
    without grace, a SIGTERM whose cause Slurm did not tell."""
    CANCELLED = "cancelled"
    NODE_LOST = "node_lost"
    NOT_ARRIVED = "not_arrived"
    """A node or a rank did not arrive before the deadline of the start."""
    USER_ERROR = "user_error"
    CHECKPOINT = "checkpoint"
    STORAGE = "storage"
    NETWORK = "network"
    HOST_MEMORY = "host_memory"
    DEVICE_MEMORY = "device_memory"
    DEVICE = "device"
    DATA = "data"
    DIVERGED = "diverged"
    """The loss went wrong: NaN, Inf or a spike, and the guard asked for a rollback or a stop."""
    HANG = "hang"
    ENVIRONMENT = "environment"
    """What the nodes are or lack: no Python, mixed devices, a loopback address between nodes."""
    FENCED = "fenced"
    """A newer generation owns the run; this one leaves without a word."""
    UNKNOWN = "unknown"


FREE = frozenset({FailureClass.PREEMPTED, FailureClass.TIME_LIMIT, FailureClass.REQUEUED})
"""Ends that cost no budget: nothing was wrong with the run or its nodes."""


class Verdict(StrEnum):
    """What was decided after an end."""

    CONTINUE = "continue"
    REQUEUE = "requeue"
    EXCLUDE_AND_REQUEUE = "exclude_and_requeue"
    STOP = "stop"


class RunState(StrEnum):
    """The state of a run, folded from its ledger."""

    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SAVING = "SAVING"
    REQUEUED = "REQUEUED"
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    HELD = "HELD"


TERMINAL = frozenset({RunState.FINISHED, RunState.FAILED, RunState.CANCELLED})
"""States that no start leaves: an attempt that finds one exits at once."""


def terminal_state(failure_class: FailureClass, verdict: Verdict) -> RunState:
    """The run state that an attempt's end leads to."""
    if verdict is not Verdict.STOP:
        return RunState.REQUEUED
    return {
        FailureClass.COMPLETED: RunState.FINISHED,
        FailureClass.CANCELLED: RunState.CANCELLED,
    }.get(failure_class, RunState.FAILED)
