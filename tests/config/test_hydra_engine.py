from __future__ import annotations

from pathlib import Path

import pytest

from air_hpc.config import hydra_engine
from air_hpc.config.groups import ConfigFolders
from air_hpc.config.hydra_engine import NotComposed, composed, direct, public

FOLDERS = ConfigFolders.find()


@pytest.mark.parametrize(
    "choices",
    [[], ["model=llama_8b", "~tracking"], ["experiment=smoke"], ["experiment=llama_8b_fsdp"]],
)
def test_the_short_way_gives_what_the_public_api_gives(choices: list[str]) -> None:
    assert direct(FOLDERS, "config", choices) == public(FOLDERS, "config", choices)


def test_the_short_way_is_the_one_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the public way was taken")

    monkeypatch.setattr(hydra_engine, "public", never)
    assert composed(FOLDERS, "config", ["model=llama_1b"])["model"]["name"] == "llama_1b"


def test_a_root_config_may_name_hydras_own_groups(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - config\n  - override hydra/job_logging: none\n  - _self_\n"
        "hydra:\n  verbose: true\ntrain:\n  steps: 3\n"
    )
    folders = ConfigFolders.find(tmp_path).with_root("mine")
    config = composed(folders, "mine", [])
    assert config["train"]["steps"] == 3
    assert "hydra" not in config


def test_what_cannot_be_composed_is_said_in_one_line() -> None:
    with pytest.raises(NotComposed) as caught:
        composed(FOLDERS, "config", ["model=nosuch"])
    assert "nosuch" in str(caught.value)
    assert "\n" not in str(caught.value)
