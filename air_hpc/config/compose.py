"""Composes `conf/` and a user's overrides into RunSpecs, through Hydra.

Hydra's parser reads every override and Hydra composes the chosen options; values are then applied
on plain data (`config.overrides`) and checked against the RunSpec (`config.build`). So one pass
finds every mistake, where Hydra stops at the first, and a sweep composes each distinct set of
options once, however many tasks it has. What Hydra raises is turned into a `Problem`.

Importing this module imports Hydra (about a quarter of a second): import it where it is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from air_hpc.config.accelerators import figures_wanted
from air_hpc.config.build import build, fields_of
from air_hpc.config.freeze import to_plain
from air_hpc.config.groups import ConfigFolders
from air_hpc.config.hydra_engine import NotComposed, composed
from air_hpc.config.hydra_words import (
    MAX_SWEEP_TASKS,
    literal,
    sweep_texts,
    syntax_problem,
    written,
)
from air_hpc.config.interpolate import resolve as fill
from air_hpc.config.overrides import Action, Assignment, apply
from air_hpc.config.spec import RunSpec
from air_hpc.errors import Problem, nearest, raise_if_any

Progress = Callable[[int, int], None]
"""Called with (tasks done, tasks in all)."""


@dataclass(frozen=True)
class SweepTask:
    """One run of a sweep: its place, the overrides that make it alone, and its RunSpec."""

    index: int
    overrides: tuple[str, ...]
    spec: RunSpec


@dataclass(frozen=True)
class _Choice:
    """An override of a group: what Hydra is told (`tell`) and what the user wrote."""

    tell: str
    text: str


@dataclass
class _Found:
    """Problems in the order they are found, each once."""

    problems: dict[Problem, None] = field(default_factory=dict)

    def add(self, *problems: Problem) -> None:
        self.problems.update(dict.fromkeys(problems))

    def listed(self) -> list[Problem]:
        return list(self.problems)


@dataclass(frozen=True)
class _Options:
    """What Hydra's glob sweep asks for: the options of a group."""

    folders: ConfigFolders

    def get_group_options(self, group_name: str, results_filter: Any = None) -> list[str]:
        return self.folders.options(group_name)


class Composer:
    """Composes RunSpecs from one root config; keeps what it composed, for the next task.

    `config_dir` is a folder of more configs (`--config-dir`), `config_name` the root config.
    Raises BadInput if either does not exist.
    """

    def __init__(
        self, config_dir: str | Path | None = None, config_name: str | None = None
    ) -> None:
        self._config_name = (config_name or "config").removesuffix(".yaml")
        self._folders = ConfigFolders.find(config_dir).with_root(self._config_name)
        self._parser = OverridesParser.create()
        self._composed: dict[tuple[str, ...], dict[str, Any] | NotComposed] = {}

    @property
    def folders(self) -> ConfigFolders:
        """Where configs are read from."""
        return self._folders

    def compose(self, overrides: Sequence[str]) -> RunSpec:
        """The RunSpec that the overrides make; BadInput with every problem they have."""
        spec, problems = self.try_compose(overrides)
        raise_if_any(problems)
        return spec

    def try_compose(self, overrides: Sequence[str]) -> tuple[RunSpec, list[Problem]]:
        """The RunSpec and every problem; a key with a problem holds its default.

        So checks across keys (`plan.make_plan`) can add theirs to the same report: they skip what
        depends on a key that is named in the problems.
        """
        found = _Found()
        parsed = [self._parsed_alone(text, found) for text in overrides]
        config = self._configured([p for p in parsed if p is not None], found)
        found.add(*fill(config))
        built = build(RunSpec, config)
        found.add(*built.problems)
        assert built.value is not None  # every field of a RunSpec has a default
        return built.value, found.listed()

    def compose_sweep(
        self, overrides: Sequence[str], progress: Progress | None = None
    ) -> list[SweepTask]:
        """One task for each point of the sweep, in the order of Hydra's own sweeper.

        The first swept override varies slowest. BadInput with every problem of every task.
        """
        tasks, problems = self.try_compose_sweep(overrides, progress)
        raise_if_any(problems)
        return tasks

    def try_compose_sweep(
        self, overrides: Sequence[str], progress: Progress | None = None
    ) -> tuple[list[SweepTask], list[Problem]]:
        """The tasks and every problem, as `try_compose` does for one run."""
        found = _Found()
        axes = self._axes(overrides, found)
        count = 1
        for axis in axes:
            count *= len(axis)
        if count > MAX_SWEEP_TASKS:
            found.add(
                Problem("", "", f"the sweep has {count} tasks", f"at most {MAX_SWEEP_TASKS} tasks")
            )
            return [], found.listed()
        tasks: list[SweepTask] = []
        for index, point in enumerate(itertools.product(*axes)):
            config = self._configured(point, found)
            found.add(*fill(config))
            built = build(RunSpec, config)
            found.add(*built.problems)
            assert built.value is not None
            texts = tuple(part.text for part in point)
            tasks.append(SweepTask(index, texts, built.value))
            if progress is not None:
                progress(index + 1, count)
        return tasks, found.listed()

    def job_yaml(self, overrides: Sequence[str], *, resolve: bool = False) -> str:
        """What `--cfg job` prints: the composed config, with `resolve` its interpolations filled.

        Raises BadInput with every problem of the overrides.
        """
        spec = self.compose(overrides)
        if resolve:
            return OmegaConf.to_yaml(OmegaConf.create(to_plain(spec)))
        found = _Found()
        parsed = [self._parsed_alone(text, found) for text in overrides]
        config = self._configured([p for p in parsed if p is not None], found)
        return OmegaConf.to_yaml(OmegaConf.create(config))

    # ------------------------------------------------------------------ overrides

    def _parse(self, text: str, found: _Found) -> Override | None:
        try:
            override = self._parser.parse_overrides([text])[0]
        except HydraException as error:
            found.add(syntax_problem(text, error))
            return None
        override.config_loader = _Options(self._folders)
        key = override.key_or_group
        if not key or "" in key.split("."):
            found.add(Problem(key, text, "an override needs a key", "key=value"))
            return None
        if override.is_hydra_override() and key != "hydra.searchpath":
            hint = "Run folders, logs and sweeps are air_hpc's own; see runs_dir and -m"
            message = "settings of Hydra itself have no effect here"
            found.add(Problem(key, written(text), message, hint=hint))
            return None
        return override

    def _parsed_alone(self, text: str, found: _Found) -> _Choice | Assignment | None:
        override = self._parse(text, found)
        if override is None:
            return None
        if override.is_sweep_override():
            message = "several values, which only a sweep takes"
            value = written(text)
            hint = (
                f"Add -m to sweep over it, or mean the text: \"{override.key_or_group}='{value}'\""
            )
            found.add(Problem(override.key_or_group, value, message, hint=hint))
            return None
        return self._part(override, found)

    def _axes(self, overrides: Sequence[str], found: _Found) -> list[list[_Choice | Assignment]]:
        """For each override the parts it may be; a later override of a key replaces an earlier."""
        axes: dict[str, list[_Choice | Assignment]] = {}
        for text in overrides:
            override = self._parse(text, found)
            if override is None:
                continue
            texts = [text]
            if override.is_sweep_override():
                texts, problem = sweep_texts(override, text)
                if problem is not None:
                    found.add(problem)
            points = [self._parsed_alone(one, found) for one in texts]
            good = [point for point in points if point is not None]
            if good:
                axes[override.get_key_element()] = good
        return list(axes.values())

    def _part(self, override: Override, found: _Found) -> _Choice | Assignment | None:
        text = override.input_line or ""
        group = override.key_or_group
        value = override.value()
        if self._folders.is_group(group) and not isinstance(value, dict):
            return self._choice(override, text, found)
        if group == "hydra.searchpath":
            return _Choice(text, text)
        if override.package is not None:
            groups = self._folders.groups()
            hint = nearest(group, groups)
            found.add(Problem(group, written(text), "no such group", ", ".join(groups), hint))
            return None
        action: Action = "change"
        if override.is_delete():
            action = "delete"
        elif override.is_add():
            action = "add"
        elif override.is_force_add():
            action = "force"
        return Assignment(action, group, value, text, literal(override, text))

    def _choice(self, override: Override, text: str, found: _Found) -> _Choice | None:
        group, value = override.key_or_group, override.value()
        if override.is_delete():
            return _Choice(text, text)
        if value is None:
            return _Choice(f"~{group}", text)
        options = self._folders.options(group)
        chosen = value if isinstance(value, list) else [value]
        wrong = [str(option) for option in chosen if not self._has_option(group, option)]
        for option in wrong:
            allowed = ", ".join(options)
            hint = nearest(option, options)
            if group == "accelerator" and _is_name(option):
                hint = f"{hint} {figures_wanted(option)}".lstrip()
            found.add(Problem(group, option, "no such option", allowed, hint))
        if wrong:
            return None
        if override.is_force_add():
            message = "++ is for values, not for groups"
            found.add(Problem(group, written(text), message, f"{group}=<option>"))
            return None
        in_defaults = group == "experiment" or group in fields_of(RunSpec)
        return _Choice(text.removeprefix("+") if in_defaults else text, text)

    def _has_option(self, group: str, option: Any) -> bool:
        return self._folders.file(group, str(option).removesuffix(".yaml")) is not None

    # ---------------------------------------------------------------- composition

    def _configured(self, parts: Sequence[_Choice | Assignment], found: _Found) -> dict[str, Any]:
        """The chosen options composed, then the values on top."""
        config = self._base(tuple(p.tell for p in parts if isinstance(p, _Choice)), found)
        for part in parts:
            if isinstance(part, Assignment):
                problem = apply(config, part)
                if problem is not None:
                    found.add(problem)
        return config

    def _base(self, choices: tuple[str, ...], found: _Found) -> dict[str, Any]:
        try:
            return self._composed_once(choices)
        except NotComposed as error:
            together = Problem("", " ".join(choices), str(error))
        good: list[str] = []
        alone: list[Problem] = []
        for choice in choices:
            try:
                self._composed_once((choice,))
                good.append(choice)
            except NotComposed as error:
                key, _, value = choice.partition("=")
                alone.append(Problem(key, value, str(error)))
        found.add(*(alone or [together]))
        try:
            return self._composed_once(tuple(good) if alone else ())
        except NotComposed:
            return {}

    def _composed_once(self, choices: tuple[str, ...]) -> dict[str, Any]:
        if choices not in self._composed:
            try:
                self._composed[choices] = composed(self._folders, self._config_name, choices)
            except NotComposed as error:
                self._composed[choices] = error
        config = self._composed[choices]
        if isinstance(config, NotComposed):
            raise config
        return _copied(config)  # type: ignore[no-any-return]


def _is_name(text: str) -> bool:
    """Whether a file could be called so."""
    return bool(text) and all(letter.isalnum() or letter in "_-." for letter in text)


def _copied(value: Any) -> Any:
    """A deep copy of plain data (several times quicker than copy.deepcopy)."""
    if isinstance(value, dict):
        return {name: _copied(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_copied(entry) for entry in value]
    return value
