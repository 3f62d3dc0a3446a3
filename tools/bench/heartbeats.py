#!/usr/bin/env python3
"""False alarms of the detector of dead nodes, with every core of the machine loaded.

    python tools/bench/heartbeats.py [--hours H] [--nodes N] [--busy B]

N agents (each the real node agent on the real channel, with its port and one stand-in worker that
steps without end) beat to an observer that does what a coordinator's loop does with them, while B
processes for each core do nothing but compute. Nobody dies in this time, so every lost node is a
false alarm. At the end one agent is killed and one is stopped, to see that both are still told
apart. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import zmq

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from air_hpc.agent.channel import AgentSocket, CoordinatorSocket, Signer  # noqa: E402
from air_hpc.agent.environment import JobContext  # noqa: E402
from air_hpc.agent.liveness import Listener, Prober  # noqa: E402
from air_hpc.agent.node import NodeAgent  # noqa: E402
from air_hpc.agent.starters import make_starter  # noqa: E402
from air_hpc.agent.workers import GenerationStart, worker_environment  # noqa: E402
from air_hpc.config.spec import RecoverySpec  # noqa: E402
from air_hpc.probes.ports import free_ports  # noqa: E402
from air_hpc.recovery.detector import Answer, Detector, DetectorPolicy, Lost  # noqa: E402
from air_hpc.rundir.atomic import make_dir  # noqa: E402
from air_hpc.rundir.fence import Token  # noqa: E402
from air_hpc.rundir.layout import RunDir, create_run_dir  # noqa: E402
from air_hpc.session.session import Session  # noqa: E402

TICK_MS = 100
RECOVERY = RecoverySpec()
POLICY = DetectorPolicy.from_spec(RECOVERY)
START_ID = "bench.0"


def work() -> None:
    """A worker: begins and ends steps, and computes in between."""
    session, step = Session.attach(), 0
    while True:
        step += 1
        session.begin_step(step)
        sum(range(20_000))
        session.end_step(step)


def agent(index: int, folder: str, port: int) -> None:
    """One node's agent, by the loop of an attempt."""
    run, node = RunDir(Path(folder)), f"n{index}"
    listener = Listener(f"{folder}/{node}")
    signer = Signer.from_file(run.channel_key, START_ID)
    context: zmq.Context[Any] = zmq.Context()
    link = AgentSocket(context, signer, node, [f"tcp://127.0.0.1:{port}"])
    argv = [sys.executable, str(Path(__file__).resolve()), "--work"]
    environ = worker_environment(os.environ, run, folder)
    job = JobContext("slurm", node, index, (), "1", None, None, 0, None)
    hello = {"type": "hello", "index": index, "liveness_port": listener.port}
    one = NodeAgent(
        job, run, RECOVERY, link, hello, make_starter("exec", argv, environ), argv, environ,
        start_timeout_s=600, say=lambda text: print(text, file=sys.stderr),
        on_coordinator_lost=lambda: None,
    )  # fmt: skip
    while one.exit_code is None:
        poller = zmq.Poller()
        for end in [*link.sockets, *one.fds(), listener.fileno()]:
            poller.register(end, zmq.POLLIN)
        poller.poll(TICK_MS)
        listener.drain()
        one.pump()
        for message in link.receive():
            one.on_message(message)
        one.tick()


class Observer:
    """What a coordinator's loop does with beats and probes, and what it saw."""

    def __init__(self, hub: CoordinatorSocket, count: int) -> None:
        self.hub = hub
        self.count = count
        self.detector = Detector(POLICY)
        self.prober = Prober(POLICY.probe_timeout_s)
        self.ports: dict[str, int] = {}
        self.heard: dict[str, float] = {}
        self.lost: dict[str, tuple[float, Lost]] = {}
        self.answers = dict.fromkeys(Answer, 0)
        self.beats = self.probes = 0
        self.longest_silence_s = self.longest_turn_s = self.forgiven_s = 0.0
        self.last = time.monotonic()

    def turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self.hub.socket, zmq.POLLIN)
        poller.register(self.prober.fileno(), zmq.POLLIN)
        poller.poll(TICK_MS)
        now = time.monotonic()
        for node, message in self.hub.receive():
            self.on_message(node, message, now)
        for node, answer in self.prober.poll():
            self.answers[answer] += 1
            self.detector.probed(node, answer, now)
        gap, self.last = now - self.last, now
        self.longest_turn_s = max(self.longest_turn_s, gap)
        if gap > 1.0:
            self.forgiven_s += gap - 1.0
            self.detector.forgive(gap - 1.0, now)
        for action in self.detector.tick(now):
            if isinstance(action, Lost):
                self.lost[action.node] = now, action
                print(f"lost: {action}", file=sys.stderr)
            else:
                self.probes += 1
                self.prober.begin(action.node, "127.0.0.1", self.ports[action.node])

    def on_message(self, node: str, message: dict[str, Any], now: float) -> None:
        if node in self.heard:
            self.longest_silence_s = max(self.longest_silence_s, now - self.heard[node])
        self.heard[node] = now
        self.detector.heard(node, now)
        if message["type"] == "hello":
            self.ports[node] = int(message["liveness_port"])
            self.detector.watch(node, now)
            self.hub.send(node, {"type": "welcome"})
        elif message["type"] == "heartbeat":
            self.beats += 1
            self.hub.send(node, {"type": "ack", "sequence": message["sequence"]})
            if message["token"] is None and len(self.ports) == self.count:
                self.hub.send(node, {"type": "start", "start": self.start_of(node).to_json()})

    def start_of(self, node: str) -> GenerationStart:
        rank = int(node[1:])
        return GenerationStart(
            token=Token(1, 1), ranks=(rank,), world_size=self.count, node_rank=rank,
            master_address="127.0.0.1", master_port=1, resume_steps=(), stop_timeout_s=120,
            threads=1,
        )  # fmt: skip

    def seen(self) -> dict[str, Any]:
        return {
            "false_alarms": len(self.lost),
            "beats": self.beats,
            "probes": self.probes,
            "answers": {str(answer): count for answer, count in self.answers.items()},
            "longest_silence_s": round(self.longest_silence_s, 2),
            "longest_turn_of_the_observer_s": round(self.longest_turn_s, 2),
            "forgiven_s": round(self.forgiven_s, 2),
        }

    def until_lost(self, node: str, since: float, limit_s: float) -> float | None:
        """Seconds from `since` until the node is lost."""
        while node not in self.lost and time.monotonic() < since + limit_s:
            self.turn()
        return round(self.lost[node][0] - since, 2) if node in self.lost else None


def observe(options: argparse.Namespace, run: RunDir) -> dict[str, Any]:
    (port,) = free_ports(1, f"{run.path}/hub")
    signer = Signer.from_file(run.channel_key, START_ID)
    observer = Observer(CoordinatorSocket(zmq.Context(), signer, [port]), options.nodes)
    make_dir(run.generation_dir(1, 1).parent, exist_ok=True)
    make_dir(run.generation_dir(1, 1), exist_ok=True)
    me = [sys.executable, str(Path(__file__).resolve())]
    busy_count = options.busy * len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([*me, "--spin"]) for _ in range(busy_count)]
    agents = [
        subprocess.Popen([*me, "--agent", str(index), str(run.path), str(port)])
        for index in range(options.nodes)
    ]
    try:
        while observer.beats < 20 * options.nodes or len(observer.ports) < options.nodes:
            observer.turn()
        began = time.monotonic()
        while time.monotonic() < began + options.hours * 3600:
            observer.turn()
        took = time.monotonic() - began
        seen = observer.seen()
        killed, stopped = "n0", f"n{options.nodes - 1}"
        agents[0].kill()
        kill_s = observer.until_lost(killed, time.monotonic(), 30)
        agents[-1].send_signal(signal.SIGSTOP)
        stop_s = observer.until_lost(stopped, time.monotonic(), 2 * POLICY.patience_s)
    finally:
        for process in [*agents, *busy]:
            process.kill()
        for process in [*agents, *busy]:
            process.wait()
    return {
        "hours": round(took / 3600, 4),
        "nodes": options.nodes,
        "cores": len(os.sched_getaffinity(0)),
        "busy_processes": busy_count,
        "load_average": [round(load, 1) for load in os.getloadavg()],
        **seen,
        "killed_agent_found_s": kill_s,
        "stopped_agent_given_up_s": stop_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--busy", type=int, default=1, help="busy processes for each core")
    parser.add_argument("--agent", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--spin", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
    elif options.spin:
        while os.getppid() != 1:
            sum(range(1_000_000))
    elif options.agent:
        agent(int(options.agent[0]), options.agent[1], int(options.agent[2]))
    else:
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps(observe(options, create_run_dir(Path(name), "heartbeats"))))


if __name__ == "__main__":
    main()
