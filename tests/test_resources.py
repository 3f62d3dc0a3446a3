"""`conf/` and `sbatch_templates/` are found from a checkout and from an install alike."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from air_hpc.errors import EnvironmentFailure
from air_hpc.resources import conf_dir, resource_dir, templates_dir

ROOT = Path(__file__).resolve().parents[1]


def test_a_checkout_uses_its_own_folders() -> None:
    assert (conf_dir(), templates_dir()) == (ROOT / "conf", ROOT / "sbatch_templates")


def test_a_missing_folder_says_where_it_was_looked_for() -> None:
    with pytest.raises(EnvironmentFailure, match="reinstall") as caught:
        resource_dir("no_such_folder")
    assert str(ROOT / "no_such_folder") in caught.value.tried


def installed(site_packages: Path) -> None:
    """Lay the package out as the wheel does, by what pyproject.toml puts into it."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())
    target = wheel["tool"]["hatch"]["build"]["targets"]["wheel"]
    placed = {name: name for name in target["packages"]} | target["force-include"]
    for source, place in placed.items():
        shutil.copytree(
            ROOT / source, site_packages / place, ignore=shutil.ignore_patterns("__pycache__")
        )


@pytest.mark.parametrize("words", [["plan"], ["cluster=slurm", "--dry-run"]])
def test_an_install_composes_and_renders_without_the_checkout(
    tmp_path: Path, words: list[str]
) -> None:
    site_packages = tmp_path / "site-packages"
    installed(site_packages)
    done = subprocess.run(
        [sys.executable, "-m", "air_hpc", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site_packages), "PYTHONSAFEPATH": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "tiny" in done.stdout
    # The interpreter and its PATH may lie in the checkout's own .venv; nothing else may.
    elsewhere = done.stdout.replace(sys.prefix, "")
    assert str(ROOT) not in elsewhere
