from pathlib import Path

import pytest

from air_hpc.errors import BadInput
from air_hpc.runs.find import find_run, find_runs, runs_of_sweep
from tests.runs.made import MadeRun


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    MadeRun(folder, "llama_8b-261101-aaa111", "sweep-1").submitted("4711", 0)
    MadeRun(folder, "llama_8b-261102-bbb222", "sweep-1").submitted("4711", 1)
    MadeRun(folder, "tiny-261103-ccc333").submitted("4800")
    return folder


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("tiny-261103-ccc333", "tiny-261103-ccc333"),
        ("tiny", "tiny-261103-ccc333"),
        ("bbb222", "llama_8b-261102-bbb222"),
        ("4711_1", "llama_8b-261102-bbb222"),
        ("4800", "tiny-261103-ccc333"),
        ("261101", "llama_8b-261101-aaa111"),
    ],
)
def test_a_run_is_found_by_what_people_remember(runs_dir: Path, name: str, found: str) -> None:
    assert find_run(runs_dir, name).run_id == found


def test_a_run_is_found_by_its_path_from_anywhere(runs_dir: Path, tmp_path: Path) -> None:
    path = runs_dir / "tiny-261103-ccc333"
    assert find_run(tmp_path / "elsewhere", str(path)).path == path


def test_latest_is_the_run_that_was_made_last(runs_dir: Path) -> None:
    MadeRun(runs_dir, "aaa-made-last")
    assert find_run(runs_dir, "latest").run_id == "aaa-made-last"
    assert find_runs(runs_dir, [])[-1].run_id == "aaa-made-last"


def test_a_prefix_goes_before_a_piece_from_the_middle(runs_dir: Path) -> None:
    MadeRun(runs_dir, "other-tiny-1")
    assert find_run(runs_dir, "tiny").run_id == "tiny-261103-ccc333"


@pytest.mark.parametrize("name", ["llama_8b", "4711"])
def test_what_fits_several_is_refused_with_their_ids(runs_dir: Path, name: str) -> None:
    with pytest.raises(BadInput, match="fits 2 runs") as caught:
        find_run(runs_dir, name)
    assert "llama_8b-261101-aaa111" in caught.value.problems[0].allowed


def test_every_name_that_means_no_run_is_listed(runs_dir: Path) -> None:
    with pytest.raises(BadInput) as caught:
        find_runs(runs_dir, ["tiny", "nothing", "neither"])
    assert [problem.value for problem in caught.value.problems] == ["nothing", "neither"]


def test_a_near_miss_is_named(runs_dir: Path) -> None:
    with pytest.raises(BadInput, match="Did you mean tiny-261103-ccc333"):
        find_run(runs_dir, "tiny-261103-ccc334")


def test_a_run_named_twice_counts_once(runs_dir: Path) -> None:
    assert len(find_runs(runs_dir, ["tiny", "4800", "latest"])) == 1


def test_the_runs_of_a_sweep(runs_dir: Path) -> None:
    assert [run.run_id[-6:] for run in runs_of_sweep(runs_dir, "sweep-1")] == ["aaa111", "bbb222"]
    assert runs_of_sweep(runs_dir, "latest") == runs_of_sweep(runs_dir, "sweep-1")
    with pytest.raises(BadInput, match="no such sweep"):
        runs_of_sweep(runs_dir, "sweep-2")
