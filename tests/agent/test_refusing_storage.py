"""A file system that takes nothing for a while: claims, events and intents wait for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from air_hpc.agent import opening
from air_hpc.agent.record import BackgroundRecord, Record
from air_hpc.errors import EXIT_ENVIRONMENT
from air_hpc.rundir.events import Event, Kind, LedgerWriter, read_ledger
from air_hpc.rundir.fence import Token, newest_token
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.words import FailureClass
from tests.agent.play import BASE, NODES, PREEMPTED, FakeScheduler, Play
from tests.run_builder import build_run


def hide(folder: Path) -> Callable[[], None]:
    """Nothing can be made in a folder that is not there; what is returned brings it back."""
    aside = folder.with_name(f"{folder.name}-hidden")
    folder.rename(aside)
    return lambda: void(aside.rename(folder))


def void(_: object) -> None:
    pass


@contextmanager
def hidden(folder: Path) -> Iterator[None]:
    back = hide(folder)
    yield
    back()


def kinds(run: RunDir) -> list[str]:
    return [event.kind for event in read_ledger(run).events]


def test_events_that_could_not_be_written_are_written_later_in_their_order(run: RunDir) -> None:
    said: list[str] = []
    now = [0.0]
    record = Record(run, "attempt-1", say=said.append, clock=lambda: now[0])
    with hidden(run.ledger_dir):
        record.append("one", Token(1, 1))
        record.append("two", Token(1, 1))
    record.tick()
    assert kinds(run) == [], "not before its time: a hanging file system is not asked every tick"
    now[0] = 1.0
    record.tick()
    record.append("three", Token(1, 1))
    record.close()
    assert kinds(run) == ["one", "two", "three"]
    assert len(said) == 2


def test_a_close_waits_for_the_file_system_and_says_what_is_lost(run: RunDir) -> None:
    said: list[str] = []
    now = [0.0]
    back = hide(run.ledger_dir)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        now[0] += seconds
        pauses.append(seconds)
        if len(pauses) == 3:
            back()

    record = Record(run, "attempt-1", say=said.append, clock=lambda: now[0], sleep=sleep)
    record.append("late", None)
    record.close(patience_s=10)
    assert kinds(run) == ["late"]
    gone = Record(run, "attempt-2", say=said.append, clock=lambda: now[0], sleep=sleep)
    with hidden(run.ledger_dir):
        gone.append("never", None)
        gone.close(patience_s=1)
    assert "lost" in said[-1]
    assert "never" in said[-1]


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A ledger whose writes do not return before the event is set."""
    goes_on = threading.Event()
    write = LedgerWriter.write

    def hang(self: LedgerWriter, event: Event) -> None:
        goes_on.wait(60)
        write(self, event)

    monkeypatch.setattr(LedgerWriter, "write", hang)
    yield goes_on
    goes_on.set()


def test_a_ledger_that_hangs_is_written_once_it_answers(
    run: RunDir, hanging: threading.Event
) -> None:
    record = BackgroundRecord(run, "attempt-1", say=void)
    record.append("one", Token(1, 1))
    record.append("two", Token(1, 1))
    assert [event.kind for event in record.noted] == ["one", "two"]
    assert kinds(run) == []
    hanging.set()
    record.flush()
    assert kinds(run) == ["one", "two"]
    record.append("three", Token(1, 1))
    record.close()
    assert kinds(run) == ["one", "two", "three"]


def test_a_ledger_that_hangs_holds_up_neither_heartbeats_nor_the_next_generation(
    tmp_path: Path, play: Callable[..., Play], hanging: threading.Event
) -> None:
    """The coordinator wrote it in its loop: twenty seconds of a slow disk, and all nodes left."""
    run = build_run(tmp_path / "runs", *BASE, "recovery.restart=same")
    one = play(run=run, record=BackgroundRecord)
    one.hello(*NODES)
    one.beat("n2")
    assert one.socket.to("ack")[-1] == "n2"
    one.failed_all("network")
    assert one.token == "1.2"
    assert len(one.socket.of("start")) == 4
    assert kinds(run) == [Kind.SUBMITTED] or kinds(run) == []
    hanging.set()
    one.coordinator.close()
    assert kinds(run).count(Kind.GENERATION_STARTED) == 2


def restarting(run: RunDir, play: Callable[..., Play], folder: Path) -> Play:
    """A coordinator whose generations follow each other in the allocation."""
    same = build_run(folder / "same", *BASE, "recovery.restart=same")
    run.run_yaml.write_text(same.run_yaml.read_text())
    one = play()
    one.hello(*NODES)
    return one


def test_a_start_waits_until_it_can_be_claimed(
    run: RunDir, play: Callable[..., Play], monkeypatch: pytest.MonkeyPatch
) -> None:
    back = hide(run.tokens_dir)
    monkeypatch.setattr(opening.time, "sleep", lambda _: back())
    one = play()
    assert newest_token(run) == Token(1, 1)
    assert "could not be claimed" in one.said[0]


def test_a_generation_waits_until_it_can_be_claimed(
    run: RunDir, play: Callable[..., Play], tmp_path: Path
) -> None:
    one = restarting(run, play, tmp_path)
    with hidden(run.tokens_dir):
        one.failed_all("network")
        one.wait(3)
        assert one.socket.to("start") == list(NODES)
    one.wait(3)
    assert newest_token(run) == Token(1, 2)
    assert one.socket.to("start") == [*NODES, *NODES]
    assert one.coordinator.outcome is None


def test_a_generation_that_can_never_be_claimed_ends_the_attempt(
    run: RunDir, play: Callable[..., Play], tmp_path: Path
) -> None:
    one = restarting(run, play, tmp_path)
    with hidden(run.tokens_dir):
        one.failed_all("network")
        one.wait(opening.STORAGE_PATIENCE_S + 3)
        assert one.end[0] is FailureClass.STORAGE


def test_a_requeue_whose_word_cannot_be_written_is_left_to_the_script(
    run: RunDir, play: Callable[..., Play]
) -> None:
    one = play(scheduler=FakeScheduler(PREEMPTED))
    one.hello(*NODES)
    one.signal("SIGTERM")
    intents = run.intent_file("12", 0).parent
    os.makedirs(intents, exist_ok=True)
    with hidden(intents):
        one.stopped_all(4)
        one.wait(1)
    assert one.event(Kind.REQUEUE_INTENDED).facts["intent"] == "requeue"
    assert one.exit_code == EXIT_ENVIRONMENT, "the script starts again what failed without a word"
