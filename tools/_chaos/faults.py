"""How each kind of fault is done to a run on the test cluster, and how it is undone.

`inject` returns what it did, in words, or None where it cannot be done just now (no worker runs, no
checkpoint could be spared); the caller tries again a little later. What must be undone is left in
`Target.undo` with the moment that it is due.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TypeVar

from _chaos.mlflow import Proxy
from _chaos.plan import NEEDS_RESTART, Fault, Kind
from _chaos.processes import RunProcesses, run_processes
from air_hpc.agent.channel import candidate_ports
from air_hpc.probes.ports import spread, usable_ports
from air_hpc.rundir.commit import Checkpoint, find_candidates
from air_hpc.rundir.layout import RunDir
from air_hpc.slurm.hostlist import expand
from tests.acceptance.runs import events_of, job_of
from tests.slurm_cluster import DevCluster

TIME_LIMIT_MIN = 120
REVIVE_S = 80


@dataclass
class Target:
    """A run and the means to disturb it. `undo` has (due by the monotonic clock, what to do)."""

    cluster: DevCluster
    run: RunDir
    disk: Path
    """The mount point of the small file system that the run directory is on."""
    clocks: Path
    """One file a node: how far its clock is stepped."""
    proxy: Proxy | None
    undo: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    damaged: set[int] = field(default_factory=set)
    hit_idle: bool = False
    """Whether the last fault hit a node without workers: the others train on, as they should."""
    revivals: list[threading.Thread] = field(default_factory=list)

    def later(self, after_s: float, call: Callable[[], None]) -> None:
        """Undo something after a while, or at the run's end."""
        self.undo.append((time.monotonic() + after_s, call))

    def settle(self, *, everything: bool = False) -> None:
        """Undo what is due."""
        now = time.monotonic()
        due = [entry for entry in self.undo if everything or entry[0] <= now]
        for entry in due:
            self.undo.remove(entry)
            entry[1]()

    def revive(self, node: str) -> None:
        """Bring a node back as soon as Slurm has taken its job off it."""

        def work() -> None:
            for _ in range(5):
                try:
                    self.cluster.tool("revive-node", "--timeout", str(REVIVE_S), node)
                    return
                except AssertionError:
                    time.sleep(1)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self.revivals.append(thread)


def inject(fault: Fault, target: Target) -> str | None:
    """Do it; what was done, or None where it cannot be done now."""
    found = run_processes(target.run.path)
    target.hit_idle = False
    if fault.kind in NEEDS_RESTART and not found.worker_nodes():
        return None
    done = _INJECTORS[fault.kind](fault, target, found)
    if done is not None and fault.kind in NEEDS_RESTART:
        done += f"; then {_kill_worker(fault, target, found)}"
    return done


T = TypeVar("T")


def _pick(place: float, choices: list[T]) -> T | None:
    return choices[int(place * len(choices))] if choices else None


def _kill_worker(fault: Fault, target: Target, found: RunProcesses) -> str | None:
    return _signal_worker(fault, found, signal.SIGKILL, "killed")


def _stop_worker(fault: Fault, target: Target, found: RunProcesses) -> str | None:
    return _signal_worker(fault, found, signal.SIGSTOP, "stopped")


def _signal_worker(
    fault: Fault, found: RunProcesses, signum: signal.Signals, said: str
) -> str | None:
    node = _pick(fault.place, found.worker_nodes())
    if node is None:
        return None
    worker = _pick(fault.size, found.workers[node])
    assert worker is not None
    worker.send(signum)
    return f"{said} worker {found.workers[node].index(worker)} of {node}, pid {worker.pid}"


def _kill_agent(fault: Fault, target: Target, found: RunProcesses) -> str | None:
    return _signal_agent(fault, target, found, signal.SIGKILL, "killed")


def _stop_agent(fault: Fault, target: Target, found: RunProcesses) -> str | None:
    return _signal_agent(fault, target, found, signal.SIGSTOP, "stopped")


def _signal_agent(
    fault: Fault, target: Target, found: RunProcesses, signum: signal.Signals, said: str
) -> str | None:
    node = _pick(fault.place, sorted(found.agents))
    if node is None:
        return None
    target.hit_idle = not found.workers.get(node)
    found.agents[node].send(signum)
    return f"{said} the agent of {node}, pid {found.agents[node].pid}"


def _pause_agent(fault: Fault, target: Target, found: RunProcesses) -> str | None:
    done = _stop_agent(fault, target, found)
    if done is None:
        return None
    node = _pick(fault.place, sorted(found.agents))
    assert node is not None
    agent, pause_s = found.agents[node], 1 + 24 * fault.size
    target.later(pause_s, lambda: agent.send(signal.SIGCONT))
    return f"{done}, for {pause_s:.1f} s"


def _kill_node(fault: Fault, target: Target, found: RunProcesses) -> str | None:
    return _lose(fault, target, found, target.cluster.kill_node, "killed")


def _isolate_node(fault: Fault, target: Target, found: RunProcesses) -> str | None:
    return _lose(fault, target, found, target.cluster.isolate_node, "isolated")


def _lose(
    fault: Fault, target: Target, found: RunProcesses, how: Callable[..., None], said: str
) -> str | None:
    node = _pick(fault.place, sorted(found.agents))
    if node is None:
        return None
    target.hit_idle = not found.workers.get(node)
    how(node)
    target.revive(node)
    return f"{said} {node}"


def _job(target: Target) -> str:
    if events_of(target.run, "attempt_started"):
        return job_of(target.run)
    return str(events_of(target.run, "submitted")[-1].facts["job_id"])


def _running(target: Target) -> bool:
    return target.cluster.job(_job(target)).get("JobState") == "RUNNING"


def _preempt(fault: Fault, target: Target, found: RunProcesses) -> str | None:
    if not _running(target):
        return None
    # An isolated node may train on, but is no longer the job's: nobody is preempted there.
    held = expand(target.cluster.job(_job(target)).get("NodeList", ""))
    nodes = sorted(found.agents.keys() & set(held))
    if not nodes:
        return None
    node = _pick(fault.place, nodes)
    # One node is enough: the whole job goes.
    job = target.cluster.submit(
        f"sleep {1 + int(3 * fault.size)}", "-p", "high", "-N1", "-w", str(node), "--exclusive",
        user=None,
    )  # fmt: skip
    return f"job {job} of the high partition takes {node}"


def _time_limit(fault: Fault, target: Target, found: RunProcesses) -> str | None:
    if not found.agents or not _running(target):
        return None
    job = _job(target)
    shown = target.cluster.job(job)
    elapsed_s = time.time() - datetime.fromisoformat(shown["StartTime"]).timestamp()
    minutes = int((elapsed_s + 75) // 60) + 1
    target.cluster.run(["scontrol", "update", f"jobid={job}", f"timelimit={minutes}"])
    words = ["scontrol", "update", f"jobid={job}", f"timelimit={TIME_LIMIT_MIN}"]

    def restore() -> None:
        """A requeued job keeps the shortened limit, which leaves no time to train in."""
        now = target.cluster.job(job)
        if now["JobState"] == "RUNNING" and now["Restarts"] == shown["Restarts"]:
            target.later(1, restore)
        else:
            target.cluster.run(words, check=False)

    target.later(1, restore)
    return f"the time limit of job {job} is {minutes} min now, {elapsed_s:.0f} s after its start"


def _requeue(fault: Fault, target: Target, found: RunProcesses) -> str | None:
    if not found.agents or not _running(target):
        return None
    job = _job(target)
    done = target.cluster.run(["scontrol", "requeue", job], check=False)
    return None if done.returncode else f"scontrol requeue {job}"


def _shard(fault: Fault, target: Target, found: RunProcesses) -> str | None:
    usable = [c for c in find_candidates(target.run).usable if c.step not in target.damaged]
    if len(usable) < 2:  # without an older one the run must stop, and that is no fault of its own
        return None
    newest = usable[0]
    name = _pick(fault.size, sorted(newest.files))
    assert name is not None
    with contextlib.suppress(FileNotFoundError):  # retention was faster
        said = _damage(newest, name, fault.kind)
        target.damaged.add(newest.step)
        return f"{said} {newest.path.name}/{name}"
    return None


def _damage(checkpoint: Checkpoint, name: str, kind: Kind) -> str:
    path = checkpoint.path / name
    if kind is Kind.SHARD_MISSING:
        path.unlink()
        return "removed"
    size = path.stat().st_size
    if kind is Kind.SHARD_TRUNCATED:
        os.truncate(path, size // 2)
        return f"cut to {size // 2} bytes"
    with path.open("r+b") as file:
        file.seek(size // 2)
        byte = file.read(1)
        file.seek(size // 2)
        file.write(bytes([byte[0] ^ 0x40]))
    return f"flipped a bit of byte {size // 2} in"


def _disk_full(fault: Fault, target: Target, found: RunProcesses) -> str | None:
    filler, for_s = target.disk / "filler", 2 + 10 * fault.size
    with filler.open("ab") as file, contextlib.suppress(OSError):
        while True:
            os.write(file.fileno(), bytes(65536))
    target.later(for_s, lambda: filler.unlink(missing_ok=True))
    return f"the file system of the run is full for {for_s:.1f} s"


def _no_permission(fault: Fault, target: Target, found: RunProcesses) -> str | None:
    run = target.run
    folder = _pick(
        fault.place,
        [run.checkpoints_dir, run.tokens_dir, run.metrics_dir, run.attempts_dir, run.ledger_dir],
    )
    assert folder is not None
    for_s = 2 + 10 * fault.size
    # root passes modes; nobody makes or renames a name in an immutable folder (EPERM).
    _chattr("+i", folder)
    target.later(for_s, lambda: _chattr("-i", folder))
    return f"no name can be made in {folder.name} for {for_s:.1f} s"


def _chattr(word: str, folder: Path) -> None:
    subprocess.run(["chattr", word, str(folder)], check=True, capture_output=True)


def _mlflow(fault: Fault, target: Target, found: RunProcesses) -> str | None:
    if target.proxy is None:
        return None
    proxy, for_s = target.proxy, 3 + 20 * fault.size
    proxy.mode = {Kind.MLFLOW_DOWN: "down", Kind.MLFLOW_SLOW: "slow"}.get(fault.kind, "error")
    target.later(for_s, lambda: setattr(proxy, "mode", "ok"))
    return f"MLflow is {proxy.mode} for {for_s:.1f} s"


def _ports(fault: Fault, target: Target, found: RunProcesses) -> str | None:
    """Take what the next generation or the next start would use: the ports that the first node
    offers its workers, and the first candidates of the coordinator."""
    starts = events_of(target.run, "attempt_started")
    if not starts:
        return None
    facts = starts[-1].facts
    here = f"{facts['job_id']}.{facts['restart_count']}"
    after = f"{facts['job_id']}.{int(facts['restart_count'] or 0) + 1}"
    run_id = target.run.run_id
    wanted = candidate_ports(run_id, after)[: 1 + int(3 * fault.size)]
    for node in facts["nodes"]:
        wanted += islice(spread(f"{run_id}/{here}/{node}", usable_ports()), 3)
        wanted += islice(spread(f"{run_id}/{after}/{node}", usable_ports()), 1)
    taken = []
    for port in wanted:
        listener = socket.socket()
        try:
            listener.bind(("", port))
            listener.listen()
        except OSError:  # in use already, by the run itself
            listener.close()
            continue
        taken.append(listener)

    def free() -> None:
        for listener in taken:
            listener.close()

    target.later(25, free)
    return f"{len(taken)} ports taken"


def _clock(fault: Fault, target: Target, found: RunProcesses) -> str | None:
    nodes = sorted(found.agents)
    node = _pick(fault.place, nodes)
    if node is None:
        return None
    step_s = round((fault.size - 0.5) * 600, 1)
    aside = target.clocks / f".{node}"
    aside.write_text(str(step_s))
    aside.replace(target.clocks / node)
    return f"the clock of {node} is off by {step_s:+} s"


_INJECTORS: dict[Kind, Callable[[Fault, Target, RunProcesses], str | None]] = {
    Kind.KILL_WORKER: _kill_worker,
    Kind.KILL_AGENT: _kill_agent,
    Kind.KILL_NODE: _kill_node,
    Kind.ISOLATE_NODE: _isolate_node,
    Kind.STOP_WORKER: _stop_worker,
    Kind.STOP_AGENT: _stop_agent,
    Kind.PAUSE_AGENT: _pause_agent,
    Kind.PREEMPT: _preempt,
    Kind.TIME_LIMIT: _time_limit,
    Kind.REQUEUE: _requeue,
    Kind.SHARD_TRUNCATED: _shard,
    Kind.SHARD_CORRUPTED: _shard,
    Kind.SHARD_MISSING: _shard,
    Kind.DISK_FULL: _disk_full,
    Kind.NO_PERMISSION: _no_permission,
    Kind.MLFLOW_DOWN: _mlflow,
    Kind.MLFLOW_SLOW: _mlflow,
    Kind.MLFLOW_ERROR: _mlflow,
    Kind.PORT_TAKEN: _ports,
    Kind.CLOCK_STEP: _clock,
}
