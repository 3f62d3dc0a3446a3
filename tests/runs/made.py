"""Run directories made by the real writers, and commands of a Slurm that answers from a file."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from air_hpc.config.spec import RunSpec
from air_hpc.plan.frozen import freeze_run, render_run_yaml
from air_hpc.plan.make import make_plan
from air_hpc.rundir.events import Kind, LedgerWriter
from air_hpc.rundir.fence import Token, claim
from air_hpc.rundir.layout import RunDir, create_run_dir
from air_hpc.rundir.spool import SpoolWriter
from air_hpc.slurm.jobs import SEPARATOR

FIRST = Token(1, 1)
START = 1_700_000_000.0
"""When the first event of every made run happens."""


class MadeRun:
    """One run; each `event` comes a second after the one before unless told when."""

    def __init__(self, runs_dir: Path, run_id: str = "tiny-1", submission: str | None = None):
        self.dir: RunDir = create_run_dir(runs_dir, run_id)
        spec = RunSpec()
        plan, problems = make_plan(spec, local_cpu_count=2)
        assert plan is not None, problems
        self.dir.run_yaml.write_text(render_run_yaml(freeze_run(run_id, spec, plan)))
        if submission is not None:
            pointer = self.dir.submit_dir / "submission.json"
            pointer.write_text(json.dumps({"submission": submission}))
            (self.dir.shared_dir / "submissions" / submission).mkdir(parents=True, exist_ok=True)
        self.now = START

    def event(
        self, kind: Kind, token: Token | None = None, at: float | None = None, **facts: Any
    ) -> MadeRun:
        self.now = self.now + 1 if at is None else at
        with LedgerWriter(self.dir, "test", clock=lambda: self.now) as ledger:
            ledger.append(kind, token, **facts)
        return self

    def submitted(self, job_id: str = "100", task: int | None = None) -> MadeRun:
        return self.event(Kind.SUBMITTED, job_id=job_id, array_task_id=task, cluster="slurm")

    def training(self, token: Token = FIRST, **facts: Any) -> MadeRun:
        """Started, and training its first step."""
        claim(self.dir, token)
        self.event(Kind.ATTEMPT_STARTED, token, nodes=["n1", "n2"], **facts)
        self.event(Kind.GENERATION_STARTED, token, nodes=["n1", "n2"], resume_step=None)
        return self.event(Kind.TRAINING_STARTED, token, step=1)

    def metrics(self, steps: Mapping[int, Mapping[str, float]], token: Token = FIRST) -> MadeRun:
        spool = SpoolWriter(self.dir, token, clock=lambda: self.now)
        for step, values in steps.items():
            self.now += 1
            spool.log(step, values)
        spool.close()
        return self

    def ended(self, token: Token = FIRST, **facts: Any) -> MadeRun:
        told = {"failure_class": "completed", "verdict": "stop", "evidence": "all steps are done"}
        return self.event(Kind.ATTEMPT_ENDED, token, **{**told, **facts})

    def log(self, text: str, token: Token = FIRST, node: str = "n1") -> Path:
        folder = self.dir.generation_dir(token.attempt, token.generation)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"node-{node}.log"
        with path.open("a") as file:
            file.write(text)
        return path


class ToldSlurm:
    """squeue, sacct, scontrol and scancel as programs on PATH that print what they are told.

    Each call is noted, so that a test can count them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.calls_file = folder / "calls"
        self.tell("squeue")
        self.tell("sacct", error="Slurm accounting storage is disabled")
        self.tell("scontrol", error="slurm_load_jobs error: Invalid job id specified")
        self.tell("scancel")

    @property
    def environ(self) -> dict[str, str]:
        return {"PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}"}

    def tell(self, program: str, *lines: str, error: str = "") -> None:
        answer = self.folder / f"{program}.answer"
        answer.write_text("".join(f"{line}\n" for line in lines))
        fails = f"echo {error!r} >&2; exit 1" if error else "exit 0"
        path = self.folder / program
        path.write_text(
            f'#!/bin/sh\necho "{program} $*" >> {self.calls_file}\ncat {answer}\n{fails}\n'
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def calls(self, program: str) -> list[str]:
        if not self.calls_file.exists():
            return []
        lines = self.calls_file.read_text().splitlines()
        return [line for line in lines if line.split()[0] == program]


def queued(job: str, state: str, reason: str = "None", *, end: str = "N/A", nodes: str = "") -> str:
    """One line of squeue in the format that is asked for."""
    array, _, task = job.partition("_")
    fields = [
        job, f"{int(array) + int(task or 0)}", array, task or "N/A", state, reason, nodes, "N/A",
        end, "1:00", "name", "low", "2023-11-14T22:13:20", "2",
    ]  # fmt: skip
    return SEPARATOR.join(fields)


def accounted(job: str, state: str, *, end: str = "2023-11-14T22:20:00", code: str = "0:0") -> str:
    """One line of sacct in the format that is asked for."""
    fields = [
        job, job.partition("_")[0], state, "None", "n1", "2023-11-14T22:13:20", end, "1:00",
        "name", "low", "2023-11-14T22:13:20", "1", code,
    ]  # fmt: skip
    return SEPARATOR.join(fields)
