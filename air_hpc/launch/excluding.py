"""What a submission tells Slurm to avoid, decided at the moment of sbatch.

The list stands on sbatch's command line and not in the saved script, which may be submitted again
when every exclusion of today has expired. A file of exclusions that cannot be read keeps no run
from being submitted.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from air_hpc.config.spec import RunSpec
from air_hpc.errors import AirHpcError, EnvironmentFailure, Problem
from air_hpc.launch.submission import Chunk, Submission
from air_hpc.plan.frozen import read_run_yaml
from air_hpc.plan.types import Plan
from air_hpc.recovery.exclusions import active
from air_hpc.rundir.exclusions import Exclusion, read_exclusions
from air_hpc.rundir.layout import SHARED_DIR, RunDir
from air_hpc.slurm import exclude, snapshot
from air_hpc.slurm.hostlist import fold
from air_hpc.slurm.site import Snapshot


@dataclass(frozen=True)
class Avoid:
    """Arguments for sbatch, and what to tell the user about them (warnings)."""

    sbatch_args: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def for_chunk(current: Submission, part: Chunk) -> Avoid:
    """What the jobs of one chunk avoid. Reads a run's config only where a node is excluded."""
    runs_dir = Path(current.runs_dir)
    if current.kind != "slurm" or not _standing(runs_dir):
        return Avoid()
    run = RunDir(runs_dir / part.runs[0])
    try:
        frozen = read_run_yaml(run.run_yaml.read_text(encoding="utf-8"), str(run.run_yaml))
    except (AirHpcError, OSError) as error:
        return Avoid(problems=(_not_applied(str(error)),))
    site, cache = None, runs_dir / SHARED_DIR / "site.json"
    with contextlib.suppress(EnvironmentFailure):  # sbatch is asked next, and will say it
        site = snapshot.take(timeout_s=current.timeout_s, cache=cache)
    return for_run(runs_dir, frozen.spec, frozen.plan, site)


def for_run(runs_dir: Path, spec: RunSpec, plan: Plan, site: Snapshot | None) -> Avoid:
    """What a run that is submitted now avoids."""
    if spec.cluster.kind != "slurm" or not spec.recovery.exclusion.enabled:
        return Avoid()
    now = time.time()
    try:
        standing = active(read_exclusions(runs_dir).entries, now)
    except EnvironmentFailure as failure:
        return Avoid(problems=(_not_applied(str(failure)),))
    nodes = exclude.avoided(spec, plan, site, standing, now)
    if not nodes:
        return Avoid()
    told = [_told(each) for each in standing if each.node in nodes]
    problem = Problem(
        "nodes",
        fold(nodes),
        f"avoided, for earlier failures: {'; '.join(told)}",
        hint="`nodes` lists them all, `nodes release NODE` uses one again",
        warning=True,
    )
    option = exclude.exclude_option(spec, plan, site, standing, now)
    return Avoid((f"--exclude={option}",), (problem,))


def _standing(runs_dir: Path) -> bool:
    try:
        return bool(active(read_exclusions(runs_dir).entries, time.time()))
    except EnvironmentFailure:
        return True


def _told(each: Exclusion) -> str:
    until = time.strftime("%F %H:%M", time.localtime(each.until))
    why = ", ".join(filter(None, (each.failure_class, each.reason)))
    return f"{each.node} until {until} ({why or 'no reason given'})"


def _not_applied(why: str) -> Problem:
    return Problem("nodes", "", f"the exclusions are not applied: {why}", warning=True)
