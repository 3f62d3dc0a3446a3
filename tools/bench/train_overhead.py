"""What the native loop costs beside a bare PyTorch loop on the same model: A B A B, one process.

A is air_hpc's loop under a session (page, spool, sample order, schedule, metrics at every step); B
is the same model and optimizer in a plain loop over batches that lie in memory, which prints
nothing and saves nothing. Both read the loss at every step. The figures are ratios of the median
times of a step after the first ten, by the wall and by CPU time, which other users of the machine
disturb less; saves are left out.

    python tools/bench/train_overhead.py [--steps 100] [--rounds 3] [--threads 1]
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_

from air_hpc.config.compose import Composer
from air_hpc.config.spec import RunSpec
from air_hpc.models import initialize, on_meta
from air_hpc.models.decoder import next_token_loss
from air_hpc.parallel.world import World, start_world, stop_world
from air_hpc.plan.make import make_plan
from air_hpc.plan.types import Plan
from air_hpc.probes.matmul import device_name
from air_hpc.probes.ports import free_ports
from air_hpc.rundir.layout import RunDir, create_run_dir
from air_hpc.session.session import Session
from air_hpc.train.loop import Trainer
from air_hpc.train.optimizer import build_optimizer

WARM_UP_STEPS = 10


@dataclass(frozen=True)
class Case:
    spec: RunSpec
    plan: Plan
    world: World


class TimedSession(Session):
    """Notes when each step ended, by the wall and by this process's CPU time."""

    def end_step(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        super().end_step(step, metrics)
        self.ends = [*getattr(self, "ends", []), now()]


def now() -> tuple[float, float]:
    """(wall, CPU) seconds."""
    return time.perf_counter(), time.process_time()


def medians(ends: list[tuple[float, float]]) -> tuple[float, float]:
    """The median (wall, CPU) seconds of a step after the warm-up."""
    kept = list(pairwise(ends))[WARM_UP_STEPS:]
    wall = statistics.median(b[0] - a[0] for a, b in kept)
    return wall, statistics.median(b[1] - a[1] for a, b in kept)


def native(case: Case, run: RunDir) -> list[tuple[float, float]]:
    """When each step of air_hpc's loop ended."""
    session = TimedSession.standalone(run)
    Trainer(session, case.spec, case.plan, case.world, 1e12).run()
    session.finished(case.spec.train.steps)
    return session.ends


def bare(case: Case, run: RunDir) -> list[tuple[float, float]]:
    """When each step of a plain loop ended."""
    spec, plan = case.spec, case.plan
    batches = Trainer(Session.standalone(run), spec, plan, case.world).batches
    data = [torch.from_numpy(batches.step_batch(step)) for step in range(spec.train.steps)]
    model = on_meta(spec.model, spec.data.sequence_length)
    initialize(model, spec.model, spec.train.seed, torch.device("cpu"))
    optimizer = build_optimizer(model.parameters(), spec.optimizer, torch.device("cpu"))
    ends = []
    for step in data:
        total = 0.0
        for tokens in step:
            loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]) / len(step)
            loss.backward()
            total += float(loss.detach())
        clip_grad_norm_(model.parameters(), spec.optimizer.grad_clip or 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ends.append(now())
    return ends


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2, help="rounds of A B")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="of the config, as for a run")
    options = parser.parse_args()
    case = prepare(options.steps, options.threads, options.overrides)
    measured: dict[str, list[tuple[float, float]]] = {"native": [], "bare": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for name, measure in (("native", native), ("bare", bare)):
                ends = measure(case, create_run_dir(Path(folder), f"{name}-{number}"))
                measured[name].append(medians(ends))
    stop_world()
    report(case, measured, options)
    return 0


def prepare(steps: int, threads: int, overrides: list[str]) -> Case:
    torch.set_num_threads(threads)
    spec = Composer().compose(overrides)
    spec = replace(
        spec,
        train=replace(spec.train, steps=steps, threads_per_worker=threads),
        checkpoint=replace(spec.checkpoint, interval_steps=10 * steps),
    )
    plan, problems = make_plan(spec)
    if plan is None or plan.world_size != 1:
        sys.exit("\n".join(map(str, problems)) or "one worker only")
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(free_ports(1, str(os.getpid()))[0])
    world = start_world(
        plan.mesh, rank=0, local_rank=0, world_size=1, kind=spec.accelerator.kind, timeout_s=60
    )
    return Case(spec, plan, world)


def report(
    case: Case, measured: dict[str, list[tuple[float, float]]], options: argparse.Namespace
) -> None:
    tokens = case.plan.tokens_per_step
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    today = datetime.datetime.now(datetime.UTC).date()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"date {today}, commit {commit}, torch {torch.__version__}, {options.threads} threads")
    print(f"machine {device_name(torch.device('cpu'))}, {os.cpu_count()} cores, load {load}")
    print(f"model {case.spec.model.name}, {options.steps} steps, {tokens} tokens a step\n")
    print("| loop | " + " | ".join(f"round {n + 1}" for n in range(options.rounds)) + " |")
    print("|---|" + "---|" * options.rounds)
    for index, kind in enumerate(("second", "CPU second")):
        columns = {name: [tokens / v[index] for v in values] for name, values in measured.items()}
        ratios = [a / b for a, b in zip(columns["native"], columns["bare"], strict=True)]
        for name, values in columns.items():
            print(f"| {name}, tokens a {kind} | " + " | ".join(f"{v:,.0f}" for v in values) + " |")
        print("| native / bare | " + " | ".join(f"{ratio:.3f}" for ratio in ratios) + " |")
        print(
            f"| median of the ratios | {statistics.median(ratios):.3f} |"
            + " |" * (options.rounds - 1)
        )


if __name__ == "__main__":
    raise SystemExit(main())
