"""Run directories as a submission makes them, without submitting anything."""

from __future__ import annotations

from pathlib import Path

from air_hpc.config.compose import Composer
from air_hpc.plan.frozen import freeze_run, render_run_yaml
from air_hpc.plan.make import make_plan
from air_hpc.rundir.atomic import write_atomic
from air_hpc.rundir.commit import begin_save as begin_folder
from air_hpc.rundir.commit import commit_save, digest_file, find_candidates, inheritable
from air_hpc.rundir.fence import Token, claim_next_attempt, newest_token, record_inherited
from air_hpc.rundir.layout import RunDir, create_run_dir

TINY = (
    "model.dim=16",
    "model.layers=1",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn_dim=32",
    "data.sequence_length=16",
    "train.global_batch_size=4",
    "train.threads_per_worker=1",
    "schedule.warmup_steps=0",
    "tracking.uri=null",
)
"""A model of a few thousand parameters, and no MLflow."""


def build_run(runs_dir: Path, *overrides: str, run_id: str = "run") -> RunDir:
    """A run directory with the run.yaml of the default config, `TINY` and `overrides`."""
    spec = Composer().compose([*TINY, f"runs_dir={runs_dir}", *overrides])
    plan, problems = make_plan(spec)
    assert plan is not None, problems
    run = create_run_dir(runs_dir, run_id)
    text = render_run_yaml(freeze_run(run_id, spec, plan, overrides))
    write_atomic(run.run_yaml, text.encode())
    return run


def commit_step(run: RunDir, token: Token, step: int, content: bytes = b"state") -> None:
    """Commit a checkpoint of `step` with one small file."""
    folder = begin_folder(run, token, step)
    path = folder / "shard"
    path.write_bytes(content)
    commit_save(run, token, step, {"shard": digest_file(path)})


def commit_steps(run: RunDir, *steps: int) -> Token:
    """Claim the next attempt and commit a checkpoint of each step."""
    usable = find_candidates(run).usable if newest_token(run) else ()
    token = claim_next_attempt(run)
    record_inherited(run, token, inheritable(usable))
    for step in steps:
        commit_step(run, token, step)
    return token
