"""The commit protocol of checkpoints: saved aside, committed by one rename, verified.

A save goes through these steps, and a crash after any of them leaves the newest committed
checkpoint as it was or commits the new one whole:

1. rank 0 makes `checkpoints/.saving-step-<n>.<token>` and tells the others;
2. every rank writes its shards there, fsyncs them, and takes their sizes and SHA-256;
3. rank 0 gathers those, writes `manifest.json` and `COMMITTED` (which holds the manifest's digest
   and the token), and makes files and names durable;
4. it looks whether its token is still the newest, and renames the directory to `step-<n>`.

So a directory `step-<n>` is committed from its first instant. Whether it *counts* is decided on
reading: its COMMITTED must match its manifest, and its token must be the newest generation's, or
stand in the list that the newest generation inherited (`fence`): a late rename by a writer that
was given up counts for nothing. A checkpoint that fails to verify, or whose load crashed, is marked
BAD and is never chosen again; it is kept as evidence until retention takes it.

Step `n` means: the state after n optimizer steps.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from air_hpc.errors import AirHpcError
from air_hpc.rundir.atomic import (
    ASIDE_PREFIX,
    fsync_dir,
    make_dir,
    remove_tree,
    take_aside,
    write_atomic,
    write_file,
)
from air_hpc.rundir.fence import Fenced, Token, newest_inherited, newest_token, require_newest
from air_hpc.rundir.layout import RunDir

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"
BAD = "BAD"
_STEP = re.compile(r"step-(\d+)")
SAVING_NAME = re.compile(r"\.saving-step-(\d+)\.(\d+\.\d+)")


class CheckpointInvalid(AirHpcError):
    """A checkpoint directory that is not what its manifest says; the text says why."""


@dataclass(frozen=True)
class FileRecord:
    """What a file of a checkpoint must be."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint as its manifest describes it."""

    path: Path
    step: int
    token: Token
    files: Mapping[str, FileRecord]
    manifest_sha256: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """The size of all files together."""
        return sum(record.size_bytes for record in self.files.values())


class CheckpointUnreadable(CheckpointInvalid):
    """The file system did not give it now (EIO, ESTALE): nothing is known against it."""


def _invalid(path: Path, error: OSError) -> CheckpointInvalid:
    """What a failed look at a checkpoint says of it: only a name that is not there tells much."""
    absent = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
    kind = CheckpointInvalid if absent else CheckpointUnreadable
    return kind(f"{path.name}: {error.strerror}: {error.filename}")


def digest_file(path: Path) -> FileRecord:
    """Size and SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        sha = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(file.tell(), sha)


def checkpoint_path(run: RunDir, step: int) -> Path:
    """Where the checkpoint of a step is once it is committed."""
    return run.checkpoints_dir / f"step-{step}"


def begin_save(run: RunDir, token: Token, step: int) -> Path:
    """Make the folder that the shards of a step are written to; an unfinished one is replaced."""
    path = run.checkpoints_dir / f".saving-step-{step}.{token}"
    if path.exists():
        remove_tree(path)
    make_dir(path)
    return path


def abort_save(path: Path) -> None:
    """Remove what a failed save left (as much of it as the file system lets go).

    Raises nothing: what stays is swept by the next generation.
    """
    with contextlib.suppress(OSError):
        remove_tree(path)


def commit_save(
    run: RunDir,
    token: Token,
    step: int,
    files: Mapping[str, FileRecord],
    facts: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Commit what all ranks wrote for `step`; `files` has every file of the folder.

    Where a usable checkpoint of the step stands already it is kept and returned.

    Raises:
        Fenced: a newer generation owns the run; nothing was committed.
        CheckpointInvalid: a file is missing, has another size or is not in `files`.
        OSError: the file system refused (full, quota, stale); nothing was committed, unless it was
            the very last fsync that failed: then the checkpoint stands, and is found on reading.
    """
    saving = run.checkpoints_dir / f".saving-step-{step}.{token}"
    _require_files(saving, files)
    manifest = _render_manifest(step, token, files, facts or {})
    sha = hashlib.sha256(manifest).hexdigest()
    for name in (MANIFEST, COMMITTED):
        (saving / name).unlink(missing_ok=True)
    write_file(saving / MANIFEST, manifest)
    write_file(saving / COMMITTED, json.dumps({"token": str(token), "manifest": sha}).encode())
    for folder in _folders(files):
        fsync_dir(saving / folder)
    require_newest(run, token)
    target = checkpoint_path(run, step)
    standing = _rename_into_place(run, token, saving, target)
    fsync_dir(run.checkpoints_dir)
    if standing is not None:
        return standing
    return Checkpoint(target, step, token, dict(files), sha, dict(facts or {}))


def _rename_into_place(run: RunDir, token: Token, saving: Path, target: Path) -> Checkpoint | None:
    """Rename; returns the usable checkpoint that stands there already, if one does.

    One that cannot be used (bad, or a fenced writer's) is moved out of the way first, unless it
    carries a newer token than ours.
    """
    for _ in range(3):  # a fenced writer's late rename may take the name once more
        try:
            os.rename(saving, target)
            return None
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        with contextlib.suppress(CheckpointInvalid):
            standing = read_checkpoint(target)
            if standing.token > token:
                raise Fenced(f"{target.name} was committed by the newer token {standing.token}")
            if not is_bad(target) and counts(run, standing):
                verify_sizes(standing)
                remove_tree(saving)
                return standing
        require_newest(run, token)
        remove_unless_newer(target, token)
    raise OSError(errno.ENOTEMPTY, "cannot replace", str(target))


def remove_unless_newer(path: Path, token: Token) -> None:
    """Remove a checkpoint; raises Fenced, and puts it back, when a newer token committed it.

    Whoever judged the folder may have been stopped for minutes since; what stands there now can be
    a newer generation's. So what was taken away is looked at once more before it is destroyed.
    """
    aside = take_aside(path)
    if aside is None:
        return
    with contextlib.suppress(CheckpointInvalid):
        owner = read_checkpoint(aside).token
        if owner > token:
            os.rename(aside, path)
            fsync_dir(path.parent)
            raise Fenced(f"{path.name} was committed by the newer token {owner}")
    shutil.rmtree(aside, ignore_errors=True)


def _folders(files: Iterable[str]) -> list[PurePosixPath]:
    """Every folder that `files` lie in, the innermost first, `.` last."""
    folders = {PurePosixPath(".")}.union(*(PurePosixPath(name).parents for name in files))
    return sorted(folders, key=lambda folder: (-len(folder.parts), folder))


def _render_manifest(
    step: int, token: Token, files: Mapping[str, FileRecord], facts: Mapping[str, Any]
) -> bytes:
    body = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "token": str(token),
        "files": {
            name: {"size_bytes": record.size_bytes, "sha256": record.sha256}
            for name, record in sorted(files.items())
        },
        "facts": dict(facts),
    }
    return json.dumps(body, indent=1).encode()


def _payload_files(folder: Path) -> dict[str, int]:
    """Every file below a checkpoint folder but the protocol's own, with its size in bytes."""
    found = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if name in (MANIFEST, COMMITTED, BAD) or path.name.startswith(ASIDE_PREFIX):
            continue
        if path.is_file():
            found[name] = path.stat().st_size
    return found


def _require_files(folder: Path, files: Mapping[str, FileRecord]) -> None:
    present = _payload_files(folder)
    for name, record in files.items():
        size = present.pop(name, None)
        if size is None:
            raise CheckpointInvalid(f"{folder.name}: {name} is missing")
        if size != record.size_bytes:
            raise CheckpointInvalid(
                f"{folder.name}: {name} has {size} bytes, its writer reported {record.size_bytes}"
            )
    if present:
        raise CheckpointInvalid(f"{folder.name}: nobody reported {', '.join(sorted(present))}")


def read_checkpoint(path: Path) -> Checkpoint:
    """Read COMMITTED and manifest of a checkpoint; raises CheckpointInvalid with the reason, and
    its subclass CheckpointUnreadable where another look may find it whole."""
    try:
        manifest = (path / MANIFEST).read_bytes()
        mark = json.loads((path / COMMITTED).read_bytes())
        sha = hashlib.sha256(manifest).hexdigest()
        if mark["manifest"] != sha:
            raise CheckpointInvalid(f"{path.name}: the manifest is not the committed one")
        body = json.loads(manifest)
        if body["schema_version"] > SCHEMA_VERSION:
            raise CheckpointInvalid(
                f"{path.name}: written by a newer version (schema {body['schema_version']})"
            )
        files = {
            str(name): FileRecord(int(record["size_bytes"]), str(record["sha256"]))
            for name, record in body["files"].items()
        }
        token = Token.parse(body["token"])
        return Checkpoint(path, int(body["step"]), token, files, sha, body.get("facts", {}))
    except OSError as error:
        raise _invalid(path, error) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointInvalid(f"{path.name}: unreadable manifest ({error})") from None


def verify_sizes(checkpoint: Checkpoint) -> None:
    """Compare names and sizes with the manifest; raises as `read_checkpoint`. Reads no shard."""
    try:
        _require_files(checkpoint.path, checkpoint.files)
    except OSError as error:
        raise _invalid(checkpoint.path, error) from None


def verify_file(checkpoint: Checkpoint, name: str) -> None:
    """Compare the digest of one file with the manifest; raises as `read_checkpoint`."""
    expected = checkpoint.files[name]
    try:
        actual = digest_file(checkpoint.path / name)
    except OSError as error:
        raise _invalid(checkpoint.path, error) from None
    if actual != expected:
        raise CheckpointInvalid(
            f"{checkpoint.path.name}: {name} does not match its digest "
            f"({actual.size_bytes} bytes, sha256 {actual.sha256[:12]}; "
            f"the manifest says {expected.size_bytes} bytes, {expected.sha256[:12]})"
        )


def verify_fully(
    checkpoint: Checkpoint, progress: Callable[[int], None] = lambda done: None
) -> None:
    """Names, sizes and every digest; raises CheckpointInvalid at the first that differs.

    `progress` is told the bytes compared so far, before the first file and after each.
    """
    verify_sizes(checkpoint)
    done = 0
    progress(done)
    for name in sorted(checkpoint.files):
        verify_file(checkpoint, name)
        done += checkpoint.files[name].size_bytes
        progress(done)


def mark_bad(run: RunDir, step: int, reason: str, *, token: Token | None = None) -> None:
    """Never choose this checkpoint again. Keeps its files as evidence.

    A generation gives its `token`: the mark of a fenced one is void on a newer one's checkpoint,
    which may have taken the place of the one it judged. A person's mark (no token) always holds.
    """
    path = checkpoint_path(run, step)
    mark = {"token": None if token is None else str(token), "reason": reason}
    with contextlib.suppress(FileNotFoundError):
        write_atomic(path / BAD, json.dumps(mark).encode())


def is_bad(path: Path) -> bool:
    """Whether a checkpoint folder carries a mark that holds; raises CheckpointUnreadable."""
    try:
        mark = json.loads((path / BAD).read_bytes())
        return not Token.parse(mark["token"]) < read_checkpoint(path).token
    except FileNotFoundError:
        return False
    except CheckpointUnreadable:
        raise
    except OSError as error:
        raise _invalid(path, error) from None
    except (ValueError, KeyError, TypeError, CheckpointInvalid):
        return True


@dataclass(frozen=True)
class Candidates:
    """What a start can resume from, newest first, and why newer ones were passed over."""

    usable: tuple[Checkpoint, ...]
    rejected: tuple[tuple[int, str], ...] = ()
    unreadable: tuple[tuple[int, str], ...] = ()


def find_candidates(run: RunDir) -> Candidates:
    """Committed checkpoints that count, with the right names and sizes, newest first.

    `rejected` has (step, reason) for those that fail to verify; marking them is the caller's.
    `unreadable` has those that the file system did not give now: they may be whole.
    """
    usable: list[Checkpoint] = []
    rejected: list[tuple[int, str]] = []
    unreadable: list[tuple[int, str]] = []
    for step, path in sorted(step_dirs(run), reverse=True):
        try:
            if is_bad(path):
                continue
            checkpoint = read_checkpoint(path)
            if not counts(run, checkpoint):
                continue
            if checkpoint.step != step:
                raise CheckpointInvalid(f"{path.name}: its manifest is of step {checkpoint.step}")
            verify_sizes(checkpoint)
            usable.append(checkpoint)
        except CheckpointUnreadable as error:
            unreadable.append((step, str(error)))
        except CheckpointInvalid as error:
            rejected.append((step, str(error)))
    return Candidates(tuple(usable), tuple(rejected), tuple(unreadable))


def committed_steps(run: RunDir) -> list[int]:
    """Steps of the checkpoints that can be resumed from, newest first."""
    return [checkpoint.step for checkpoint in find_candidates(run).usable]


def step_dirs(run: RunDir) -> list[tuple[int, Path]]:
    """Every directory that is named as a checkpoint, with its step, in no order."""
    found = []
    for path in run.checkpoints_dir.iterdir():
        match = _STEP.fullmatch(path.name)
        if match:
            found.append((int(match[1]), path))
    return found


def counts(run: RunDir, checkpoint: Checkpoint) -> bool:
    """Whether the token of a checkpoint was the newest when it was committed (see `fence`)."""
    inherited = newest_inherited(run)
    if inherited is None:
        return checkpoint.token == newest_token(run)
    if checkpoint.token >= inherited.token:
        return True
    return inherited.checkpoints.get(checkpoint.step) == checkpoint.manifest_sha256


def inheritable(candidates: Iterable[Checkpoint]) -> dict[int, str]:
    """What a new generation writes down as accepted: {step: digest of the manifest}."""
    return {checkpoint.step: checkpoint.manifest_sha256 for checkpoint in candidates}
