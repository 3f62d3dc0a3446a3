"""What a node does when its coordinator has fallen silent: somebody must give Slurm the job back.

Under `--no-kill` a job whose batch host died stays RUNNING on the nodes that are left, and bills on
after all tasks have ended. So the lowest survivor ends the attempt in the ledger and asks for a
requeue; the others wait for their turn (`node`), and then find that Slurm has been asked.

A node that the coordinator gave up is no survivor: what runs goes on without it, and it must touch
nothing. It finds its own name in the ledger, which the coordinator writes well within a lease. It
stands by (`standby`), for the case that it is the last one after all.

Slurm's controller may be out of reach for a while, and nobody would ask again: so it is insisted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import TypeVar

from air_hpc.agent.environment import JobContext
from air_hpc.agent.scheduler import Scheduler
from air_hpc.config.spec import RunSpec
from air_hpc.rundir.events import Event, Kind, LedgerWriter, read_ledger
from air_hpc.rundir.fence import Fenced, Token, claim_next_attempt, newest_token
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.state import fold
from air_hpc.rundir.words import FailureClass, Verdict


class Standing(Enum):
    """How the attempt of this start stands, for one of its nodes, by the ledger."""

    MEMBER = auto()
    """Under way, and nothing says that this node was given up; or nobody has claimed it yet."""
    GIVEN_UP = auto()
    TO_BE_REQUEUED = auto()
    """It has ended, and Slurm is to start the job again."""
    GONE = auto()
    """It has ended otherwise, or the run is another start's now."""


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
    stands_by: bool = False,
    pauses_s: Sequence[float] = PAUSES_S,
) -> bool:
    """End the attempt for a coordinator that is gone, unless it or somebody else has done so.

    Returns whether there is nothing left that this node could do. A node that was given up acts
    only where it `stands_by`: it must know that the coordinator's node is lost.

    A coordinator that was lost before it claimed this start left no trace that the next one could
    count: then the start is claimed here, which also fences off one that was only stopped.
    """
    token = newest_token(run)
    unclaimed = token is None or not _is_of_this_start(_events_of(run, token), context)
    match standing(context, run):
        case Standing.GONE:
            return True
        case Standing.TO_BE_REQUEUED:
            return False
        case Standing.GIVEN_UP if not stands_by:
            say("this node was given up: nothing to ask for")
            return False
    word = _insist(scheduler.word, pauses_s)
    if word is None or not word.running or word.restarts != context.restart_count:
        return True
    continuation = spec.launch.continuation
    verdict = Verdict.STOP if continuation == "none" else Verdict.REQUEUE
    try:
        if unclaimed:
            _tell_unclaimed(context, run, spec, verdict)
        elif token is not None:
            _tell_lost(context, run, spec, verdict, token)
    except Fenced:
        return True
    except OSError as error:
        # The next start counts an attempt without a word; a job that nobody gives back runs on.
        say(f"the end of the attempt could not be recorded: {error}")
    _ask(spec, scheduler, "the coordinator is gone", pauses_s, say)
    return True


def give_back(
    context: JobContext,
    spec: RunSpec,
    scheduler: Scheduler,
    *,
    say: Callable[[str], None],
    pauses_s: Sequence[float] = PAUSES_S,
) -> None:
    """Ask for what the end of the attempt decided, where Slurm still runs this start of the job.

    The first node's script was to do it; its node may have been lost since, or cut off.
    """
    word = _insist(scheduler.word, pauses_s)
    if word is not None and word.running and word.restarts == context.restart_count:
        _ask(spec, scheduler, "the requeue that was decided did not come", pauses_s, say)


def standing(context: JobContext, run: RunDir) -> Standing:
    """How the attempt stands for this node, by the ledger as it is now."""
    token = newest_token(run)
    if fold(read_ledger(run).events).terminal:
        return Standing.GONE
    mine = _events_of(run, token)
    if not _is_of_this_start(mine, context):
        # An older attempt: this start has not claimed one, or a newer start has.
        later = any(_restarts(event) > context.restart_count for event in mine)
        return Standing.GONE if later else Standing.MEMBER
    given_up = False
    for event in mine:
        if event.kind == Kind.ATTEMPT_ENDED:
            again = event.facts.get("verdict") in (Verdict.REQUEUE, Verdict.EXCLUDE_AND_REQUEUE)
            return Standing.TO_BE_REQUEUED if again else Standing.GONE
        if event.kind == Kind.NODE_LOST and event.facts.get("node") == context.node:
            given_up = True
    return Standing.GIVEN_UP if given_up else Standing.MEMBER


def _ask(
    spec: RunSpec,
    scheduler: Scheduler,
    why: str,
    pauses_s: Sequence[float],
    say: Callable[[str], None],
) -> None:
    requeues = spec.launch.continuation in ("requeue", "resubmit")
    accepted = _insist(scheduler.requeue if requeues else scheduler.cancel, pauses_s)
    what = "a requeue" if requeues else "the job's end"
    say(f"{why}; asked for {what}: {'yes' if accepted else 'refused'}")


def _events_of(run: RunDir, token: Token | None) -> list[Event]:
    """The events of the attempt that `token` belongs to."""
    events = read_ledger(run).events
    return [e for e in events if e.token is not None and token and e.token.attempt == token.attempt]


def _tell_lost(
    context: JobContext, run: RunDir, spec: RunSpec, verdict: Verdict, token: Token
) -> None:
    first, lease_s = context.nodes[0], spec.recovery.lease_s
    evidence = f"no word from the coordinator on {first} for recovery.lease_s={lease_s:g}"
    with LedgerWriter(run, f"survivor-{token.attempt}-{context.node}") as ledger:
        ledger.append(Kind.NODE_LOST, token, node=first, why=evidence, silent_s=None)
        _tell_end(ledger, token, context, FailureClass.NODE_LOST, verdict, evidence)


def _tell_unclaimed(context: JobContext, run: RunDir, spec: RunSpec, verdict: Verdict) -> None:
    """Claim the start and end it. Raises Fenced where somebody else is faster."""
    first, timeout_s = context.nodes[0], spec.launch.start_timeout_s
    evidence = f"{first} did not start the attempt within launch.start_timeout_s={timeout_s:g}"
    token = claim_next_attempt(run)
    with LedgerWriter(run, f"survivor-{token.attempt}-{context.node}") as ledger:
        ledger.append(
            Kind.ATTEMPT_STARTED,
            token,
            job_id=context.job_id,
            array_job_id=context.array_job_id,
            array_task_id=context.array_task_id,
            restart_count=context.restart_count,
            nodes=list(context.nodes),
            node_count=len(context.nodes),
            scheduler=context.scheduler,
            node=context.node,
        )
        _tell_end(ledger, token, context, FailureClass.NOT_ARRIVED, verdict, evidence)


def _tell_end(
    ledger: LedgerWriter,
    token: Token,
    context: JobContext,
    failure_class: FailureClass,
    verdict: Verdict,
    evidence: str,
) -> None:
    ledger.append(
        Kind.ATTEMPT_ENDED,
        token,
        failure_class=failure_class,
        verdict=verdict,
        reason=f"told by {context.node}, the lowest survivor",
        evidence=evidence,
    )


def _is_of_this_start(events: list[Event], context: JobContext) -> bool:
    """Whether the attempt of these events is this start's, as far as they say."""
    for event in events:
        if event.kind == Kind.ATTEMPT_STARTED:
            start = event.facts.get("job_id"), event.facts.get("restart_count")
            return start == (context.job_id, context.restart_count)
    return True


def _restarts(event: Event) -> int:
    return int(event.facts.get("restart_count") or 0) if event.kind == Kind.ATTEMPT_STARTED else 0


def _insist(ask: Callable[[], T], pauses_s: Sequence[float]) -> T | None:
    """The first answer that is one."""
    for pause_s in pauses_s:
        time.sleep(pause_s)
        if answer := ask():
            return answer
    return None
