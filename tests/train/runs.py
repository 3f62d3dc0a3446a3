"""Small runs for tests: a spec, its plan, a run directory with data, and ranks that train it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from air_hpc.config.spec import (
    CheckpointSpec,
    DataSpec,
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    ScheduleSpec,
    TrainSpec,
)
from air_hpc.data.corpus import corpus_folder
from air_hpc.data.shards import write_shards
from air_hpc.hardware.accelerator import AcceleratorSpec
from air_hpc.plan.types import FlopsPerToken, MemoryPerRank, Mesh, ModelCounts, Plan
from air_hpc.rundir.commit import find_candidates, inheritable
from air_hpc.rundir.fence import Token, claim_next_attempt, record_inherited
from air_hpc.rundir.layout import RunDir, create_run_dir
from air_hpc.session.page import Word
from air_hpc.session.session import Session
from tests.torch_ranks import join_world

TOKENS = 16
SAMPLES = 45  # no multiple of the batch: an epoch ends inside one, at step 6


def small_spec(steps: int, **changes: Any) -> RunSpec:
    """A model of a few thousand parameters with dropout, accumulation left to the plan."""
    spec = RunSpec(
        accelerator=AcceleratorSpec(name="cpu", kind="cpu", peak_source="measured"),
        model=ModelSpec(
            dim=16, layers=2, heads=2, kv_heads=2, ffn_dim=32, vocab_size=256, dropout=0.1
        ),
        data=DataSpec(sequence_length=TOKENS),
        optimizer=OptimizerSpec(lr=1e-2),
        schedule=ScheduleSpec(warmup_steps=2),
        train=TrainSpec(steps=steps, global_batch_size=8, threads_per_worker=1),
        checkpoint=CheckpointSpec(interval_steps=3, keep_last=10),
    )
    return replace(spec, **changes)


def plan_for(spec: RunSpec, mesh: Mesh, accumulation_steps: int = 2) -> Plan:
    """A plan for `mesh`, with figures that tests of training do not look at."""
    size = spec.train.global_batch_size // mesh.data_parallel_size // accumulation_steps
    return Plan(
        mesh=mesh,
        nodes=1,
        devices_per_node=mesh.world_size,
        micro_batch_size=size,
        accumulation_steps=accumulation_steps,
        tokens_per_step=spec.train.global_batch_size * spec.data.sequence_length,
        counts=ModelCounts(1, 1),
        flops_per_token=FlopsPerToken(1e3, 2e3),
        memory_per_rank=MemoryPerRank(0, 0, 0, 0),
        peak_flops_per_device=None,
        lead_s=60.0,
        threads_per_worker=1,
        tracking_uri=None,
    )


def make_run(runs_dir: Path, name: str = "run") -> RunDir:
    """A run directory whose data is a short pseudo-text."""
    run = create_run_dir(runs_dir, name)
    folder = corpus_folder(run.shared_dir / "data")
    text = bytes((i * i // 7 + i) % 251 for i in range(SAMPLES * TOKENS + 1))
    write_shards(folder, [text], dtype="uint8", vocab_size=256)
    return run


def next_token(run: RunDir) -> str:
    """Claim the next attempt's token, inheriting every checkpoint that counts."""
    usable = find_candidates(run).usable
    token = claim_next_attempt(run)
    record_inherited(run, token, inheritable(usable))
    return str(token)


def train_ranks(
    rank: int,
    rendezvous: str,
    run_path: str,
    token: str,
    spec: RunSpec,
    plan: Plan,
    resume_steps: tuple[int, ...] = (),
    stop_after: int | None = None,
) -> Any:
    """Train on this rank under `token`; asked to stop, it runs to `stop_after`."""
    from air_hpc.parallel.world import stop_world
    from air_hpc.train.loop import train

    world = join_world(rank, rendezvous, plan.mesh)
    session = Session.standalone(
        RunDir(Path(run_path)),
        rank=rank,
        world_size=plan.world_size,
        token=Token.parse(token),
        resume_steps=resume_steps,
    )
    if stop_after is not None:
        session._page.write(Word.TARGET_STEP, stop_after)
        session._page.write(Word.STOP_FLAG, 1)
    ended = train(session, spec, plan, world, peak_flops_per_device=1e12)
    stop_world()
    return ended
