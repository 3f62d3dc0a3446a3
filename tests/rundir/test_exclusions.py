from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_hpc.errors import EnvironmentFailure
from air_hpc.rundir.exclusions import (
    Exclusion,
    Release,
    append_exclusions,
    compact,
    exclusions_file,
    from_line,
    is_node_name,
    parse,
    read_exclusions,
    to_line,
)

ONE = Exclusion("n1", 10.0, 20.0, "NCCL timed out", "network", "tiny-1")
TWO = Exclusion("n2", 11.0, 21.0, "slow \N{SNOWMAN}", None, None, "me")
ALL = (ONE, TWO, Release("n1", 12.0, "me"), Release(None, 13.0))


def test_no_file_is_no_exclusion(tmp_path: Path) -> None:
    assert read_exclusions(tmp_path / "none").entries == ()


def test_entries_come_back_in_their_order_and_are_private(tmp_path: Path) -> None:
    for entry in ALL:
        append_exclusions(tmp_path, [entry])
    assert read_exclusions(tmp_path).entries == ALL
    path = exclusions_file(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@given(st.data())
def test_a_file_cut_anywhere_keeps_every_whole_line(data: st.DataObject) -> None:
    whole = "".join(f"{to_line(entry)}\n" for entry in ALL).encode()
    cut = data.draw(st.integers(0, len(whole)))
    found = parse(whole[:cut])
    lines = whole[:cut].count(b"\n")
    assert found.entries[:lines] == ALL[:lines]
    assert len(found.entries) + found.unreadable_lines <= lines + 1


@given(st.binary())
def test_whatever_the_file_holds_is_read(text: bytes) -> None:
    parse(text)


def test_the_next_entry_is_never_glued_to_a_torn_line(tmp_path: Path) -> None:
    append_exclusions(tmp_path, [ONE])
    with exclusions_file(tmp_path).open("a") as file:
        file.write(to_line(TWO)[:-9])
    append_exclusions(tmp_path, [Release(None, 30.0)])
    found = read_exclusions(tmp_path)
    assert found.entries == (ONE, Release(None, 30.0))
    assert found.unreadable_lines == 1


@pytest.mark.parametrize(
    "line",
    [
        "[]", "7", '{"kind":"exclude"}', to_line(replace(ONE, node="n1 n2")),
        to_line(replace(ONE, node="-x")), to_line(replace(ONE, until=float("inf"))),
        to_line(replace(ONE, time=float("nan"))), to_line(ONE).replace("exclude", "other"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_entry_is_none(line: str) -> None:
    assert from_line(line) is None


def test_keys_of_a_later_version_are_passed_over() -> None:
    assert from_line(to_line(ONE).replace('"v":1', '"v":9,"new":[1]')) == ONE


@pytest.mark.parametrize("name", ["n1", "gpu-a100-07.site.edu", "N_1", "7"])
def test_names_of_nodes(name: str) -> None:
    assert is_node_name(name)


@pytest.mark.parametrize("name", ["", "-n", "n 1", "n[1-2]", "n1,n2", "n1;x", "ü1", "a" * 254, 3])
def test_what_is_no_name_of_a_node(name: object) -> None:
    assert not is_node_name(name)


def _write(runs_dir: Path, writer: int) -> None:
    for number in range(20):
        append_exclusions(runs_dir, [replace(ONE, node=f"w{writer}-{number}")])


def test_several_writers_lose_nothing_on_one_machine(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path, n)) for n in range(3)]
    for each in writers:
        each.start()
    for each in writers:
        each.join(60)
    found = read_exclusions(tmp_path)
    assert found.unreadable_lines == 0
    assert len({entry.node for entry in found.entries}) == 60


def test_compaction_keeps_the_mode_and_what_it_is_given(tmp_path: Path) -> None:
    append_exclusions(tmp_path, ALL)
    compact(tmp_path, [TWO])
    assert read_exclusions(tmp_path).entries == (TWO,)
    assert exclusions_file(tmp_path).stat().st_mode & 0o777 == 0o600
    assert [p.name for p in exclusions_file(tmp_path).parent.iterdir()] == ["exclusions.jsonl"]


def test_a_file_that_cannot_be_read_says_what_to_do(tmp_path: Path) -> None:
    exclusions_file(tmp_path).mkdir(parents=True)
    with pytest.raises(EnvironmentFailure, match="cannot read"):
        read_exclusions(tmp_path)
    with pytest.raises(EnvironmentFailure, match="check space and permissions"):
        append_exclusions(tmp_path, [ONE])
