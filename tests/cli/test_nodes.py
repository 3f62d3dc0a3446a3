"""The verb `nodes`, without a Slurm (no check of names) and with a stand-in for one."""

from __future__ import annotations

import getpass
import time
from pathlib import Path

import pytest

from air_hpc.cli import completion, main
from air_hpc.rundir.exclusions import (
    Exclusion,
    append_exclusions,
    exclusions_file,
    read_exclusions,
)
from air_hpc.slurm import snapshot
from tests.slurm import recorded


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIR_HPC_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "runs"


@pytest.fixture
def site(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(snapshot, "ask", lambda timeout_s: dict(recorded.texts("22.05.8")))
    return runs


def failed(node: str = "n3", *, hours: float = 2.0, ago_s: float = 0.0) -> Exclusion:
    now = time.time() - ago_s
    return Exclusion(node, now, now + 3600 * hours, "no answer for 5 s", "hang", "tiny-1")


def test_an_empty_list_is_said(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["nodes"]) == 0
    assert capsys.readouterr().out == "No node is excluded.\n"
    assert not runs.exists()


def test_the_list_tells_why_by_whom_and_for_how_long(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append_exclusions(runs, [failed(), failed("n4", ago_s=9000)])
    with exclusions_file(runs).open("a") as file:
        file.write('{"kind":"excl')
    assert main.main(["nodes"]) == 0
    told = capsys.readouterr()
    title, row = told.out.splitlines()
    assert title.split() == ["NODE", "CLASS", "SINCE", "UNTIL", "LEFT", "RUN", "BY", "REASON"]
    assert row.startswith("n3")
    assert "hang" in row
    assert row.endswith("tiny-1  agent  no answer for 5 s")
    assert "1 line(s) of the file could not be read" in told.err


def test_exclude_and_release(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["nodes", "exclude", "n[1-2]", "n4", "--reason", "bad link", "--hours=0.5"]
    assert main.main(words) == 0
    found = read_exclusions(site).entries
    assert [each.node for each in found] == ["n1", "n2", "n4"]
    (first, *_) = found
    assert isinstance(first, Exclusion)
    assert first.until - first.time == pytest.approx(1800)
    assert (first.by, first.failure_class) == (getpass.getuser(), None)
    assert main.main(["nodes", "release", "n2"]) == 0
    assert "released: n2" in capsys.readouterr().out
    assert main.main(["nodes", "release", "--all"]) == 0
    assert capsys.readouterr().out == "released: n[1,4]\n"
    assert main.main(["nodes", "release", "--all"]) == 0
    assert capsys.readouterr().out == "no node was excluded\n"


def test_an_exclusion_that_names_no_node_of_the_site_is_refused(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["nodes", "exclude", "n3", "nn2", "x9", "--reason=a"]) == 2
    told = capsys.readouterr().err
    assert "node=nn2" in told
    assert "Did you mean n2?" in told
    assert "node=x9" in told
    assert "allowed: n[1-" in told
    assert read_exclusions(site).entries == ()


def test_without_a_slurm_the_names_are_taken_and_that_is_said(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["nodes", "exclude", "x9", "--reason=a"]) == 0
    assert "the names are not checked" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["relase", "n1"], ["no such action", "Did you mean release?"]),
        (["exclude"], ["name the nodes to exclude", "--reason: say why"]),
        (["exclude", "n[1-", "$(x)", "--reason=a", "--hours=0"],
         ["node=n[1-: names no node", "node=$(x): names no node", "--hours=0"]),
        (["exclude", "n1", "--reason=a", "--hours=soon"], ["--hours=soon"]),
        (["exclude", "n1", "--reason=a", "--hours=nan"], ["at most 8784"]),
        (["exclude", "n1", "--reason=a", "--all"], ["--all is for `nodes release`"]),
        (["release"], ["name the nodes to release, or --all"]),
        (["release", "n1", "--all"], ["name the nodes to release, or --all"]),
        (["release", "n1"], ["node=n1: is not excluded", "allowed: n3"]),
        (["release", "n3", "--hours=1"], ["are for `nodes exclude`"]),
        (["--hours=1"], ["are for `nodes exclude`"]),
    ],
)  # fmt: skip
def test_mistakes_of_the_command_line_are_told_together(
    runs: Path, words: list[str], says: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    append_exclusions(runs, [failed()])
    assert main.main(["nodes", *words]) == 2
    told = capsys.readouterr().err
    for text in says:
        assert text in told
    assert len(read_exclusions(runs).entries) == 1


def test_json_is_one_object(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    append_exclusions(runs, [failed()])
    assert main.main(["nodes", "release", "n3", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body == {"excluded": [], "unreadable_lines": 0, "changed": ["n3"]}
    append_exclusions(runs, [failed()])
    assert main.main(["nodes", "--json"]) == 0
    (each,) = json.loads(capsys.readouterr().out)["excluded"]
    assert (each["node"], each["failure_class"], each["run_id"]) == ("n3", "hang", "tiny-1")
    assert 7000 < each["left_s"] <= 7200


def test_a_file_that_grew_is_compacted_by_the_next_change(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append_exclusions(runs, [failed(f"m{n}", ago_s=9000) for n in range(300)])
    append_exclusions(runs, [failed("n3"), failed("n4")])
    assert main.main(["nodes"]) == 0
    assert len(read_exclusions(runs).entries) == 302
    assert main.main(["nodes", "release", "n4"]) == 0
    assert [each.node for each in read_exclusions(runs).entries] == ["n3"]


def test_completion_knows_the_actions_and_the_excluded_nodes(runs: Path) -> None:
    append_exclusions(runs, [failed("n3"), failed("m1")])
    assert "nodes" in completion.candidates(["no"])
    assert completion.candidates(["nodes", ""]) == ["exclude", "release"]
    assert completion.candidates(["nodes", "release", "n"]) == ["n3"]
    assert "--hours" in completion.candidates(["nodes", "exclude", "--h"])
