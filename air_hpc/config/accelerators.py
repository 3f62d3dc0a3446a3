"""All accelerators that the config folders describe, for telling a reported device's name."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from air_hpc.config.build import build
from air_hpc.config.freeze import load_yaml
from air_hpc.config.groups import ConfigFolders
from air_hpc.errors import BadInput, Problem, raise_if_any
from air_hpc.hardware.accelerator import AcceleratorSpec


def load_accelerators(folders: ConfigFolders | None = None) -> tuple[AcceleratorSpec, ...]:
    """Every `accelerator/*.yaml`, by name; BadInput with all problems of all files."""
    folders = folders or ConfigFolders.find()
    found: list[AcceleratorSpec] = []
    problems: list[Problem] = []
    for name in folders.options("accelerator"):
        path = folders.file("accelerator", name)
        assert path is not None
        try:
            body = load_yaml(path.read_text())
        except (yaml.YAMLError, OSError, ValueError) as error:
            raise BadInput.single("accelerator", name, f"{path} cannot be read: {error}") from None
        if not isinstance(body, Mapping):
            raise BadInput.single("accelerator", name, f"{path} is no mapping")
        built = build(AcceleratorSpec, body)
        problems += built.problems
        if built.value is not None:
            found.append(built.value)
    raise_if_any(problems)
    return tuple(found)
