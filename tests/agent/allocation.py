"""An allocation of two nodes on this machine: the environment that srun would give its tasks.

Only `scontrol` is not Slurm's own: a script that says what a test wrote into `job.txt` and notes
the requeues it was asked for.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from air_hpc.rundir.events import Event, Kind, read_ledger
from air_hpc.rundir.layout import RunDir
from tests.agent.groups import ROOT, wait_until

NODES = ("n1", "n2")
JOB = "7"
SCONTROL = """#!/bin/bash
case "$1" in
  --version) echo "slurm-wlm 22.05.8" ;;
  requeue) echo "$2" >> "{folder}/requeued" ;;
  *) cat "{folder}/job.txt" ;;
esac
"""


class Allocation:
    """One start of a job of two nodes; one agent a node."""

    def __init__(
        self,
        folder: Path,
        run: RunDir,
        restart_count: int = 0,
        nodes: tuple[str, ...] = NODES,
        *,
        stands_by: bool = False,
    ) -> None:
        self.stands_by = stands_by
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.run = run
        self.restart_count = restart_count
        scontrol = folder / "scontrol"
        scontrol.write_text(SCONTROL.format(folder=folder))
        scontrol.chmod(0o700)
        self.say("RUNNING")
        self._known = len(self.events())
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        for node in nodes:
            self.start(node)

    def say(self, state: str, **facts: str) -> None:
        """What `scontrol show job` answers from now on."""
        said = {"JobState": state, "Reason": "None", "Restarts": str(self.restart_count)}
        said |= {"TimeLimit": "UNLIMITED", "PreemptTime": "None", **facts}
        words = " ".join(f"{key}={value}" for key, value in said.items())
        (self.folder / "job.txt").write_text(f"JobId={JOB} JobName=run {words}\n")

    def start(self, node: str) -> None:
        """Start the agent of a node."""
        environ = {
            **os.environ,
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "SLURM_JOB_ID": JOB,
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_STEP_NODELIST": "n[1-2]",
            "SLURM_NODEID": str(NODES.index(node)),
            "SLURMD_NODENAME": node,
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        }
        if self.stands_by:
            environ["SLURM_STEP_NUM_NODES"] = str(len(NODES))
        if self.restart_count:
            environ["SLURM_RESTART_COUNT"] = str(self.restart_count)
        with (self.folder / f"{node}.log").open("ab") as log:
            self.agents[node] = subprocess.Popen(
                [sys.executable, "-m", "air_hpc.agent", str(self.run.path)],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    # -- what happens to it --

    def signal(self, node: str, number: int) -> None:
        """Slurm signals every process of a step; what nobody can catch is for the agent alone."""
        self.agent_of(node).send_signal(number)
        if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT):
            self.agents[node].send_signal(number)

    def agent_of(self, node: str) -> psutil.Process:
        """A node's agent, the child of the task."""
        found: list[psutil.Process] = []
        wait_until(lambda: found.extend(psutil.Process(self.agents[node].pid).children()) or found)
        return found[0]

    def workers_of(self, node: str) -> list[int]:
        """The pids below a node's agent: template and workers."""
        return [process.pid for process in self.agent_of(node).children(recursive=True)]

    # -- what came of it --

    def events(self) -> list[Event]:
        """The events of this start, and those before it on the first call."""
        found = list(read_ledger(self.run).events)
        return found[getattr(self, "_known", 0) :]

    def of(self, kind: Kind) -> list[Event]:
        return [event for event in self.events() if event.kind == kind]

    def wait_for(self, kind: Kind) -> Event:
        """The first event of a kind; fails at once when the attempt has ended without it."""

        def there() -> bool:
            if self.of(kind):
                return True
            assert self.agents["n1"].poll() is None, self.logs()
            return False

        wait_until(there)
        return self.of(kind)[0]

    def wait(self, *nodes: str) -> list[int]:
        """The exit codes of these nodes' agents (of all without any)."""
        chosen = [self.agents[node] for node in nodes or NODES]
        wait_until(lambda: all(agent.poll() is not None for agent in chosen))
        return [agent.wait() for agent in chosen]

    @property
    def intent(self) -> str | None:
        path = self.run.intent_file(JOB, self.restart_count)
        return path.read_text().strip() if path.exists() else None

    @property
    def requeues(self) -> list[str]:
        path = self.folder / "requeued"
        return path.read_text().split() if path.exists() else []

    def logs(self) -> str:
        return "\n".join((self.folder / f"{node}.log").read_text() for node in self.agents)

    def close(self) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.kill()  # its agent, stopped or not, dies with it
                agent.wait()
