"""The record of one submission: what is to be asked of the scheduler, and what it answered.

`<runs_dir>/.air_hpc/submissions/<id>/submission.json` is written whole at each change of state, so
a submitter that is killed between any two instructions leaves a record from which a retry knows
what was done:

    preparing   run directories are being made; nothing can have been submitted
    ready       every file that a job needs is there
    each ask:   planned -> asked -> answered, or refused

`asked` is written before sbatch is called. An ask found in that state may or may not have reached
the scheduler, and is looked up by its job name before it is made again.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from air_hpc.errors import BadInput, EnvironmentFailure
from air_hpc.rundir.atomic import write_atomic
from air_hpc.rundir.layout import SHARED_DIR, make_shared_dir
from air_hpc.runs.process import ProcessIdentity

SCHEMA_VERSION = 1


class AskState(StrEnum):
    """How far one call of sbatch has come."""

    PLANNED = "planned"
    ASKED = "asked"
    ANSWERED = "answered"
    REFUSED = "refused"


@dataclass(frozen=True)
class Ask:
    """One call of sbatch: a chunk's script, under a job name of its own.

    `link` counts the dependent jobs of a chain from 0. `job_id` and `answer` are sbatch's.
    """

    chunk: int
    link: int
    name: str
    state: AskState = AskState.PLANNED
    job_id: str | None = None
    answer: str = ""


@dataclass(frozen=True)
class Chunk:
    """One script and the runs it starts: the i-th run is array index i.

    `array` is false for a single run, which is a plain job.
    """

    script: str
    runs: tuple[str, ...]
    array: bool


@dataclass(frozen=True)
class Submission:
    """The whole record. `fingerprint` is of the tasks, so that an id is not used for others."""

    id: str
    runs_dir: str
    kind: str
    fingerprint: str
    timeout_s: float
    state: str = "preparing"
    run_ids: tuple[str, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    asks: tuple[Ask, ...] = ()

    @property
    def folder(self) -> Path:
        """Where the record, the scripts of arrays, their indexes and their logs lie."""
        return submission_dir(Path(self.runs_dir), self.id)

    @property
    def complete(self) -> bool:
        """Whether every ask has its answer."""
        return self.state == "ready" and all(a.state == AskState.ANSWERED for a in self.asks)

    @property
    def resume(self) -> str:
        """The words that finish it, from any folder."""
        return f"run --resume {self.id} --runs-dir {shlex.quote(self.runs_dir)}"

    def with_ask(self, index: int, **changes: Any) -> Submission:
        """The record with one ask changed."""
        asks = list(self.asks)
        asks[index] = replace(asks[index], **changes)
        return replace(self, asks=tuple(asks))


def submission_dir(runs_dir: Path, submission_id: str) -> Path:
    """The folder of one submission."""
    return runs_dir / SHARED_DIR / "submissions" / submission_id


def save(submission: Submission) -> None:
    """Write the record; durable when this returns. Raises EnvironmentFailure."""
    body = {"schema_version": SCHEMA_VERSION, **asdict(submission)}
    try:
        make_shared_dir(Path(submission.runs_dir))
        submission.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(submission.folder / "submission.json", json.dumps(body, indent=1).encode())
    except OSError as error:
        raise EnvironmentFailure(
            f"cannot write the submission's record: {error.strerror}",
            tried=f"write {submission.folder}/submission.json",
            next_step="check space, inodes and permissions of runs_dir",
        ) from None


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Work on a submission as the only process of this machine; one that was killed holds nothing.

    Raises EnvironmentFailure while another process works on it: a `--resume` beside a submission
    that is still being made would remove its run directories, or submit it twice.
    """
    path = folder / "submitter.json"
    other = _process_in(path)
    if other is not None and other.pid != os.getpid() and other.alive():
        raise EnvironmentFailure(
            f"{folder.name} is being submitted at this moment, by process {other.pid}",
            next_step="wait until that has ended, or end it; then repeat this command",
        )
    try:
        write_atomic(path, json.dumps(ProcessIdentity.of().to_facts()).encode())
    except OSError as error:
        raise EnvironmentFailure(
            f"cannot write the submission's record: {error.strerror}",
            tried=f"write {path}",
            next_step="check space, inodes and permissions of runs_dir",
        ) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _process_in(path: Path) -> ProcessIdentity | None:
    try:
        return ProcessIdentity.from_facts(json.loads(path.read_bytes()))
    except (OSError, ValueError, AttributeError):
        return None


def load(folder: Path) -> Submission | None:
    """The record in a submission's folder, or None where there is none.

    Raises BadInput for one that this version cannot read.
    """
    path = folder / "submission.json"
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        raise BadInput.single("submission", path, "is no submission's record") from None
    if body.get("schema_version") != SCHEMA_VERSION:
        raise BadInput.single(
            "submission",
            path,
            f"has schema version {body.get('schema_version')}",
            allowed=str(SCHEMA_VERSION),
            hint="Use the version of air_hpc that wrote it",
        )
    return _from_plain(body)


def _from_plain(body: Mapping[str, Any]) -> Submission:
    return Submission(
        id=body["id"],
        runs_dir=body["runs_dir"],
        kind=body["kind"],
        fingerprint=body["fingerprint"],
        timeout_s=body["timeout_s"],
        state=body["state"],
        run_ids=tuple(body["run_ids"]),
        chunks=tuple(Chunk(c["script"], tuple(c["runs"]), c["array"]) for c in body["chunks"]),
        asks=tuple(
            Ask(a["chunk"], a["link"], a["name"], AskState(a["state"]), a["job_id"], a["answer"])
            for a in body["asks"]
        ),
    )
