"""Runs that look trained: written by the same writers that the agent and the workers use."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from air_hpc.config.spec import (
    DataSpec,
    LaunchSpec,
    OptimizerSpec,
    RunSpec,
    TrackingSpec,
    TrainSpec,
)
from air_hpc.plan.frozen import FrozenRun, freeze_run, render_run_yaml
from air_hpc.plan.make import make_plan
from air_hpc.rundir.events import Kind, LedgerWriter
from air_hpc.rundir.fence import Token, claim
from air_hpc.rundir.layout import RunDir, create_run_dir
from air_hpc.rundir.spool import SpoolWriter

START = 1_760_000_000.0


class Clock:
    """A clock that a test moves."""

    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        self.now += seconds


def loss_of(step: int) -> float:
    """The loss of a run whose resumes are exact."""
    return 5.5 * math.exp(-step / 60) + 1.7 + 0.05 * math.sin(step)


class SimulatedRun:
    """One run, driven event by event on a clock of its own."""

    def __init__(
        self,
        runs_dir: Path,
        run_id: str = "tiny-1",
        *,
        uri: str | None = None,
        steps: int = 30,
        lr: float = 1e-3,
        seed: int = 0,
        nodes: int = 2,
    ) -> None:
        self.clock = Clock()
        self.dir: RunDir = create_run_dir(runs_dir, run_id)
        spec = RunSpec(
            runs_dir=str(runs_dir),
            launch=LaunchSpec(nodes=nodes, devices_per_node=2),
            data=DataSpec(sequence_length=64),
            train=TrainSpec(steps=steps, seed=seed, threads_per_worker=1),
            optimizer=OptimizerSpec(lr=lr),
            tracking=TrackingSpec(uri=None, interval_s=0.05),
            cluster=replace(RunSpec().cluster, kind="slurm", env={"MY_API_KEY": "hunter2hunter2"}),
        )
        plan, problems = make_plan(spec, local_cpu_count=4)
        assert plan is not None, problems
        plan = replace(plan, tracking_uri=uri)
        self.frozen: FrozenRun = freeze_run(run_id, spec, plan, (f"optimizer.lr={lr}",))
        self.dir.run_yaml.write_text(render_run_yaml(self.frozen))
        shared_script = runs_dir / ".air_hpc" / "submissions" / "1.sh"
        shared_script.parent.mkdir(exist_ok=True)
        pointer = json.dumps({"script": str(shared_script)})
        (self.dir.submit_dir / "submission.json").write_text(pointer)
        shared_script.write_text("#!/bin/bash\nexport MY_API_KEY=hunter2hunter2\n")
        tree = self.dir.shared_dir / "code" / "0a1b" / "tree"
        tree.mkdir(parents=True, exist_ok=True)
        (tree.parent / "code.json").write_text('{"packages": {"numpy": "2.0"}}')
        (tree.parent / "diff.patch").write_text("+fetch https://me:hunter2@host/data")
        self.dir.code_dir.symlink_to(tree)
        self.ledger = LedgerWriter(self.dir, "agent-1", clock=self.clock)
        self.token = Token(0, 0)
        self.spool: SpoolWriter | None = None

    def event(self, kind: Kind, token: Token | None = None, **facts: Any) -> None:
        self.ledger.append(kind, token, **facts)

    def submitted(self) -> None:
        self.event(Kind.SUBMITTED, job_id="41", sweep="sweep-7", cluster="slurm")

    def attempt(self, attempt: int, resume_step: int | None, generation: int = 1) -> None:
        """An attempt starts and its workers reach the first step."""
        self.clock.tick(30)
        self.token = Token(attempt, generation)
        claim(self.dir, self.token)
        nodes = [f"n{attempt}", f"n{attempt + 1}"]
        if generation == 1:
            self.event(
                Kind.ATTEMPT_STARTED,
                self.token,
                job_id=str(40 + attempt),
                restart_count=attempt - 1,
                nodes=nodes,
            )
        self.event(Kind.GENERATION_STARTED, self.token, nodes=nodes, resume_step=resume_step)
        self.clock.tick(5)
        if resume_step is not None:
            self.event(Kind.RESUMED, self.token, step=resume_step)
        self.spool = SpoolWriter(self.dir, self.token, clock=self.clock)

    def train(self, first: int, last: int, *, offset: float = 0.0, step_s: float = 1.0) -> None:
        """Steps `first` to `last`; `offset` makes a resume that was not exact."""
        assert self.spool is not None
        self.event(Kind.TRAINING_STARTED, self.token, step=first)
        self.more(first, last, offset=offset, step_s=step_s)

    def more(self, first: int, last: int, *, offset: float = 0.0, step_s: float = 1.0) -> None:
        """Further steps of the same generation."""
        assert self.spool is not None
        lr = self.frozen.spec.optimizer.lr
        for step in range(first, last + 1):
            self.clock.tick(step_s)
            rate = 900.0 + 200 * self.token.attempt + 40 * math.sin(step / 3 + lr * 1e4)
            self.spool.log(
                step,
                {
                    "train/loss": loss_of(step) * (1 + abs(math.log10(lr) + 3) / 4) + offset,
                    "perf/tokens_per_second": rate,
                    "perf/mfu": rate / 4000,
                    "perf/mfu_palm": rate / 3800,
                },
            )
        self.spool.flush()

    def commit(self, step: int) -> None:
        self.event(Kind.CHECKPOINT_COMMITTED, self.token, step=step, started=self.clock.now)

    def end(self, failure_class: str, verdict: str, step: int) -> None:
        """The generation and its attempt end."""
        assert self.spool is not None
        self.spool.close()
        self.clock.tick(2)
        facts = {"failure_class": failure_class, "evidence": f"seen: {failure_class}", "step": step}
        self.event(Kind.GENERATION_ENDED, self.token, **facts)
        self.event(Kind.ATTEMPT_ENDED, self.token, verdict=verdict, **facts)
        self.clock.tick(20)

    def whole_life(self, ship: Any = lambda: None) -> None:
        """Three attempts over 30 steps: two roll-backs, of which one was exact."""
        self.submitted()
        ship()
        self.attempt(1, None)
        self.train(1, 10)
        self.commit(10)
        self.more(11, 14)
        ship()
        self.more(15, 17)
        self.end("node_lost", "requeue", 17)
        ship()
        self.attempt(2, 10)
        self.train(11, 19)
        self.commit(19)
        ship()
        self.more(20, 22)
        ship()
        self.end("preempted", "requeue", 22)
        self.attempt(3, 19)
        self.train(20, 30, offset=0.25)
        ship()
        self.commit(30)
        self.end("completed", "stop", 30)
        ship()
