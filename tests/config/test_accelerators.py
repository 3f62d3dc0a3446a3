from __future__ import annotations

from pathlib import Path

import pytest

from air_hpc.config.accelerators import load_accelerators
from air_hpc.config.compose import Composer
from air_hpc.config.groups import ConfigFolders
from air_hpc.errors import BadInput


def with_file(folder: Path, text: str) -> ConfigFolders:
    (folder / "accelerator").mkdir(exist_ok=True)
    (folder / "accelerator" / "mine.yaml").write_text(text)
    return ConfigFolders.find(folder)


def test_an_accelerator_of_the_users_own_is_read_as_hydra_reads_it(tmp_path: Path) -> None:
    text = "name: mine\ndevice_names: [x1]\npeak_flops: {bf16: 1e15, fp8: 2E+15}\n"
    folders = with_file(tmp_path, text)
    (mine,) = [a for a in load_accelerators(folders) if a.name == "mine"]
    assert mine.peak("bf16") == 1e15
    assert Composer(tmp_path).compose(["accelerator=mine"]).accelerator == mine


@pytest.mark.parametrize("text", ["name: [", "- a", "nam: x", "name: x\npeak_flops: 3"])
def test_a_broken_file_is_bad_input(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInput):
        load_accelerators(with_file(tmp_path, text))


def test_every_shipped_file_is_what_composing_it_gives() -> None:
    composer = Composer()
    for accelerator in load_accelerators()[::6]:
        assert composer.compose([f"accelerator={accelerator.name}"]).accelerator == accelerator


def test_an_unknown_accelerator_is_asked_for_by_a_file_to_fill_in(tmp_path: Path) -> None:
    _, problems = Composer().try_compose(["accelerator=mine"])
    (problem,) = problems
    assert problem.key == "accelerator"
    assert "h100_sxm" in problem.allowed
    head, _, body = problem.hint.partition("\n")
    assert "accelerator/mine.yaml" in head
    assert "--config-dir" in head
    (mine,) = [a for a in load_accelerators(with_file(tmp_path, body)) if a.name == "mine"]
    assert mine.peak("bf16") is None
    assert mine.memory_bytes is None
