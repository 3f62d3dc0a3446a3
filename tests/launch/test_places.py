"""Folders whose names would not come out of the script, of sbatch or of PYTHONPATH as they are."""

from pathlib import Path

import pytest

from air_hpc.errors import BadInput
from air_hpc.launch.prepare import place_problems
from air_hpc.launch.submit import submit
from tests.launch.making import spec, tasks


@pytest.mark.parametrize("kind", ["slurm", "local"])
@pytest.mark.parametrize(
    ("name", "cwd", "keys"),
    [
        ("runs of 'us' $HOME #1 ü", "/home/a b", {"slurm": [], "local": []}),
        ("a\nb", "/home", {"slurm": ["runs_dir"], "local": ["runs_dir"]}),
        ("a:b", "/home", {"slurm": ["runs_dir"], "local": ["runs_dir"]}),
        ("a\\b", "/home", {"slurm": ["runs_dir"], "local": []}),
        ("runs", "/home/a\\b", {"slurm": ["working directory"], "local": []}),
    ],
)
def test_odd_folders(
    tmp_path: Path, kind: str, name: str, cwd: str, keys: dict[str, list[str]]
) -> None:
    made = spec(tmp_path / name, cluster={"kind": kind})
    found = place_problems(made, cwd=Path(cwd), environ={})
    assert [problem.key for problem in found] == keys[kind]


def test_an_odd_folder_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """Once run directories were left behind that no job belonged to."""
    odd = tmp_path / "a\\b"
    odd.mkdir()
    with pytest.raises(BadInput, match="working directory"):
        submit(tasks(tmp_path / "runs", cluster={"kind": "allocation"}), cwd=odd)
    assert not (tmp_path / "runs").exists()


def test_a_group_that_does_not_exist_is_told_with_everything_else(tmp_path: Path) -> None:
    """Once it was found only when the first run directory was made."""
    made = spec(tmp_path / "a\nb", share_group="no-such-group")
    found = place_problems(made, cwd=tmp_path, environ={})
    assert [problem.key for problem in found] == ["runs_dir", "launch.share_group"]
    assert place_problems(spec(tmp_path, share_group="root"), cwd=tmp_path, environ={}) == []
