from pathlib import Path

import pytest

from tests.runs.made import ToldSlurm


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToldSlurm:
    """A Slurm that knows no job and has no accounting until it is told otherwise."""
    told = ToldSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", told.environ["PATH"])
    return told
