"""Everything of a submission before the scheduler is asked: checks, run directories, scripts.

`check` collects every problem of every task in one pass and touches nothing. `prepare` then makes
what the jobs need, and only when all of it is there is the submission `ready`.
"""

from __future__ import annotations

import grp
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from air_hpc.config.freeze import canonical_hash, to_plain
from air_hpc.config.spec import RunSpec
from air_hpc.errors import BadInput, Problem
from air_hpc.launch import bulk, code, identity, machine, options, quote, script
from air_hpc.launch import chunk as chunking
from air_hpc.launch.submission import Ask, Chunk, Submission, save, submission_dir
from air_hpc.plan.frozen import freeze_run, render_run_yaml
from air_hpc.plan.types import Plan
from air_hpc.rundir.atomic import ASIDE_PREFIX, remove_tree
from air_hpc.rundir.layout import SHARED_DIR, RunDir, create_run_dir, runs_dir_problems
from air_hpc.slurm import limits
from air_hpc.slurm.environment import user_defaults
from air_hpc.slurm.site import Snapshot

Progress = Callable[[int, int], None]
"""Called with (run directories made, of how many)."""

BATCH_KINDS = ("slurm", "allocation")
"""Kinds of cluster whose runs are started by the batch script."""


@dataclass(frozen=True)
class Task:
    """One run to submit: composed, planned, and the overrides that made it."""

    spec: RunSpec
    plan: Plan
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checked:
    """Tasks with the user's defaults filled in, and what the checks found besides."""

    tasks: tuple[Task, ...]
    warnings: tuple[Problem, ...]
    work_tree: code.WorkTree | None
    limits: chunking.ArrayLimits


def with_user_defaults(spec: RunSpec, environ: Mapping[str, str]) -> RunSpec:
    """The spec with launch keys that are null set from SBATCH_ACCOUNT and its like."""
    if spec.cluster.kind != "slurm":
        return spec
    found: dict[str, Any] = {
        key: value
        for key, value in user_defaults(environ).items()
        if getattr(spec.launch, key) is None
    }
    return replace(spec, launch=replace(spec.launch, **found)) if found else spec


def runs_dir_of(spec: RunSpec, cwd: Path) -> Path:
    """The folder of all runs, absolute."""
    return cwd / Path(spec.runs_dir).expanduser()


def place_problems(
    spec: RunSpec, *, cwd: Path, environ: Mapping[str, str] = os.environ
) -> list[Problem]:
    """What is wrong with where a run is started from and kept: its runs folder, its allocation."""
    found = [*runs_dir_problems(runs_dir_of(spec, cwd)), *_name_problems(spec, cwd)]
    if spec.cluster.kind == "allocation":
        found += _allocation_problems(spec, environ)
    group = spec.launch.share_group
    if group is not None:
        try:
            grp.getgrnam(group)
        except LookupError:
            found.append(Problem("launch.share_group", group, "no such group"))
    return found


def check(
    tasks: Sequence[Task],
    *,
    cwd: Path,
    snapshot: Snapshot | None,
    environ: Mapping[str, str] = os.environ,
) -> Checked:
    """Every problem of every task in one pass; raises BadInput if one is more than a warning."""
    filled = tuple(replace(t, spec=with_user_defaults(t.spec, environ)) for t in tasks)
    found: dict[Problem, None] = {}

    def add(problems: Iterable[Problem]) -> None:
        found.update(dict.fromkeys(problems))

    add(_common_problems(filled))
    for task in filled:
        add(options.problems(task.spec))
        add(script.problems(task.spec))
        add(place_problems(task.spec, cwd=cwd, environ=environ))
        if task.spec.cluster.kind == "local":
            add(machine.memory_problems(task.spec, task.plan))
        if snapshot is not None:
            add(limits.check(task.spec, task.plan, snapshot))
    work_tree = None
    if filled and filled[0].spec.code.snapshot == "repository":
        first = filled[0].spec
        work_tree, problems = code.inspect(
            cwd, exclude=runs_dir_of(first, cwd), max_bytes=first.code.max_bytes
        )
        # Without a work tree nothing of the user's can change under a run that starts at once.
        add(problems if work_tree is not None or first.cluster.kind in BATCH_KINDS else [])
    errors = [problem for problem in found if not problem.warning]
    if errors:
        raise BadInput(errors)
    return Checked(
        tasks=filled,
        warnings=tuple(found),
        work_tree=work_tree,
        limits=_array_limits(filled, snapshot),
    )


def fingerprint(tasks: Sequence[Task]) -> str:
    """Of what the tasks are, in their order."""
    return canonical_hash([to_plain(task.spec) for task in tasks])


def plan_submission(
    checked: Checked, *, cwd: Path, submission_id: str | None, now: float | None = None
) -> Submission:
    """The submission's record, every name in it fixed; makes nothing."""
    first = checked.tasks[0].spec
    stamp = time.time() if now is None else now
    run_ids = identity.run_ids([task.spec.model.name for task in checked.tasks], now=stamp)
    single = len(run_ids) == 1
    name = submission_id or (run_ids[0] if single else identity.sweep_id(now=stamp))
    runs_dir = runs_dir_of(first, cwd)
    folder = submission_dir(runs_dir, name)
    chunks, asks = [], []
    shapes = [options.shape(task.spec, task.plan) for task in checked.tasks]
    for number, group in enumerate(chunking.chunk(shapes, checked.limits)):
        runs = tuple(run_ids[position] for position in group.tasks)
        path = runs_dir / runs[0] / "submit" / "script.sh" if single else folder / f"{number}.sh"
        chunks.append(Chunk(str(path), runs, array=not single))
        task = checked.tasks[group.tasks[0]]
        label = options.label_of([checked.tasks[position].spec for position in group.tasks])
        base = identity.job_name(label, identity.submission_key())
        launch = task.spec.launch
        links = launch.chain_length if launch.continuation == "chain" else 1
        if first.cluster.kind != "slurm":
            links = 1
        for link in range(links):
            asks.append(Ask(number, link, base if link == 0 else f"{base}.{link}"))
    return Submission(
        id=name,
        runs_dir=str(runs_dir),
        kind=first.cluster.kind,
        fingerprint=fingerprint(checked.tasks),
        timeout_s=first.cluster.submit_timeout_s,
        run_ids=run_ids,
        chunks=tuple(chunks),
        asks=tuple(asks),
    )


def prepare(
    checked: Checked, planned: Submission, *, cwd: Path, progress: Progress | None = None
) -> Submission:
    """Make the run directories, the code snapshot, scripts and indexes: the submission is ready.

    The record of `planned` is saved already. Raises EnvironmentFailure when the runs folder cannot
    be written.
    """
    runs_dir = Path(planned.runs_dir)
    stored = None
    if checked.work_tree is not None:
        stored = code.store(checked.work_tree, runs_dir / SHARED_DIR / "code")
    places = {run: (n, i) for n, c in enumerate(planned.chunks) for i, run in enumerate(c.runs)}
    for done, (run_id, task) in enumerate(zip(planned.run_ids, checked.tasks, strict=True)):
        number, index = places[run_id]
        _make_run(planned, task, run_id, number, index, stored)
        if progress is not None:
            progress(done + 1, len(checked.tasks))
    by_id = dict(zip(planned.run_ids, checked.tasks, strict=True))
    for number, part in enumerate(planned.chunks):
        text = script_text(planned, number, by_id[part.runs[0]], cwd=cwd)
        path = Path(part.script)
        if part.array:
            bulk.write_new(index_path(planned, number), _index_text(planned, part))
        bulk.write_new(path, text, mode=0o700)
    bulk.flush(runs_dir)
    ready = replace(planned, state="ready")
    save(ready)
    return ready


def index_path(planned: Submission, number: int) -> Path:
    """The file with one run directory a line, by array index."""
    return planned.folder / f"{number}.runs"


def script_text(planned: Submission, number: int, task: Task, *, cwd: Path) -> str:
    """The whole script of one chunk: what prepare writes and --dry-run shows."""
    part = planned.chunks[number]
    runs_dir = Path(planned.runs_dir)
    ask = next(ask for ask in planned.asks if ask.chunk == number)
    title = f"run {part.runs[0]}"
    if part.array:
        title = (
            f"{len(part.runs)} runs of {planned.id}, array {number + 1} of {len(planned.chunks)}"
        )
    place = script.ScriptPlace(
        path=Path(part.script),
        title=title,
        run_dir=None if part.array else runs_dir / part.runs[0],
        index=index_path(planned, number) if part.array else None,
    )
    where = options.JobHeader(
        name=ask.name,
        output=log_pattern(planned, part),
        chdir=str(cwd),
        array_size=len(part.runs) if part.array else None,
    )
    chosen = options.build(task.spec, task.plan, where)
    return script.header(chosen) + "\n" + script.body(task.spec, task.plan, place)


def log_pattern(planned: Submission, part: Chunk) -> str:
    """Where the batch script's own output goes, in sbatch's file name pattern."""
    folder = str(planned.folder).replace("%", "%%")
    return f"{folder}/%A_%a.log" if part.array else f"{folder}/%j.log"


def _make_run(
    planned: Submission,
    task: Task,
    run_id: str,
    number: int,
    index: int,
    stored: code.CodeSnapshot | None,
) -> None:
    run = create_run_dir(Path(planned.runs_dir), run_id, group=task.spec.launch.share_group)
    frozen = freeze_run(run_id, task.spec, task.plan, task.overrides)
    part = planned.chunks[number]
    pointer: dict[str, Any] = {
        "schema_version": 1,
        "submission": planned.id,
        "chunk": number,
        "array_index": index if part.array else None,
        "script": part.script,
        "job_names": [ask.name for ask in planned.asks if ask.chunk == number],
        "code": None if stored is None else stored.digest,
        "commit": None if stored is None else stored.commit,
    }
    bulk.write_new(run.submit_dir / "submission.json", json.dumps(pointer, indent=1) + "\n")
    if stored is not None:
        code.link(stored, run.code_dir)
    # Last: a directory without run.yaml is no run.
    bulk.write_new(run.run_yaml, render_run_yaml(frozen))


def discard(planned: Submission) -> None:
    """Remove all of a submission that never became ready: no job of it can exist.

    Its record goes last: it is what names the rest.
    """
    for run_id in planned.run_ids:
        remove_tree(Path(planned.runs_dir) / run_id)
    for left in Path(planned.runs_dir).glob(f"{ASIDE_PREFIX}doomed-*"):
        shutil.rmtree(left, ignore_errors=True)
    remove_tree(planned.folder)


def _index_text(planned: Submission, part: Chunk) -> str:
    return "".join(f"{Path(planned.runs_dir) / run}\n" for run in part.runs)


def _common_problems(tasks: Sequence[Task]) -> list[Problem]:
    """What one submission needs to be the same for all its tasks."""
    found = []
    read: dict[str, Callable[[RunSpec], str]] = {
        "runs_dir": lambda spec: spec.runs_dir,
        "cluster.kind": lambda spec: spec.cluster.kind,
        "code.snapshot": lambda spec: spec.code.snapshot,
    }
    for key, value_of in read.items():
        values = sorted({value_of(task.spec) for task in tasks})
        if len(values) > 1:
            found.append(
                Problem(
                    key,
                    ", ".join(values),
                    "differs between the tasks of one sweep",
                    hint="Submit them as sweeps of their own",
                )
            )
    return found


def _name_problems(spec: RunSpec, cwd: Path) -> list[Problem]:
    """Folders that the scripts, sbatch or PYTHONPATH would not read back by their names."""
    runs_dir = str(runs_dir_of(spec, cwd))
    batch = spec.cluster.kind in BATCH_KINDS
    problem_of = quote.header_problem if batch else quote.bash_problem
    found = [problem_of(runs_dir, "runs_dir")]
    if ":" in runs_dir:
        found.append(Problem("runs_dir", runs_dir, "has a colon, which divides PYTHONPATH"))
    if batch:
        found.append(problem_of(str(cwd), "working directory"))
    return [problem for problem in found if problem is not None]


def _allocation_problems(spec: RunSpec, environ: Mapping[str, str]) -> list[Problem]:
    if not environ.get("SLURM_JOB_ID"):
        return [
            Problem(
                "cluster",
                "allocation",
                "this shell is in no allocation (SLURM_JOB_ID is not set)",
                hint="Run it inside salloc or a job, or use cluster=slurm",
            )
        ]
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    if nodes.isdecimal() and int(nodes) < spec.allocated_nodes:
        why = f"is more than the allocation {environ['SLURM_JOB_ID']} has"
        return [limits.too_many_nodes(spec, int(nodes), why)]
    return []


def _array_limits(tasks: Sequence[Task], snapshot: Snapshot | None) -> chunking.ArrayLimits:
    if snapshot is None:
        return chunking.ArrayLimits()
    queued = []
    for launch in {id(task.spec.launch): task.spec.launch for task in tasks}.values():
        association = limits.association_of(launch, snapshot)
        qos = snapshot.named_qos(limits.qos_name(launch, snapshot))
        if association is not None:
            queued += [association.max_submit_jobs, association.grp_submit_jobs]
        if qos is not None:
            queued += [qos.max_submit_jobs_per_user, qos.grp_submit_jobs]
    known = [limit for limit in queued if limit is not None and limit > 0]
    return chunking.ArrayLimits(
        max_array_size=snapshot.config.max_array_size,
        max_array_tasks=snapshot.config.max_array_tasks,
        max_queued=min(known) if known else None,
    )


def run_dir(planned: Submission, run_id: str) -> RunDir:
    """The directory of one of the submission's runs."""
    return RunDir(Path(planned.runs_dir) / run_id)
