"""The log of a node: whole lines, each with its rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_hpc.agent.logs import LineBuffer, NodeLog, node_log_path

pieces = st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\r", b"\n")), max_size=20)


@given(pieces=pieces)
def test_lines_are_the_same_however_the_stream_is_cut(pieces: list[bytes]) -> None:
    buffer = LineBuffer()
    lines = [line for piece in pieces for line in buffer.feed(piece)] + buffer.end()
    whole = b"".join(pieces)
    expected = whole.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert lines == expected
    assert buffer.end() == []


def test_a_line_without_end_is_cut_and_nothing_of_it_is_lost() -> None:
    buffer = LineBuffer()
    lines = [line for _ in range(40) for line in buffer.feed(b"x" * 10_000)] + buffer.end()
    assert b"".join(lines) == b"x" * 400_000
    assert len(lines) > 1


def test_each_line_begins_with_its_rank(tmp_path: Path) -> None:
    path = node_log_path(tmp_path / "1" / "1", "n1")
    log = NodeLog(path)
    log.write(3, [b"one", b""])
    log.write(12, [b"two \xff"])
    log.close()
    log.close()
    assert path.read_bytes() == b"r3 | one\nr3 | \nr12 | two \xff\n"
    assert log.lost_bytes == 0


def test_a_second_generation_appends(tmp_path: Path) -> None:
    for text in (b"first", b"second"):
        log = NodeLog(tmp_path / "node-n1.log")
        log.write(0, [text])
        log.close()
    assert (tmp_path / "node-n1.log").read_bytes() == b"r0 | first\nr0 | second\n"


def test_a_full_disk_loses_lines_and_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(os, "open", lambda *_: opened)
    log = NodeLog(Path("/dev/full"))
    monkeypatch.undo()
    log.write(0, [b"lost"])
    log.close()
    assert log.lost_bytes == len(b"r0 | lost\n")


def test_a_log_that_cannot_be_opened_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = NodeLog(tmp_path / "file" / "node-n1.log")
    log.write(0, [b"lost"])
    log.close()
    assert log.lost_bytes > 0


def test_a_file_system_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    """The agent once appended in its own loop: a slow NFS stopped its heartbeats."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    log = NodeLog(pipe)
    for _ in range(400):
        log.write(0, [b"x" * 100_000])  # far more than a pipe nobody reads can hold
    assert log.lost_bytes > 0
    log.close()  # waits CLOSE_S and no longer
    os.close(reader)
