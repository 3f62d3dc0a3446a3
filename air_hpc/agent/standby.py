"""What a node does for an attempt that goes on without it: it watches over the coordinator.

A node stands by when its agent was killed or stopped, or was given up by the coordinator. It trains
nothing and touches nothing. But it may be the last that is left: then somebody must end the attempt
and ask Slurm for the requeue, or the job runs on empty.

    every PING_S              a word to the coordinator, which answers (and says when all is over)
    silent for a lease        the ledger is read:
                                the attempt is over, and the job not given back after ENDED_S
                                    → ask for the requeue that was decided
                                nothing says that this node was given up
                                    → the coordinator died first: end as any survivor does
                                this node was given up, and only the way to the coordinator may be
                                broken → ask Slurm, every ASK_AGAIN_S, whether it has lost the
                                coordinator's node; if so, end as a survivor

Survivors come before stand-bys, and of each the lower nodes first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import zmq

from air_hpc.agent.channel import AgentSocket, Message, Signer, candidate_ports
from air_hpc.agent.environment import JobContext, coordinator_addresses, read_job_context
from air_hpc.agent.main import say
from air_hpc.agent.node import TURN_S, TURNS
from air_hpc.agent.scheduler import Scheduler, SlurmScheduler
from air_hpc.agent.survivor import Standing, end_as_survivor, give_back, standing
from air_hpc.config.spec import RunSpec
from air_hpc.plan.frozen import read_run_yaml
from air_hpc.rundir.layout import RunDir, open_run_dir

PING_S = 2.0
ENDED_S = 60.0
"""What a decided requeue may take until Slurm carries it out: the script waits for srun first."""
ASK_AGAIN_S = 60.0


class Line(Protocol):
    """The way to the coordinator."""

    def ask(self, timeout_s: float) -> Message | None:
        """Send a word; the answer, or None after `timeout_s`."""
        ...


class ChannelLine:
    """The agents' own channel."""

    def __init__(self, link: AgentSocket) -> None:
        self._link = link

    def ask(self, timeout_s: float) -> Message | None:
        """Send a ping and wait for whatever the coordinator says."""
        self._link.send({"type": "ping"})
        until = time.monotonic() + timeout_s
        poller = zmq.Poller()
        for socket in self._link.sockets:
            poller.register(socket, zmq.POLLIN)
        while (left_s := until - time.monotonic()) > 0:
            poller.poll(max(1, int(left_s * 1000)))
            for message in self._link.receive():
                return message
        return None


class StandBy:
    """The watch of one node. `turn` orders the nodes that would act at the same moment."""

    def __init__(
        self,
        context: JobContext,
        run: RunDir,
        spec: RunSpec,
        scheduler: Scheduler,
        *,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._run = run
        self._spec = spec
        self._scheduler = scheduler
        self._say = say
        self._clock = clock
        turn = min(context.node_index, TURNS) * TURN_S
        self._patience_s = 0.0 if context.is_coordinator else spec.recovery.lease_s + turn
        self._heard = clock()
        self._ended: float | None = None
        self._ask_at = clock()

    def heard(self, message: Message) -> bool:
        """The coordinator lives; whether it says that all is over."""
        self._heard = self._clock()
        return bool(message.get("over"))

    def silent(self) -> bool:
        """Nothing was heard; whether there is nothing left to watch over."""
        now = self._clock()
        if now - self._heard < self._patience_s:
            return False
        match standing(self._context, self._run):
            case Standing.GONE:
                return True
            case Standing.TO_BE_REQUEUED:
                if self._ended is None:
                    self._ended = now
                if now - self._ended < ENDED_S:
                    return False
                give_back(self._context, self._spec, self._scheduler, say=self._say)
                return True
            case Standing.MEMBER:
                self._end()
                return True
            case Standing.GIVEN_UP:
                if now >= self._ask_at:
                    self._ask_at = now + ASK_AGAIN_S
                    if self._scheduler.holds(self._context.nodes[0]) is False:
                        self._end()
                        return True
        return False

    def _end(self) -> None:
        end_as_survivor(
            self._context, self._run, self._spec, self._scheduler, say=self._say, stands_by=True
        )


def watch(stand_by: StandBy, line: Line) -> None:
    """Until there is nothing left to watch over, or Slurm has given this node up."""
    over, step = False, os.getppid()
    while not over and os.getppid() == step:
        message = line.ask(PING_S)
        if message is None:
            over = stand_by.silent()
        else:
            over = stand_by.heard(message)
            time.sleep(0 if over else PING_S)


def main(arguments: Sequence[str]) -> None:
    """`--stand-by WHY RUN_DIR`, in the place of the agent of this node."""
    why, run_dir = arguments
    run = open_run_dir(Path(run_dir))
    spec = read_run_yaml(run.run_yaml.read_text()).spec
    context = read_job_context(os.environ)
    say(f"the agent of this node {why}; standing by")
    stand_by = StandBy(context, run, spec, SlurmScheduler(context), say=say)
    if context.is_coordinator:
        while not stand_by.silent():
            time.sleep(PING_S)
        return
    ports = candidate_ports(run.run_id, context.start_id)
    endpoints = [f"tcp://{a}:{p}" for a in coordinator_addresses(context) for p in ports]
    signer = Signer.from_file(run.channel_key, context.start_id)
    with zmq.Context() as channel:
        link = AgentSocket(channel, signer, context.node, endpoints)
        try:
            watch(stand_by, ChannelLine(link))
        finally:
            link.close()
