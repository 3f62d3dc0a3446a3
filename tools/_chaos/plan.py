"""Which faults a campaign injects, when and on whom: a pure function of its seed.

A run meets several batches of faults. A batch begins at a moment of the run's life (`When`); its
first fault comes a random time after that, and each further one soon after the one before, without
waiting for the run to recover. Between two batches the run gets on its way again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Kind(StrEnum):
    """What can be done to a run."""

    KILL_WORKER = "kill -9 of a worker"
    KILL_AGENT = "kill -9 of an agent"
    KILL_NODE = "kill-node"
    ISOLATE_NODE = "isolate-node"
    STOP_WORKER = "SIGSTOP of a worker"
    STOP_AGENT = "SIGSTOP of an agent"
    PAUSE_AGENT = "SIGSTOP of an agent, SIGCONT later"
    PREEMPT = "preemption"
    TIME_LIMIT = "time limit"
    REQUEUE = "scontrol requeue"
    SHARD_TRUNCATED = "truncated shard"
    SHARD_CORRUPTED = "corrupted shard"
    SHARD_MISSING = "missing shard"
    DISK_FULL = "ENOSPC in the run directory"
    NO_PERMISSION = "no permission in the run directory"
    MLFLOW_DOWN = "MLflow server down"
    MLFLOW_SLOW = "MLflow server slow"
    MLFLOW_ERROR = "MLflow server answers 500"
    PORT_TAKEN = "ports taken"
    CLOCK_STEP = "clock step"


class When(StrEnum):
    """The moment of a run's life that a batch waits for."""

    TRAINING = "training"
    STARTING = "starting"
    SAVING = "saving"


MLFLOW = (Kind.MLFLOW_DOWN, Kind.MLFLOW_SLOW, Kind.MLFLOW_ERROR)
SHARDS = (Kind.SHARD_TRUNCATED, Kind.SHARD_CORRUPTED, Kind.SHARD_MISSING)
NEEDS_RESTART = frozenset({*SHARDS, Kind.PORT_TAKEN})
"""Seen only by the next generation: a worker is killed right after."""
ENDS_GENERATION = frozenset(
    {Kind.KILL_WORKER, Kind.KILL_AGENT, Kind.KILL_NODE, Kind.STOP_WORKER, Kind.STOP_AGENT,
     Kind.PREEMPT, Kind.TIME_LIMIT, Kind.REQUEUE, *NEEDS_RESTART}
)  # fmt: skip
"""After these only a newer generation can take the next step. An isolated node's may go on for a
while, and a pause may be too short to be noticed."""

POLICIES = ("same", "spare", "elastic", "requeue")
BATCHES = (5, 8)
MAX_TOGETHER = 3


@dataclass(frozen=True)
class Fault:
    """One fault. `place` in [0, 1) picks the node and the worker; `size` scales what is done."""

    number: int
    kind: Kind
    delay_s: float
    """After the batch's moment, or after the fault before it."""
    place: float
    size: float


@dataclass(frozen=True)
class Batch:
    """Faults that come together."""

    when: When
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class RunPlan:
    """One run and what it meets."""

    number: int
    policy: str
    batches: tuple[Batch, ...]

    @property
    def faults(self) -> tuple[Fault, ...]:
        """All of them, in order."""
        return tuple(fault for batch in self.batches for fault in batch.faults)


def run_plans(
    seed: int, *, kinds: Sequence[Kind] = tuple(Kind), policies: Sequence[str] = POLICIES
) -> Iterator[RunPlan]:
    """The plans of a campaign's runs, without end; equal for equal arguments.

    Kinds come in shuffled rounds, so that each is injected about equally often.
    """
    chance, deck, number, run = random.Random(seed), list[Kind](), 0, 0
    while True:
        batches = []
        for _ in range(chance.randint(*BATCHES)):
            count = chance.choices((1, 2, MAX_TOGETHER), weights=(6, 3, 1))[0]
            faults = []
            for position in range(count):
                if not deck:
                    deck = chance.sample(list(kinds), len(kinds))
                delay_s = chance.uniform(0, 4) if position else chance.uniform(0, 3)
                faults.append(
                    Fault(number, deck.pop(), round(delay_s, 3), chance.random(), chance.random())
                )
                number += 1
            when = chance.choices(tuple(When), weights=(6, 2, 2))[0]
            batches.append(Batch(when, tuple(faults)))
        yield RunPlan(run, policies[run % len(policies)], tuple(batches))
        run += 1


def plans_for(
    faults: int, seed: int, *, kinds: Sequence[Kind] = tuple(Kind),
    policies: Sequence[str] = POLICIES,
) -> list[RunPlan]:  # fmt: skip
    """As many runs as have exactly `faults` faults together; the last one is cut."""
    found, left = [], faults
    for plan in run_plans(seed, kinds=kinds, policies=policies):
        batches = []
        for batch in plan.batches:
            kept = batch.faults[:left]
            left -= len(kept)
            if kept:
                batches.append(Batch(batch.when, kept))
        found.append(replace(plan, batches=tuple(batches)))
        if not left:
            return found
    raise AssertionError("run_plans has no end")


def make_up_for(
    missing: int, seed: int, done: Sequence[RunPlan], *, kinds: Sequence[Kind] = tuple(Kind),
    policies: Sequence[str] = POLICIES,
) -> list[RunPlan]:  # fmt: skip
    """Further runs with `missing` faults, after those that are `done`: some of theirs found no
    moment. Runs and faults are numbered on."""
    runs = len(done)
    faults = sum(len(plan.faults) for plan in done)

    def renumbered(plan: RunPlan) -> RunPlan:
        batches = (
            replace(batch, faults=tuple(replace(f, number=f.number + faults) for f in batch.faults))
            for batch in plan.batches
        )
        return replace(plan, number=plan.number + runs, batches=tuple(batches))

    # Another stream of the same seed: that of the first runs would only be repeated.
    further = plans_for(missing, seed + 1_000_003 * runs, kinds=kinds, policies=policies)
    return [renumbered(plan) for plan in further]
