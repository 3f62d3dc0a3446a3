"""What ships in conf/: every option composes, is complete, and holds the published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from air_hpc.config.build import fields_of
from air_hpc.config.compose import Composer
from air_hpc.config.groups import ConfigFolders
from air_hpc.config.spec import RunSpec
from air_hpc.plan.flops import count_parameters

FOLDERS = ConfigFolders.find()
SHARED = Composer()
OPTIONS = [
    (group, option)
    for group in FOLDERS.groups()
    for option in FOLDERS.options(group)
    if group != "experiment"
]


def test_the_groups_are_those_of_the_design() -> None:
    sections = {name for name, member in fields_of(RunSpec).items() if member.nested is not None}
    assert set(FOLDERS.groups()) == sections - {"launch", "train", "code"} | {"experiment"}


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_an_option_names_itself_and_only_keys_that_exist(group: str, option: str) -> None:
    path = FOLDERS.file(group, option)
    assert path is not None
    text = path.read_text()
    assert text.startswith("#"), "the first line says what it is"
    body = yaml.safe_load(text)
    nested = fields_of(RunSpec)[group].nested
    assert nested is not None
    known = fields_of(nested)
    # What a nested group holds (recovery/rules) is shown in its own files.
    below = {name for entry in body.pop("defaults", []) if entry != "_self_" for name in entry}
    body |= dict.fromkeys(below)
    assert set(body) <= set(known)
    if option != "example_site":
        assert set(body) == set(known), "a shipped option shows every key"
    if "name" in known:
        assert body["name"] == option


@pytest.mark.parametrize("group", [g for g in FOLDERS.groups() if g != "accelerator"])
def test_every_option_composes(group: str) -> None:
    for option in FOLDERS.options(group):
        SHARED.compose([f"{group}={option}"])


def test_the_default_run_is_the_default_spec() -> None:
    """But for the figures of the device and the table of failures, which are config alone."""
    composed = SHARED.compose([])
    recovery = replace(RunSpec().recovery, rules=composed.recovery.rules)
    assert composed == RunSpec(accelerator=composed.accelerator, recovery=recovery)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("tiny", 853_120),
        ("llama_160m", 162_417_408),
        ("llama_1b", 1_235_814_400),
        ("llama_8b", 8_030_261_248),
        ("llama_70b", 70_553_706_496),
        ("llama_405b", 405_853_388_800),
    ],
)
def test_a_model_has_its_published_number_of_parameters(name: str, parameters: int) -> None:
    assert count_parameters(SHARED.compose([f"model={name}"]).model).parameters == parameters
