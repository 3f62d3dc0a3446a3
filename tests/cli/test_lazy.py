"""Light verbs import neither torch nor mlflow, and `--help` next to nothing."""

from pathlib import Path

import pytest

from tests.cli.commands import air_hpc
from tests.runs.made import MadeRun

_SPY = """
import atexit, sys
from air_hpc.cli.main import main
watched = {watched!r}
code = main(sys.argv[1:])
found = sorted(name for name in watched if name in sys.modules)
sys.stderr.write("IMPORTED " + ",".join(found) + chr(10))
sys.exit(code)
"""
_HEAVY = ("torch", "mlflow", "numpy", "submitit", "zmq", "pandas")


def imported(tmp_path: Path, *words: str, watched: tuple[str, ...]) -> list[str]:
    done = air_hpc(*words, cwd=tmp_path, program=("-c", _SPY.format(watched=watched)))
    assert done.returncode == 0, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("IMPORTED ")
    return [name for name in last.removeprefix("IMPORTED ").split(",") if name]


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["run", "--help"],
        ["plan", "--help"],
        ["status", "--help"],
        ["why", "--help"],
        ["logs", "--help"],
        ["cancel", "--help"],
        ["sync", "--help"],
        ["nodes", "--help"],
        ["--complete", "model=l"],
    ],
)
def test_help_and_completion_import_almost_nothing(tmp_path: Path, words: list[str]) -> None:
    assert imported(tmp_path, *words, watched=(*_HEAVY, "hydra", "omegaconf", "rich")) == []


@pytest.mark.parametrize(
    "words",
    [
        ["plan"],
        ["plan", "--json", "model=llama_8b"],
        ["--cfg", "job"],
        ["status"],
        ["status", "tiny-1"],
        ["why", "tiny-1"],
        ["logs", "tiny-1"],
        ["cancel", "tiny-1"],
        ["nodes"],
    ],
)
def test_light_verbs_import_nothing_heavy(tmp_path: Path, words: list[str]) -> None:
    MadeRun(tmp_path / "runs").submitted().training().ended()
    assert imported(tmp_path, *words, watched=_HEAVY) == []


def test_a_dry_run_imports_neither_torch_nor_mlflow(tmp_path: Path) -> None:
    watched = ("torch", "mlflow", "numpy", "zmq")
    assert imported(tmp_path, "--dry-run", watched=watched) == []


def test_the_spy_sees_what_is_imported(tmp_path: Path) -> None:
    assert "hydra" in imported(tmp_path, "plan", watched=("hydra", "json"))
