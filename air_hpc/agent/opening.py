"""How an attempt begins: its claim, and what its first event says of the start."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from air_hpc.agent.environment import JobContext
from air_hpc.rundir.fence import Token, claim_next_attempt
from air_hpc.rundir.layout import RunDir
from air_hpc.runs.process import boot_id, start_time

STORAGE_PATIENCE_S = 60.0
"""How long a start, of the attempt or of a generation, waits for a file system that refuses."""
STORAGE_RETRY_S = 1.0


def claim_attempt(run: RunDir, say: Callable[[str], None]) -> Token:
    """Claim the next attempt. A file system that refuses is tried again for a while.

    A start that leaves no claim also leaves nothing that the next one could count it by, and so
    ends the run's job for good. Raises OSError when the patience is over.
    """
    until = time.monotonic() + STORAGE_PATIENCE_S
    refused = False
    while True:
        try:
            return claim_next_attempt(run)
        except OSError as error:
            if time.monotonic() > until:
                raise
            if not refused:
                say(f"the attempt could not be claimed ({error}); trying again")
            refused = True
            time.sleep(STORAGE_RETRY_S)


def attempt_facts(context: JobContext) -> dict[str, Any]:
    """What ATTEMPT_STARTED tells: the job, its nodes, and the process that speaks for them."""
    return {
        "job_id": context.job_id,
        "array_job_id": context.array_job_id,
        "array_task_id": context.array_task_id,
        "restart_count": context.restart_count,
        "nodes": list(context.nodes),
        "node_count": len(context.nodes),
        "scheduler": context.scheduler,
        "node": context.node,
        "pid": os.getpid(),
        "pid_start": start_time(os.getpid()),
        "boot_id": boot_id(),
    }
