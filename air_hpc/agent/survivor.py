"""What a node does when its coordinator has fallen silent: somebody must give Slurm the job back.

Under `--no-kill` a job whose batch host died stays RUNNING on the nodes that are left, and bills on
after all tasks have ended. So the lowest survivor ends the attempt in the ledger and asks for a
requeue; the others wait for their turn (`node`), and then find that Slurm has been asked.

A node that the coordinator gave up is no survivor: what runs goes on without it, and it must touch
nothing. It finds its own name in the ledger, which the coordinator writes well within a lease.

Slurm's controller may be out of reach for a while, and nobody would ask again: so it is insisted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from air_hpc.agent.environment import JobContext
from air_hpc.agent.scheduler import Scheduler
from air_hpc.config.spec import RunSpec
from air_hpc.rundir.events import Event, Kind, LedgerWriter, read_ledger
from air_hpc.rundir.fence import newest_token
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.words import FailureClass, Verdict

PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Before each try of a question to Slurm."""
T = TypeVar("T")


def end_as_survivor(
    context: JobContext,
    run: RunDir,
    spec: RunSpec,
    scheduler: Scheduler,
    *,
    say: Callable[[str], None],
    pauses_s: Sequence[float] = PAUSES_S,
) -> None:
    """End the attempt for a coordinator that is gone, unless it or somebody else has done so."""
    token = newest_token(run)
    if token is None:
        return
    events = read_ledger(run).events
    mine = [e for e in events if e.token is not None and e.token.attempt == token.attempt]
    if not _is_under_way(mine, context):
        say("this node was given up, or the attempt has ended: nothing to ask for")
        return
    word = _insist(scheduler.word, pauses_s)
    if word is None or not word.running or word.restarts != context.restart_count:
        return
    requeues = spec.launch.continuation in ("requeue", "resubmit")
    verdict = Verdict.REQUEUE if requeues or spec.launch.continuation == "chain" else Verdict.STOP
    first, lease_s = context.nodes[0], spec.recovery.lease_s
    evidence = f"no word from the coordinator on {first} for recovery.lease_s={lease_s:g}"
    with LedgerWriter(run, f"survivor-{token.attempt}-{context.node}") as ledger:
        ledger.append(Kind.NODE_LOST, token, node=first, why=evidence, silent_s=None)
        ledger.append(
            Kind.ATTEMPT_ENDED,
            token,
            failure_class=FailureClass.NODE_LOST,
            verdict=verdict,
            reason=f"told by {context.node}, the lowest survivor",
            evidence=evidence,
        )
    accepted = _insist(scheduler.requeue if requeues else scheduler.cancel, pauses_s)
    what = "a requeue" if requeues else "the job's end"
    say(f"the coordinator is gone; asked for {what}: {'yes' if accepted else 'refused'}")


def _is_under_way(events: list[Event], context: JobContext) -> bool:
    """Whether nobody has ended the attempt, and this node still belongs to it."""
    for event in events:
        if event.kind == Kind.ATTEMPT_ENDED:
            return False
        if event.kind == Kind.NODE_LOST and event.facts.get("node") == context.node:
            return False
    return True


def _insist(ask: Callable[[], T], pauses_s: Sequence[float]) -> T | None:
    """The first answer that is one."""
    for pause_s in pauses_s:
        time.sleep(pause_s)
        if answer := ask():
            return answer
    return None
