"""The loop of one attempt on one node: wait, read, tick, until told to leave.

What is to be done is read from the run directory at each start, so a requeued one never replays
something stale. On the first node the coordinator runs in the same loop, and hears its own node
agent over the same kind of channel as the others. A local run whose verdict is to requeue starts
its next attempt here, since there is no scheduler to do it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

import air_hpc
from air_hpc.agent.channel import (
    AgentSocket,
    CoordinatorSocket,
    Message,
    Signer,
    candidate_ports,
)
from air_hpc.agent.coordinator import Coordinator
from air_hpc.agent.ending import Outcome
from air_hpc.agent.environment import (
    JobContext,
    coordinator_addresses,
    own_address,
    read_job_context,
)
from air_hpc.agent.keeper import parent_of
from air_hpc.agent.liveness import Listener
from air_hpc.agent.main import SignalPipe, say
from air_hpc.agent.node import NodeAgent
from air_hpc.agent.preflight import Preflight
from air_hpc.agent.scheduler import LocalScheduler, Scheduler, SlurmScheduler
from air_hpc.agent.shipper import Shipper
from air_hpc.agent.starters import make_starter
from air_hpc.agent.survivor import end_as_survivor
from air_hpc.agent.workers import worker_command, worker_environment
from air_hpc.agent.xids import watch_xids
from air_hpc.errors import BadInput
from air_hpc.plan.frozen import FrozenRun, read_run_yaml
from air_hpc.probes.ports import free_ports
from air_hpc.rundir.atomic import is_shared
from air_hpc.rundir.layout import RunDir, open_run_dir
from air_hpc.runs.process import boot_id
from air_hpc.slurm.hostlist import fold

TICK_MS = 100
SHIPPER_DRAIN_S = 60.0
SHIPPER_DRAIN_UNDER_SIGNAL_S = 5.0
FAREWELL_S = 2.0
"""How long the coordinator stays after the end at most, until every node has heard of it."""
DISMISSAL_S = 60.0
"""The same where there was nothing to do: agents that start later than the coordinator's would wait
for it until `launch.start_timeout_s`."""
VERDICT_S = 45.0
"""How long a coordinator that fails waits for the scheduler's word, so that it leaves a verdict."""
PORTS_OFFERED = 6
"""For the meeting points of as many generations; then they are used again."""


def run_agent(arguments: Sequence[str], signals: SignalPipe) -> int:
    """Run attempts until one needs no local restart; returns the exit code."""
    if len(arguments) != 1:
        raise BadInput.single("run", " ".join(arguments), "the agent takes one run directory")
    run = open_run_dir(Path(arguments[0]))
    # For what is written by others' code, torch's shards among it.
    os.umask(0o007 if is_shared(run.path) else 0o077)
    frozen = read_run_yaml(run.run_yaml.read_text())
    context = read_job_context(os.environ)
    if context.is_coordinator:
        code = Path(air_hpc.__file__).parent
        nodes = "this machine" if context.scheduler == "local" else fold(context.nodes)
        say(f"run {run.run_id} on {nodes}, code from {code}")
    while True:
        attempt = Attempt(context, run, frozen, signals)
        exit_code = attempt.execute()
        outcome = attempt.outcome
        if outcome is None or outcome.restart_after_s is None:
            return exit_code
        # A signal in the pause is for the next attempt: it ends the run, and the ledger says so.
        signals.wait(outcome.restart_after_s)


class Attempt:
    """This node's share of one attempt. `outcome` is the coordinator's (None on other nodes)."""

    def __init__(
        self, context: JobContext, run: RunDir, frozen: FrozenRun, signals: SignalPipe
    ) -> None:
        self._context = context
        self._run = run
        self._frozen = frozen
        self._signals = signals
        self._signalled = False
        self._zmq: zmq.Context[Any] = zmq.Context()
        self._hub: CoordinatorSocket | None = None
        self._coordinator: Coordinator | None = None
        self._shipper: Shipper | None = None
        self._listener = Listener(f"{run.run_id}/{context.start_id}/{context.node}")
        self._environ = worker_environment(os.environ, run, frozen.spec.cluster.node_local_dir)
        self._step = parent_of(os.getppid())

    @property
    def outcome(self) -> Outcome | None:
        """How the attempt ended, where this node coordinates it."""
        return None if self._coordinator is None else self._coordinator.outcome

    def execute(self) -> int:
        """Take part until told to leave; returns this node's exit code."""
        link: AgentSocket | None = None
        node: NodeAgent | None = None
        try:
            link, towards = self._open_channel()
            self._start_shipper()
            node = self._node_agent(link, towards)
            exit_code = self._loop(link, node)
            self._say_farewell()
            self._drain_shipper()
            return self.outcome.exit_code if self.outcome else exit_code
        except Exception as error:
            if link is not None:
                link.send({"type": "agent_failed", "reason": f"{type(error).__name__}: {error}"})
            if node is not None:
                node.close()
                node = None
            self._end_as_failed(error)
            self._drain_shipper()
            raise
        finally:
            if node is not None:
                node.close()
            if link is not None:
                link.close()
            if self._coordinator is not None:
                self._coordinator.close()
            if self._hub is not None:
                self._hub.close()
            self._listener.close()
            self._zmq.term()

    # -- the parts ---------------------------------------------------------------------------------

    def _open_channel(self) -> tuple[AgentSocket, str]:
        """The socket to the coordinator and the address by which it is reached."""
        context = self._context
        signer = Signer.from_file(self._run.channel_key, context.start_id)
        ports = candidate_ports(self._run.run_id, context.start_id)
        addresses = coordinator_addresses(context)
        if context.is_coordinator:
            self._hub = CoordinatorSocket(self._zmq, signer, ports)
            self._coordinator = Coordinator(
                context, self._run, self._frozen, self._hub, self._scheduler(), say=say
            )
            endpoints = [CoordinatorSocket.INPROC]
        else:
            endpoints = [f"tcp://{address}:{port}" for address in addresses for port in ports]
        return AgentSocket(self._zmq, signer, context.node, endpoints), addresses[0]

    def _scheduler(self) -> Scheduler:
        if self._context.scheduler == "slurm":
            return SlurmScheduler(self._context)
        return LocalScheduler(self._frozen.spec.launch.time_limit_min)

    def _start_shipper(self) -> None:
        coordinator = self._coordinator
        if coordinator is not None and coordinator.token and self._frozen.plan.tracking_uri:
            self._shipper = Shipper.start(
                self._run, coordinator.token.attempt, sys.executable, self._environ
            )

    def _hello(self, towards: str) -> Message:
        spec, context = self._frozen.spec, self._context
        seed = f"{self._run.run_id}/{context.start_id}/{context.node}"
        return {
            "type": "hello",
            "index": context.node_index,
            "boot_id": boot_id() or context.node,
            "address": own_address(towards, spec.cluster.network_interface),
            "ports": free_ports(PORTS_OFFERED, seed),
            "facts": {"pid": os.getpid(), "liveness_port": self._listener.port},
        }

    def _node_agent(self, link: AgentSocket, towards: str) -> NodeAgent:
        spec = self._frozen.spec
        argv = worker_command(spec.engine.name, sys.executable)
        preflight = Preflight(
            spec,
            self._frozen.plan.devices_per_node,
            self._run,
            self._context.node,
            self._environ,
        )
        return NodeAgent(
            self._context,
            self._run,
            spec.recovery,
            link,
            self._hello(towards),
            make_starter(spec.launch.starter, argv, self._environ),
            argv,
            self._environ,
            start_timeout_s=spec.launch.start_timeout_s,
            say=say,
            on_coordinator_lost=self._requeue_as_survivor,
            preflight=preflight,
            xids=watch_xids(spec.accelerator.kind, self._environ),
            disowned=self._is_disowned,
        )

    def _is_disowned(self) -> bool:
        """Whether the slurmstepd that started this agent's keeper is gone.

        Slurm then gives this node up, reaches nothing on it with a signal any more, and may hand
        its devices to another job while these workers still train on them.
        """
        return self._context.scheduler == "slurm" and parent_of(os.getppid()) != self._step

    def _requeue_as_survivor(self) -> bool:
        """The first node is gone and cannot carry out an intent: this one asks for it.

        Returns whether there is nothing left that this node could do.
        """
        if self._context.scheduler != "slurm":
            return True
        spec, scheduler = self._frozen.spec, self._scheduler()
        return end_as_survivor(self._context, self._run, spec, scheduler, say=say)

    # -- the loop ----------------------------------------------------------------------------------

    def _loop(self, link: AgentSocket, node: NodeAgent) -> int:
        """Until this node may leave; on the first node not before the verdict is there."""
        while node.exit_code is None or self._undecided:
            self._wait(link, node)
            for name in self._signals.read():
                self._signalled = True
                node.on_signal(name)
            node.pump()
            self._listener.drain()
            self._exchange(link, node)
            node.tick()
            if self._coordinator is not None:
                self._coordinator.tick()
        return node.exit_code

    @property
    def _undecided(self) -> bool:
        return self._coordinator is not None and self._coordinator.outcome is None

    def _wait(self, link: AgentSocket, node: NodeAgent) -> None:
        poller = zmq.Poller()
        poller.register(self._signals.fd, zmq.POLLIN)
        for socket in link.sockets:
            poller.register(socket, zmq.POLLIN)
        if self._hub is not None:
            poller.register(self._hub.socket, zmq.POLLIN)
        if self._coordinator is not None:
            poller.register(self._coordinator.fileno(), zmq.POLLIN)
        for fd in node.fds():
            poller.register(fd, zmq.POLLIN)
        poller.poll(TICK_MS)

    def _exchange(self, link: AgentSocket, node: NodeAgent) -> None:
        if self._hub is not None and self._coordinator is not None:
            for sender, message in self._hub.receive():
                self._coordinator.on_message(sender, message)
        for message in link.receive():
            node.on_message(message)

    # -- the end -----------------------------------------------------------------------------------

    def _end_as_failed(self, error: Exception) -> None:
        """The coordinator's own process fails: what it knows still leads to a verdict."""
        if self._coordinator is None or not self._undecided:
            return
        try:
            self._coordinator.fail(error)
            deadline = time.monotonic() + VERDICT_S
            while self._undecided and time.monotonic() < deadline:
                time.sleep(TICK_MS / 1000)
                self._coordinator.tick()
        except Exception as further:
            say(f"no verdict could be reached: {type(further).__name__}: {further}")
            return
        self._say_farewell()

    def _say_farewell(self) -> None:
        """Answer what still arrives, so that a node whose message was lost hears it may leave."""
        if self._hub is None or self._coordinator is None or len(self._context.nodes) == 1:
            return
        coordinator = self._coordinator
        deadline = time.monotonic() + (DISMISSAL_S if coordinator.dismissed else FAREWELL_S)
        while time.monotonic() < deadline and not coordinator.everyone_left:
            if coordinator.dismissed and self._signals.read():
                return
            for sender, message in self._hub.receive():
                coordinator.on_message(sender, message)
            time.sleep(TICK_MS / 1000)

    def _drain_shipper(self) -> None:
        if self._shipper is None:
            return
        limit_s = SHIPPER_DRAIN_UNDER_SIGNAL_S if self._signalled else SHIPPER_DRAIN_S
        if not self._shipper.drain(limit_s):
            say("MLflow did not take all metrics in time; `python -m air_hpc sync` ships the rest")
