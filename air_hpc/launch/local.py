"""Starts runs without sbatch: on this machine, or at once inside the allocation one is in.

`cluster=local`: submitit's local controller runs the agent, detached, so that a run survives the
shell that started it. No function is pickled: the controller is given our command. The runs of a
sweep go one after another, for they would share the machine's devices.

`cluster=allocation`: the same batch script that sbatch would run is run by bash here and now.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from submitit.local.local import LocalExecutor, LocalJob

from air_hpc.errors import BadInput, EnvironmentFailure, Problem
from air_hpc.launch import quote, script
from air_hpc.launch.prepare import run_dir
from air_hpc.launch.result import Result, result_of
from air_hpc.launch.submission import AskState, Submission, save
from air_hpc.plan.frozen import FrozenRun, read_run_yaml
from air_hpc.rundir.atomic import write_atomic
from air_hpc.rundir.events import Kind, record
from air_hpc.runs.process import boot_id
from air_hpc.slurm.environment import scrubbed

NO_LIMIT_MIN = 60 * 24 * 366
"""The controller always counts down; the limit of a local run is its agent's to keep."""

_DETACHED: list[subprocess.Popen[bytes]] = []
"""What this process started and will not wait for: a dropped handle would be warned of."""


@dataclass(frozen=True)
class StartedProcess:
    """A detached process group: its leader's id and when that started (ids are used again)."""

    pid: int
    create_time: float


class LocalAgentExecutor(LocalExecutor):  # type: ignore[misc]
    """submitit's local executor with our command, in a session of its own, pickling nothing.

    Unlike submitit's own it leaves CUDA_VISIBLE_DEVICES alone (submitit would hide every device)
    and gives the controller no terminal.
    """

    def __init__(
        self, folder: Path, *, environ: Mapping[str, str], limit_min: float, lead_s: float
    ) -> None:
        """`folder` takes the controller's logs; `environ` is the agent's environment."""
        super().__init__(folder=folder)
        self.environ = dict(environ)
        self.limit_min = limit_min
        self.lead_s = lead_s

    def _internal_process_submissions(self, delayed_submissions: Any) -> Any:
        raise NotImplementedError("functions are never pickled: use `start_command`")

    def _submit_command(self, command: str) -> Any:
        environ = {
            **self.environ,
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_NTASKS": "1",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_TIMEOUT_S": str(int(60 * self.limit_min)),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(int(self.lead_s)),
            "SUBMITIT_STDERR_TO_STDOUT": "1",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "submitit.local._local", str(self.folder)],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        _DETACHED.append(process)
        return LocalJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=[0])

    def start_command(self, command: str) -> StartedProcess:
        """Start `command` under the controller, detached."""
        job = self._submit_command(command)
        pid = int(job.job_id)
        return StartedProcess(pid, psutil.Process(pid).create_time())


def start(ready: Submission, warnings: tuple[Problem, ...]) -> Result:
    """Start every run of a submission that is ready. Raises EnvironmentFailure.

    A submission that was started before is not started again: its ask has an answer, or, where
    the submitter was killed in between, was at least asked.
    """
    current = ready
    for index, ask in enumerate(ready.asks):
        if ask.state == AskState.ANSWERED:
            continue
        if ask.state == AskState.ASKED:
            raise BadInput.single(
                "submission",
                ready.id,
                "was interrupted while its runs were being started here",
                hint="See `status`; if nothing runs, submit the runs again",
            )
        current = current.with_ask(index, state=AskState.ASKED)
        save(current)
        started = _start_chunk(current, ask.chunk)
        current = current.with_ask(index, state=AskState.ANSWERED, job_id=str(started.pid))
        save(current)
        for run_id in current.chunks[ask.chunk].runs:
            record(
                run_dir(current, run_id),
                "submit",
                Kind.SUBMITTED,
                job_id=str(started.pid),
                array_task_id=None,
                cluster=current.kind,
                key=ask.name,
                script=current.chunks[ask.chunk].script,
                submission=current.id,
                pid=started.pid,
                pid_create_time=started.create_time,
                boot_id=boot_id(),
                host=socket.gethostname(),
            )
    return result_of(current, warnings)


def environment(
    frozen: FrozenRun, run_path: Path, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The agent's environment on this machine: no trace of Slurm, the run's code first."""
    parts = [str(run_path / "code"), script.package_dir() or "", environ.get("PYTHONPATH", "")]
    return {
        **scrubbed(environ),
        **frozen.spec.cluster.env,
        "PYTHONPATH": os.pathsep.join(part for part in parts if part),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _start_chunk(current: Submission, number: int) -> StartedProcess:
    part = current.chunks[number]
    first = run_dir(current, part.runs[0])
    frozen = read_run_yaml(first.run_yaml.read_text(), str(first.run_yaml))
    if current.kind == "allocation":
        return _start_in_allocation(current, number)
    words = [script.interpreter(frozen.spec.cluster), "-m", "air_hpc.agent", str(first.path)]
    environ = environment(frozen, first.path)
    if part.array:
        sequence = current.folder / f"{number}.local.sh"
        write_atomic(sequence, _sequence(current, number, words[0]).encode(), mode=0o700)
        words = ["bash", str(sequence)]
    executor = LocalAgentExecutor(
        current.folder,
        environ=environ,
        limit_min=NO_LIMIT_MIN,
        lead_s=frozen.plan.lead_s,
    )
    return executor.start_command(quote.bash_words(words))


def _sequence(current: Submission, number: int, python: str) -> str:
    """Runs one agent after another; signals go to the present one, SIGTERM ends the rest too."""
    return f"""#!/bin/bash
# The runs of {current.id} on this machine, one after another.
stop=
trap 'stop=1; kill -TERM "$agent" 2>/dev/null' TERM INT
trap 'stop=1; kill -USR2 "$agent" 2>/dev/null' USR2
inherited=${{PYTHONPATH#*:}}
while IFS= read -r run <&3; do
  if [[ -n $stop ]]; then exit 1; fi
  PYTHONPATH="$run/code:$inherited" {quote.bash(python)} -m air_hpc.agent "$run" 3<&- &
  agent=$!
  # wait returns early when a signal arrives.
  while kill -0 "$agent" 2>/dev/null; do wait "$agent"; done
done 3< {quote.bash(str(current.folder / f"{number}.runs"))}
"""


def _start_in_allocation(current: Submission, number: int) -> StartedProcess:
    job_id = os.environ.get("SLURM_JOB_ID")
    if not job_id:
        raise EnvironmentFailure(
            "this shell is in no allocation (SLURM_JOB_ID is not set)",
            tried="cluster=allocation",
            next_step="run it inside salloc or a job, or use cluster=slurm",
        )
    part = current.chunks[number]
    environ = {n: v for n, v in os.environ.items() if not n.startswith("SLURM_ARRAY_")}
    argv = ["bash", part.script]
    if part.array:
        last = len(part.runs) - 1
        each = f'for i in {{0..{last}}}; do SLURM_ARRAY_TASK_ID=$i bash "$0"; done'
        argv = ["bash", "-c", each, part.script]
    log = current.folder / f"{job_id}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _DETACHED.append(process)
    return StartedProcess(process.pid, psutil.Process(process.pid).create_time())
