"""Where things are in a run directory, and in the folder that holds all runs of a user."""

from __future__ import annotations

import grp
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from air_hpc.errors import BadInput, EnvironmentFailure, Problem
from air_hpc.rundir.atomic import write_file

SHARED_DIR = ".air_hpc"
"""Inside the runs folder: what all runs of a user share (code, calibrations, submissions)."""

_UNCHANGED = -1
"""chown(2): leave the owner or the group as it is."""

_FOLDERS = ("submit", "tokens", "ledger", "checkpoints", "attempts", "attempts/intents", "metrics")


@dataclass(frozen=True)
class RunDir:
    """The directory of one run. Methods give paths; they create nothing."""

    path: Path

    @property
    def run_id(self) -> str:
        """The run's id is its directory's name."""
        return self.path.name

    @property
    def runs_dir(self) -> Path:
        """The folder that holds all runs of the user."""
        return self.path.parent

    @property
    def shared_dir(self) -> Path:
        """What all runs of the user share."""
        return self.runs_dir / SHARED_DIR

    @property
    def run_yaml(self) -> Path:
        """The frozen RunSpec and Plan."""
        return self.path / "run.yaml"

    @property
    def code_dir(self) -> Path:
        """The code snapshot (a link into the shared, content-addressed store); may be absent."""
        return self.path / "code"

    @property
    def submit_dir(self) -> Path:
        """The exact script, sbatch's answer, the idempotency key, the channel's key."""
        return self.path / "submit"

    @property
    def channel_key(self) -> Path:
        """The secret that agents of this run sign their messages with (mode 0600)."""
        return self.submit_dir / "channel.key"

    @property
    def tokens_dir(self) -> Path:
        """One directory for each claimed token."""
        return self.path / "tokens"

    @property
    def ledger_dir(self) -> Path:
        """One file of events for each process that writes some."""
        return self.path / "ledger"

    @property
    def checkpoints_dir(self) -> Path:
        """Committed checkpoints, `step-<n>`."""
        return self.path / "checkpoints"

    @property
    def metrics_dir(self) -> Path:
        """The spool, one file a token."""
        return self.path / "metrics"

    @property
    def attempts_dir(self) -> Path:
        """Logs, stacks and placement of each attempt and generation."""
        return self.path / "attempts"

    @property
    def intents_dir(self) -> Path:
        """What the agent asks the batch script to do, one file for each start by Slurm."""
        return self.attempts_dir / "intents"

    def generation_dir(self, attempt: int, generation: int) -> Path:
        """Logs and placement of one generation."""
        return self.attempts_dir / str(attempt) / str(generation)

    def intent_file(self, job_id: str, restart_count: int) -> Path:
        """The intent for one start of a job by Slurm."""
        return self.intents_dir / f"{job_id}.{restart_count}"


def runs_dir_problems(runs_dir: Path) -> list[Problem]:
    """What would keep runs from being made in this folder; looks, and makes nothing.

    A folder that does not exist yet is judged by the nearest one above it that does.
    """
    path = runs_dir.absolute()
    for place in (path / SHARED_DIR, path, *path.parents):
        try:
            usable = place.is_dir()
            exists = usable or place.exists()
        except OSError as error:
            return [_runs_dir_problem(runs_dir, f"{place}: {error.strerror}")]
        if not exists:
            continue
        if not usable:
            return [_runs_dir_problem(runs_dir, f"{place} is no folder")]
        if not os.access(place, os.W_OK | os.X_OK):
            return [_runs_dir_problem(runs_dir, f"{place} cannot be written")]
        if place == path / SHARED_DIR:
            continue
        return []
    return []


def _runs_dir_problem(runs_dir: Path, why: str) -> Problem:
    return Problem(
        "runs_dir", str(runs_dir), why, "a folder that you can write and that compute nodes share"
    )


def make_shared_dir(runs_dir: Path) -> None:
    """Make the folder that a user's runs share, mode 0700, and those above it; raises OSError."""
    runs_dir.mkdir(parents=True, exist_ok=True)
    (runs_dir / SHARED_DIR).mkdir(mode=0o700, exist_ok=True)


def create_run_dir(runs_dir: Path, run_id: str, *, group: str | None = None) -> RunDir:
    """Make the skeleton of a run, mode 0700 (2770 when shared with a group by intent).

    The modes hold whatever the umask is. Nothing is made when the group does not exist.

    Raises:
        BadInput: the id is taken, or the group does not exist.
        EnvironmentFailure: the runs folder cannot be written.
    """
    run = RunDir(runs_dir.absolute() / run_id)
    mode = 0o700 if group is None else 0o2770
    try:
        group_id = _UNCHANGED if group is None else grp.getgrnam(group).gr_gid
    except LookupError:
        raise BadInput.single("launch.share_group", group, "no such group") from None
    try:
        make_shared_dir(run.runs_dir)
        try:
            run.path.mkdir(mode=mode)
        except FileExistsError:
            raise BadInput.single("run id", run_id, f"exists already in {runs_dir}") from None
        for name in ("", *_FOLDERS):
            folder = run.path / name
            folder.mkdir(mode=mode, exist_ok=True)
            os.chown(folder, _UNCHANGED, group_id)
            os.chmod(folder, mode)
        write_file(run.channel_key, secrets.token_bytes(32))
    except OSError as error:
        raise EnvironmentFailure(
            f"cannot make the run directory {run.path}: {error.strerror}",
            tried=f"mkdir {run.path}",
            next_step="set runs_dir to a folder that you can write and that compute nodes share",
        ) from None
    return run


def open_run_dir(path: Path) -> RunDir:
    """The run at `path`; raises BadInput when it is not a run directory."""
    run = RunDir(path.absolute())
    if not run.run_yaml.is_file():
        raise BadInput.single("run", path, "is not a run directory (no run.yaml)")
    return run


def list_runs(runs_dir: Path) -> list[RunDir]:
    """Every run below a runs folder, oldest name first (ids begin with model and date)."""
    if not runs_dir.is_dir():
        return []
    return [RunDir(path.parent.absolute()) for path in sorted(runs_dir.glob("[!.]*/run.yaml"))]
