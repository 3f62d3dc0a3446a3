"""The code snapshot: what the user's work tree was at submit, kept beside the runs.

A queued job may start days later; what it runs must be what was there when it was submitted. The
tracked and the untracked (not ignored) files of the git work tree around the working directory are
copied into `<runs_dir>/.air_hpc/code/<digest>/tree`, with the diff against HEAD and the versions of
the installed packages. The digest covers all of that, so runs that share it share one copy. It is
written aside and renamed: a digest that exists is whole. The runs folder itself is never copied.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from air_hpc.errors import EnvironmentFailure, Problem
from air_hpc.launch import bulk
from air_hpc.rundir.atomic import ASIDE_PREFIX, fsync_dir

SCHEMA_VERSION = 1
_NAMED = 5
"""How many of the largest files a problem names."""

_PLAIN_DIFF = ("--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")
"""A patch that `git apply` takes, whatever the user's config of git says."""


@dataclass(frozen=True)
class WorkTree:
    """What git says of a work tree: its files (relative, sorted), and where it stands.

    `submodules` are the repositories inside it, added as submodules or not; `outward` the relative
    links that lead out of it, and nowhere from a copy.
    """

    root: Path
    files: tuple[str, ...]
    submodules: tuple[str, ...]
    outward: tuple[str, ...]
    commit: str | None
    branch: str | None
    dirty: bool
    size_bytes: int


@dataclass(frozen=True)
class CodeSnapshot:
    """A stored snapshot; `tree` is what a run's `code` links to."""

    digest: str
    tree: Path
    commit: str | None
    dirty: bool


def inspect(cwd: Path, *, exclude: Path, max_bytes: int) -> tuple[WorkTree | None, list[Problem]]:
    """The work tree around `cwd`, without what lies in `exclude`, and what is wrong with it.

    None where there is none (a warning says so). Reads names and sizes only.
    """
    try:
        root = Path(_git(cwd, "rev-parse", "--show-toplevel").rstrip("\n"))
        listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        staged = _git(root, "ls-files", "-z", "--stage")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "-z")
    except _GitFailed as failure:
        why = "" if "not a git repository" in str(failure) else f" ({failure})"
        problem = Problem(
            "code.snapshot",
            "repository",
            f"{cwd} is in no git work tree that could be copied{why}",
            hint="A queued job will run the files as they are when it starts",
            warning=True,
        )
        return None, [problem]
    names = _not_below(root, listed.split("\0"), exclude)
    added = {
        entry.partition("\t")[2] for entry in staged.split("\0") if entry.startswith("160000 ")
    }
    # A repository that is not a submodule is listed as a folder.
    submodules = added | {name.rstrip("/") for name in names if name.endswith("/")}
    sizes = _sizes(root, [name for name in names if name.rstrip("/") not in submodules])
    tree = WorkTree(
        root=root,
        files=tuple(sizes),
        submodules=tuple(sorted(submodules)),
        outward=tuple(name for name in sizes if _leads_out(root, name)),
        commit=_git_or_none(root, "rev-parse", "HEAD"),
        branch=_git_or_none(root, "symbolic-ref", "--short", "-q", "HEAD"),
        dirty=bool(changed),
        size_bytes=sum(sizes.values()),
    )
    return tree, _tree_problems(tree, sizes, max_bytes)


def store(tree: WorkTree, folder: Path) -> CodeSnapshot:
    """Copy the tree into `folder`, unless the same is there; raises EnvironmentFailure."""
    packages = installed_packages()
    diff = _git_or_none(tree.root, "diff", "--binary", *_PLAIN_DIFF, "HEAD") or ""
    facts: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "commit": tree.commit,
        "branch": tree.branch,
        "dirty": tree.dirty,
        "submodules": list(tree.submodules),
        "python": sys.version.split()[0],
        "packages": packages,
    }
    try:
        digest = _digest(facts, _file_digests(tree.root, tree.files))
        if not (folder / digest / "tree").is_dir():
            digest = _copy(tree, folder, facts, diff)
    except OSError as error:
        raise EnvironmentFailure(
            f"cannot copy the code: {error.strerror}: {error.filename or folder}",
            tried=f"copy {tree.root} into {folder}",
            next_step="free space or inodes there, or set code.snapshot=none",
        ) from None
    return CodeSnapshot(digest, folder / digest / "tree", tree.commit, tree.dirty)


def link(snapshot: CodeSnapshot, code_dir: Path) -> None:
    """Make a run's `code` a relative link to the snapshot's tree."""
    code_dir.symlink_to(os.path.relpath(snapshot.tree, code_dir.parent))


def installed_packages() -> dict[str, str]:
    """Name and version of every installed distribution, by name; of two, the one imported."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(name, distribution.version)
    return dict(sorted(found.items()))


def _copy(tree: WorkTree, folder: Path, facts: Mapping[str, object], diff: str) -> str:
    """Copy aside, and name the copy by what was really copied: a file may change meanwhile."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside = folder / f"{ASIDE_PREFIX}{secrets.token_hex(6)}"
    target = aside / "tree"
    aside.mkdir(mode=0o700)
    target.mkdir(mode=0o700)
    try:
        for name in tree.files:
            destination = target / name
            destination.parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copy2(tree.root / name, destination, follow_symlinks=False)
            except FileNotFoundError:
                continue
        (aside / "code.json").write_text(json.dumps(facts, indent=1) + "\n")
        (aside / "diff.patch").write_bytes(diff.encode("utf-8", "surrogateescape"))
        digest = _digest(facts, _file_digests(target, tree.files))
        # Every byte before the name: a digest that exists is whole, also after a power cut.
        bulk.flush(aside)
        try:
            os.rename(aside, folder / digest)
            fsync_dir(folder)
        except OSError:
            # Another submission was first with the same tree.
            if not (folder / digest / "tree").is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return digest


def _digest(facts: Mapping[str, object], files: Iterable[tuple[str, str]]) -> str:
    whole = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, digest in files:
        whole.update(f"{name}\0{digest}\0".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def _file_digests(root: Path, files: Iterable[str]) -> Iterable[tuple[str, str]]:
    for name in files:
        path = root / name
        try:
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                yield name, "link:" + os.readlink(path)
            else:
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                yield name, f"{bool(mode & 0o100)}:{content}"
        except FileNotFoundError:
            continue


def _not_below(root: Path, names: Iterable[str], exclude: Path) -> list[str]:
    """The names, sorted and each once, without what lies in `exclude`."""
    kept = sorted(set(filter(None, names)))
    resolved = exclude.resolve()
    if not resolved.is_relative_to(root.resolve()):
        return kept
    inside = f"{resolved.relative_to(root.resolve())}/"
    return [name for name in kept if inside != "./" and not name.startswith(inside)]


def _sizes(root: Path, names: Iterable[str]) -> dict[str, int]:
    """The size of each file that is really there."""
    sizes = {}
    for name in names:
        try:
            status = (root / name).lstat()
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            sizes[name] = status.st_size
    return sizes


def _leads_out(root: Path, name: str) -> bool:
    """Whether the file is a relative link to what lies outside of the work tree."""
    try:
        target = os.readlink(root / name)
    except OSError:
        return False
    reached = os.path.normpath(os.path.join(os.path.dirname(name), target))
    return not os.path.isabs(target) and reached.partition("/")[0] == ".."


def _tree_problems(tree: WorkTree, sizes: dict[str, int], max_bytes: int) -> list[Problem]:
    found = []
    if tree.size_bytes > max_bytes:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:_NAMED]
        named = ", ".join(f"{name} ({sizes[name]} bytes)" for name in largest)
        found.append(
            Problem(
                "code.max_bytes",
                str(max_bytes),
                f"the work tree {tree.root} has {tree.size_bytes} bytes to copy; largest: {named}",
                hint="Ignore what is not code (.gitignore), raise it, or set code.snapshot=none",
            )
        )
    if tree.submodules:
        found.append(
            Problem(
                "code.snapshot",
                "repository",
                f"repositories inside it are not copied: {', '.join(tree.submodules)}",
                hint="Install them, if the run imports them",
                warning=True,
            )
        )
    if tree.outward:
        more = f" and {len(tree.outward) - _NAMED} more" if len(tree.outward) > _NAMED else ""
        found.append(
            Problem(
                "code.snapshot",
                "repository",
                "links that lead out of the work tree lead nowhere from the copy: "
                f"{', '.join(tree.outward[:_NAMED])}{more}",
                hint="Make them absolute, if the run follows them",
                warning=True,
            )
        )
    return found


class _GitFailed(Exception):
    """git is missing, or said that this is no work tree of the user's."""


def _git(cwd: Path, *arguments: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-c", "core.quotePath=false", *arguments],
            cwd=cwd,
            env={**environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
        )
    except OSError as error:
        raise _GitFailed(f"git: {error.strerror}") from None
    if done.returncode != 0:
        raise _GitFailed(" ".join(done.stderr.split())[:200] or f"git {arguments[0]} failed")
    return done.stdout


def _git_or_none(cwd: Path, *arguments: str) -> str | None:
    try:
        answer = _git(cwd, *arguments)
    except _GitFailed:
        return None
    return answer.rstrip("\n") if arguments[0] != "diff" else answer
