"""Hydra's composition of the chosen options into plain data.

`compose` of Hydra's public API first composes Hydra's own settings (launchers, logging, help),
which are more than half of its time and are thrown away here. So the same engine is asked for the
project's configs alone. Whatever stops that way (a root config that overrides one of Hydra's own
groups, another release of Hydra) is tried again through the public API, whose word is final.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from air_hpc.config.groups import ConfigFolders
from air_hpc.config.hydra_words import quoted_list, told_by


class NotComposed(Exception):
    """Hydra could not compose a set of options; the message says why, in one line."""


def composed(folders: ConfigFolders, config_name: str, choices: Sequence[str]) -> dict[str, Any]:
    """The root config with the chosen options as plain data, interpolations as written.

    `choices` are overrides of groups. Raises NotComposed.
    """
    try:
        return direct(folders, config_name, choices)
    except Exception:
        return public(folders, config_name, choices)


def direct(folders: ConfigFolders, config_name: str, choices: Sequence[str]) -> dict[str, Any]:
    """`composed` without Hydra's own settings; raises whatever Hydra raises."""
    first, *more = folders.folders
    search_path = create_config_search_path(os.fspath(first))
    for folder in more:
        search_path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
    loader = ConfigLoaderImpl(search_path)
    parsed, repository = loader._parse_overrides_and_create_caching_repo(config_name, list(choices))
    chosen = create_defaults_list(
        repo=repository,
        config_name=config_name,
        overrides_list=parsed,
        prepend_hydra=False,
        skip_missing=False,
    )
    return _plain(loader._compose_config_from_defaults_list(chosen.defaults, repository))


def public(folders: ConfigFolders, config_name: str, choices: Sequence[str]) -> dict[str, Any]:
    """`composed` through Hydra's public API; raises NotComposed."""
    first, *more = folders.folders
    told = list(choices)
    if more and not any(choice.startswith("hydra.searchpath") for choice in choices):
        told.append("hydra.searchpath=" + quoted_list([f"file://{folder}" for folder in more]))
    try:
        with initialize_config_dir(config_dir=os.fspath(first), version_base="1.3"):
            return _plain(compose(config_name, overrides=told))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError) as error:
        raise NotComposed(f"the configs do not compose: {told_by(error)}") from None


def _plain(config: Any) -> dict[str, Any]:
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items() if name != "hydra"}
