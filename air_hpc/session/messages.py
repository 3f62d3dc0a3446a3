"""What a worker tells its agent besides the page: small JSON objects over a local socket pair.

A packet socket keeps the messages apart and in order. None is sent in the course of a step.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from air_hpc.rundir.events import Kind

MAX_BYTES = 64 * 1024
INSPECT = "inspect"
"""The one message from the agent to a worker, with `question`, which the answer repeats."""


class Message(StrEnum):
    """The kinds of message, with their facts."""

    PHASE = "phase"
    """phase, step."""
    RESUMED = "resumed"
    """step, checkpoint (rank 0)."""
    TRAINING_STARTED = "training_started"
    """step (rank 0): the first step of this generation begins."""
    SAVE_BEGUN = "save_begun"
    """step (rank 0)."""
    COMMITTED = "committed"
    """step, bytes, blocking_s, duration_s, started; interval_s where it is `auto` (rank 0)."""
    SAVE_FAILED = "save_failed"
    """step, reason, removed_step (to make room on a full disk), tried_again (rank 0)."""
    CHECKPOINT_BAD = "checkpoint_bad"
    """step, reason: not verified or not loadable (rank 0)."""
    MEASURED = "measured"
    """facts of the machine and the run (rank 0)."""
    PREFLIGHT = "preflight"
    """checks: what the worker's device and the links to the others showed (every rank)."""
    BATCH_SKIPPED = "batch_skipped"
    """step, reason, loss (rank 0)."""
    LOSS_ALARM = "loss_alarm"
    """step, reason, loss, action (rank 0)."""
    STOPPED = "stopped"
    """step: left at the agreed step with its state saved (`saved` says whether)."""
    FINISHED = "finished"
    """step: all steps are done and saved."""
    INSPECTED = "inspected"
    """question, groups, stacks: the answer of the worker's own thread to INSPECT (every rank)."""
    ERROR = "error"
    """traceback, failure_class (null: the agent finds it), and the facts of
    `session.failure.error_facts`: why the worker ends; `facts` of a loss that diverged: action,
    reason, bad_step, from_step, first_batch, last_batch."""


_SHORTEST = 64
"""Characters below which a fact is not cut any more."""


RECORDED: Mapping[str, Kind] = {
    Message.RESUMED: Kind.RESUMED,
    Message.TRAINING_STARTED: Kind.TRAINING_STARTED,
    Message.SAVE_BEGUN: Kind.CHECKPOINT_BEGUN,
    Message.COMMITTED: Kind.CHECKPOINT_COMMITTED,
    Message.SAVE_FAILED: Kind.CHECKPOINT_FAILED,
    Message.CHECKPOINT_BAD: Kind.CHECKPOINT_BAD,
    Message.MEASURED: Kind.MEASURED,
    Message.BATCH_SKIPPED: Kind.BATCH_SKIPPED,
    Message.LOSS_ALARM: Kind.LOSS_ALARM,
}
"""The messages that a node passes on to the coordinator, and the event each becomes."""


def encode(kind: str, facts: Mapping[str, Any]) -> bytes:
    """One packet of at most MAX_BYTES.

    Where the facts are too long, the longest keep only their end (of a traceback it names the
    error); where there are too many of them, the kind alone is sent, with `truncated`.
    """
    body = dict(facts)
    data = _packet(kind, body)
    keep = MAX_BYTES // 4
    while len(data) > MAX_BYTES and keep >= _SHORTEST:
        body = {key: _end_of(value, keep) for key, value in body.items()}
        data = _packet(kind, body)
        keep //= 2
    return data if len(data) <= MAX_BYTES else _packet(kind, {"truncated": True})


def _packet(kind: str, body: Mapping[str, Any]) -> bytes:
    return json.dumps({**body, "kind": str(kind)}, default=str).encode()


def _end_of(value: Any, keep: int) -> Any:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return value if len(text) <= keep else "… " + text[-keep:]


def decode(data: bytes) -> dict[str, Any] | None:
    """The message in a packet, or None for one that is none."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) and isinstance(body.get("kind"), str) else None


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """(the agent's end, the worker's end); neither is inherited unless passed on."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
