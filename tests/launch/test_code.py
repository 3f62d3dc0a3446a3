import json
import os
import subprocess
from pathlib import Path

import pytest

from air_hpc.errors import Problem
from air_hpc.launch import code

LIMIT = 1024 * 1024


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repo sitory"
    root.mkdir()
    git(root, "init", "-q")
    git(root, "config", "user.email", "a@b")
    git(root, "config", "user.name", "a")
    (root / "pack age").mkdir()
    (root / "train.py").write_text("x = 1\n")
    (root / "pack age" / "mod ü.py").write_text("y = 1\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("train.py")
    (root / ".gitignore").write_text("*.bin\n/secret/\n")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


def git(root: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=root, check=True, capture_output=True)


def taken(root: Path, folder: Path, **options: object) -> tuple[code.CodeSnapshot, list[Problem]]:
    exclude = folder.parent
    tree, problems = code.inspect(root, exclude=exclude, max_bytes=LIMIT, **options)
    assert tree is not None
    return code.store(tree, folder), problems


def files(tree: Path) -> set[str]:
    return {str(p.relative_to(tree)) for p in tree.rglob("*") if not p.is_dir() or p.is_symlink()}


def test_tracked_and_untracked_files_are_copied_and_ignored_ones_are_not(
    repository: Path, tmp_path: Path
) -> None:
    (repository / "new.py").write_text("z = 1\n")
    (repository / "data.bin").write_text("x" * 100)
    (repository / "secret").mkdir()
    (repository / "secret" / "key").write_text("k")
    snapshot, problems = taken(repository, tmp_path / "runs" / "code")
    assert problems == []
    assert files(snapshot.tree) == {
        ".gitignore", "train.py", "pack age/mod ü.py", "run.sh", "link", "new.py",
    }  # fmt: skip
    assert os.readlink(snapshot.tree / "link") == "train.py"
    assert os.access(snapshot.tree / "run.sh", os.X_OK)
    assert not os.access(snapshot.tree / "train.py", os.X_OK)


def test_a_later_edit_does_not_reach_the_snapshot(repository: Path, tmp_path: Path) -> None:
    first, _ = taken(repository, tmp_path / "runs" / "code")
    (repository / "train.py").write_text("x = 2\n")
    (repository / "run.sh").unlink()
    second, _ = taken(repository, tmp_path / "runs" / "code")
    assert (first.tree / "train.py").read_text() == "x = 1\n"
    assert (second.tree / "train.py").read_text() == "x = 2\n"
    assert not (second.tree / "run.sh").exists()
    assert (first.dirty, second.dirty) == (False, True)
    diff = (second.tree.parent / "diff.patch").read_text()
    assert "-x = 1" in diff
    assert "+x = 2" in diff


def test_equal_trees_share_one_copy(repository: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "code"
    first, _ = taken(repository, folder)
    before = (first.tree / "train.py").stat().st_ino
    second, _ = taken(repository / "pack age", folder)
    assert second == first
    assert (second.tree / "train.py").stat().st_ino == before
    assert len(list(folder.iterdir())) == 1
    (repository / "run.sh").chmod(0o644)
    assert taken(repository, folder)[0].digest != first.digest


def test_what_was_there_is_recorded(repository: Path, tmp_path: Path) -> None:
    snapshot, _ = taken(repository, tmp_path / "runs" / "code")
    facts = json.loads((snapshot.tree.parent / "code.json").read_text())
    assert facts["commit"] == snapshot.commit
    assert len(facts["commit"]) == 40
    assert facts["packages"]["submitit"]
    assert (snapshot.tree.parent.stat().st_mode & 0o077) == 0


def test_the_runs_folder_is_never_copied(repository: Path) -> None:
    """Once: runs/ inside an unclean repository put every checkpoint into the next snapshot."""
    runs = repository / "runs"
    (runs / "old").mkdir(parents=True)
    (runs / "old" / "checkpoint").write_text("x" * 100)
    tree, problems = code.inspect(repository, exclude=runs, max_bytes=LIMIT)
    assert tree is not None
    assert problems == []
    assert not any(name.startswith("runs/") for name in tree.files)


def test_too_much_to_copy_names_the_largest_files(repository: Path, tmp_path: Path) -> None:
    (repository / "big.dat").write_bytes(b"0" * (LIMIT + 1))
    _, (problem,) = code.inspect(repository, exclude=tmp_path / "runs", max_bytes=LIMIT)
    assert problem.key == "code.max_bytes"
    assert f"big.dat ({LIMIT + 1} bytes)" in problem.message
    assert not problem.warning


def test_submodules_are_named(repository: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    (other / "a").write_text("a")
    git(other, "add", ".")
    git(other, "-c", "user.email=a@b", "-c", "user.name=a", "commit", "-qm", "x")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(other), "sub")
    tree, (problem,) = code.inspect(repository, exclude=tmp_path / "runs", max_bytes=LIMIT)
    assert tree is not None
    assert tree.submodules == ("sub",)
    assert "sub" in problem.message
    assert problem.warning


def test_no_repository_is_a_warning(tmp_path: Path) -> None:
    tree, (problem,) = code.inspect(tmp_path, exclude=tmp_path / "runs", max_bytes=LIMIT)
    assert tree is None
    assert problem.warning


def test_a_repository_without_a_commit_is_copied(tmp_path: Path) -> None:
    root = tmp_path / "fresh"
    root.mkdir()
    git(root, "init", "-q")
    (root / "a.py").write_text("a")
    snapshot, problems = taken(root, tmp_path / "runs" / "code")
    assert problems == []
    assert snapshot.commit is None
    assert files(snapshot.tree) == {"a.py"}


def test_a_hooks_git_environment_is_not_followed(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "nowhere"))
    tree, problems = code.inspect(repository, exclude=tmp_path / "runs", max_bytes=LIMIT)
    assert tree is not None
    assert problems == []


def test_a_runs_code_is_a_relative_link(repository: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    snapshot, _ = taken(repository, runs / ".air_hpc" / "code")
    (runs / "a-run").mkdir()
    code.link(snapshot, runs / "a-run" / "code")
    moved = tmp_path / "moved"
    runs.rename(moved)
    assert (moved / "a-run" / "code" / "train.py").read_text() == "x = 1\n"
    assert not os.path.isabs(os.readlink(moved / "a-run" / "code"))


def test_a_repository_that_is_no_submodule_is_named_too(repository: Path, tmp_path: Path) -> None:
    """Once a library that was cloned into the work tree was left out without a word."""
    (repository / "cloned").mkdir()
    git(repository / "cloned", "init", "-q")
    (repository / "cloned" / "lib.py").write_text("a")
    tree, (problem,) = code.inspect(repository, exclude=tmp_path / "runs", max_bytes=LIMIT)
    assert tree is not None
    assert tree.submodules == ("cloned",)
    assert "cloned" in problem.message
    assert problem.warning


def test_links_that_break_in_a_copy_are_named(repository: Path, tmp_path: Path) -> None:
    (repository / "pack age" / "in").symlink_to("../train.py")
    (repository / "out").symlink_to("pack age/../../data")
    (repository / "absolute").symlink_to(tmp_path / "data")
    _, (problem,) = code.inspect(repository, exclude=tmp_path / "runs", max_bytes=LIMIT)
    assert problem.message.endswith("copy: out")
    assert problem.warning


def test_the_patch_can_be_applied_whatever_the_users_git_shows(
    repository: Path, tmp_path: Path
) -> None:
    """Once `diff.external` and colours of the user's own config went into the patch."""
    for setting in ("diff.external=/bin/echo", "color.ui=always", "diff.noprefix=true"):
        git(repository, "config", *setting.split("="))
    (repository / "train.py").write_text("x = 2\n")
    snapshot, _ = taken(repository, tmp_path / "runs" / "code")
    (repository / "train.py").write_text("x = 1\n")
    git(repository, "apply", str(snapshot.tree.parent / "diff.patch"))
    assert (repository / "train.py").read_text() == "x = 2\n"


def test_of_two_installed_versions_the_imported_one_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, version in (("first", "2.0"), ("second", "1.0")):
        info = tmp_path / folder / f"thing-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: thing\nVersion: {version}\n")
    monkeypatch.setattr("sys.path", [str(tmp_path / "first"), str(tmp_path / "second")])
    assert code.installed_packages() == {"thing": "2.0"}
