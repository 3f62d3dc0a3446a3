"""Fixtures of the coordinator's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from air_hpc.rundir.layout import RunDir, create_run_dir
from tests.agent.play import BASE, NODES, Play
from tests.run_builder import build_run


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    """run.yaml is composed once; tests that need other keys compose their own."""
    return build_run(tmp_path_factory.mktemp("template"), *BASE).run_yaml.read_text()


@pytest.fixture
def run(tmp_path: Path, template: str) -> RunDir:
    made = create_run_dir(tmp_path, "run")
    made.run_yaml.write_text(template)
    return made


@pytest.fixture
def play(run: RunDir) -> Iterator[Callable[..., Play]]:
    plays: list[Play] = []

    def start(**facts: Any) -> Play:
        plays.append(Play(facts.pop("run", run), **facts))
        return plays[-1]

    yield start
    for one in plays:
        one.coordinator.close()


@pytest.fixture
def running(play: Callable[..., Play]) -> Play:
    """Both nodes have said hello."""
    one = play()
    one.hello(*NODES)
    return one
