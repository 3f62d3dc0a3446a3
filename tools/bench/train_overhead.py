"""What the native loop costs beside a bare PyTorch loop on the same model: A B A B, one process.

A is air_hpc's loop under a session (page, spool, sample order, schedule, metrics at every step); B
is the same model and optimizer in a plain loop over batches that lie in memory, which prints
nothing and saves nothing. Both read the loss at every step. The figure is the ratio of the median
times of a step, over the steps after the first ten; saves are left out.

    python tools/bench/train_overhead.py [--steps 100] [--rounds 3] [--threads 1]
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_

from air_hpc.config.compose import Composer
from air_hpc.config.spec import RunSpec
from air_hpc.models import initialize, on_meta
from air_hpc.models.llama import next_token_loss
from air_hpc.parallel.world import World, start_world, stop_world
from air_hpc.plan.make import make_plan
from air_hpc.plan.types import Plan
from air_hpc.probes.matmul import device_name
from air_hpc.probes.ports import find_free_port
from air_hpc.rundir.layout import RunDir, create_run_dir
from air_hpc.rundir.spool import effective_samples
from air_hpc.session.session import Session
from air_hpc.train.loop import Trainer
from air_hpc.train.optimizer import build_optimizer

WARM_UP_STEPS = 10


@dataclass(frozen=True)
class Case:
    spec: RunSpec
    plan: Plan
    world: World


def native(case: Case, run: RunDir) -> list[float]:
    """Seconds of each step of air_hpc's loop."""
    session = Session.standalone(run)
    Trainer(session, case.spec, case.plan, case.world, 1e12).run()
    session.finished(case.spec.train.steps)
    samples = effective_samples(run).values()
    return [sample.metrics["perf/step_time_s"] for sample in samples]


def bare(case: Case, run: RunDir) -> list[float]:
    """Seconds of each step of a plain loop."""
    spec, plan = case.spec, case.plan
    session = Session.standalone(run)
    batches = Trainer(session, spec, plan, case.world).batches
    data = [torch.from_numpy(batches.step_batch(step)) for step in range(spec.train.steps)]
    model = on_meta(spec.model, spec.data.sequence_length)
    initialize(model, spec.model, spec.train.seed, torch.device("cpu"))
    optimizer = build_optimizer(model.parameters(), spec.optimizer, torch.device("cpu"))
    times = []
    for step in data:
        began = time.perf_counter()
        total = 0.0
        for tokens in step:
            loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]) / len(step)
            loss.backward()
            total += float(loss.detach())
        clip_grad_norm_(model.parameters(), spec.optimizer.grad_clip or 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - began)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2, help="rounds of A B")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="of the config, as for a run")
    options = parser.parse_args()
    case = prepare(options.steps, options.threads, options.overrides)
    medians: dict[str, list[float]] = {"native": [], "bare": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for name, measure in (("native", native), ("bare", bare)):
                times = measure(case, create_run_dir(Path(folder), f"{name}-{number}"))
                medians[name].append(statistics.median(times[WARM_UP_STEPS:]))
    stop_world()
    report(case, medians, options)
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
    os.environ["MASTER_PORT"] = str(find_free_port(os.getpid()))
    world = start_world(
        plan.mesh, rank=0, local_rank=0, world_size=1, kind=spec.accelerator.kind, timeout_s=60
    )
    return Case(spec, plan, world)


def report(case: Case, medians: dict[str, list[float]], options: argparse.Namespace) -> None:
    tokens = case.plan.tokens_per_step
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    today = datetime.datetime.now(datetime.UTC).date()
    print(f"date {today}, commit {commit}, torch {torch.__version__}, {options.threads} threads")
    print(f"machine {device_name(torch.device('cpu'))}, {os.cpu_count()} cores, {platform.node()}")
    print(f"model {case.spec.model.name}, {options.steps} steps, {tokens} tokens a step\n")
    print("| loop | " + " | ".join(f"round {n + 1}" for n in range(options.rounds)) + " |")
    print("|---|" + "---|" * options.rounds)
    for name, values in medians.items():
        print(f"| {name}, tokens/s | " + " | ".join(f"{tokens / v:,.0f}" for v in values) + " |")
    ratios = [b / a for a, b in zip(medians["native"], medians["bare"], strict=True)]
    print("| native / bare | " + " | ".join(f"{ratio:.3f}" for ratio in ratios) + " |")
    print(f"\nratio of tokens/s, native / bare: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    raise SystemExit(main())
