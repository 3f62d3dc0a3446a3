"""Finds runs by what a person remembers of them.

A run may be named by its id, a piece of the id that only one run has (a prefix goes before a piece
from the middle), the path of its directory, the Slurm job it ran as (`123` or `123_4`), or
`latest`. What fits several runs is refused with their ids, never guessed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from air_hpc.errors import BadInput, Problem, nearest, raise_if_any
from air_hpc.rundir.events import read_ledger
from air_hpc.rundir.layout import RunDir, list_runs, open_run_dir
from air_hpc.runs.jobs import jobs_of
from air_hpc.runs.logs import submission_folder

LATEST = "latest"
DEFAULT_RUNS_DIR = "runs"
_SHOWN = 8


def default_runs_dir() -> Path:
    """The runs folder where none is named: `$AIR_HPC_RUNS_DIR`, or `runs` in this folder."""
    return Path(os.environ.get("AIR_HPC_RUNS_DIR") or DEFAULT_RUNS_DIR).absolute()


def find_run(runs_dir: Path, name: str) -> RunDir:
    """The one run that `name` means.

    Raises:
        BadInput: no run fits, or several do; the text lists them.
    """
    if _is_path(name):
        return open_run_dir(Path(name).expanduser())
    runs = list_runs(runs_dir)
    if name == LATEST:
        return _latest(runs, runs_dir)
    for fitting in _candidates(runs, name):
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise BadInput.single(
                "run",
                name,
                f"fits {len(fitting)} runs",
                allowed=_listed(run.run_id for run in fitting),
                hint="Give more of the id",
            )
    raise BadInput.single(
        "run",
        name,
        f"no such run in {runs_dir}",
        allowed=_listed(run.run_id for run in reversed(runs)) or "there are no runs here",
        hint=nearest(name, [run.run_id for run in runs])
        or "Name another folder of runs with --runs-dir",
    )


def find_runs(runs_dir: Path, names: Sequence[str]) -> list[RunDir]:
    """The runs that `names` mean, each once, in their order; for no name every run of the folder,
    the newest last.

    Raises BadInput with a problem for each name that means no run.
    """
    if not names:
        return sorted(list_runs(runs_dir), key=lambda run: (_made(run), run.run_id))
    found: dict[Path, RunDir] = {}
    problems: list[Problem] = []
    for name in names:
        try:
            run = find_run(runs_dir, name)
            found.setdefault(run.path, run)
        except BadInput as error:
            problems += error.problems
    raise_if_any(problems)
    return list(found.values())


def runs_of_sweep(runs_dir: Path, sweep: str) -> list[RunDir]:
    """The runs submitted under one sweep, by its id, a piece that only one has, or `latest`.

    Raises BadInput when no sweep or several have it.
    """
    members: dict[str, list[RunDir]] = {}
    for run in list_runs(runs_dir):
        label = sweep_of(run)
        if label is not None:
            members.setdefault(label, []).append(run)
    if sweep == LATEST and members:
        every = [run for runs in members.values() for run in runs]
        return members[sweep_of(_latest(every, runs_dir)) or ""]
    if sweep in members:
        return members[sweep]
    fitting = [label for label in members if sweep in label]
    if len(fitting) == 1:
        return members[fitting[0]]
    raise BadInput.single(
        "--all-of",
        sweep,
        f"fits {len(fitting)} sweeps" if fitting else f"no such sweep in {runs_dir}",
        allowed=_listed(fitting or members) or "there are no sweeps here",
    )


def sweep_of(run: RunDir) -> str | None:
    """The id of the submission that the run came from, where it names one."""
    folder = submission_folder(run)
    return None if folder is None else folder.name


def _is_path(name: str) -> bool:
    return "/" in name or name.startswith(("~", ".")) or (Path(name) / "run.yaml").is_file()


def _latest(runs: Sequence[RunDir], runs_dir: Path) -> RunDir:
    if not runs:
        raise BadInput.single("run", LATEST, f"there are no runs in {runs_dir}")
    return max(runs, key=lambda run: (_made(run), run.run_id))


def _made(run: RunDir) -> float:
    """When the run was made: run.yaml is written once."""
    try:
        return run.run_yaml.stat().st_mtime
    except OSError:
        return 0.0


def _candidates(runs: Sequence[RunDir], name: str) -> Iterable[list[RunDir]]:
    """Lists of runs that fit, the strictest reading first; a job id is looked up last."""
    yield [run for run in runs if run.run_id == name]
    if name.replace("_", "", 1).isdecimal():
        by_job = [run for run in runs if name in jobs_of(read_ledger(run).events).ids]
        yield by_job
        yield [run for run in runs if name in jobs_of(read_ledger(run).events).array_ids]
    yield [run for run in runs if run.run_id.startswith(name)]
    yield [run for run in runs if name in run.run_id]


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more
