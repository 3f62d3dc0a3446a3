"""The coordinator: what a start finds, which checkpoints it takes, what it asks for at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from air_hpc.errors import EXIT_DO_NOT_RESTART, EXIT_OK
from air_hpc.recovery.cause import SlurmWord
from air_hpc.rundir.commit import BAD, checkpoint_path, committed_steps
from air_hpc.rundir.events import Kind, LedgerWriter, read_ledger, record
from air_hpc.rundir.fence import Fenced, Token, claim_next_attempt, newest_token
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.words import FailureClass, Verdict
from tests.agent.play import BASE, GATHER_S, NODES, PREEMPTED, RUNNING, FakeScheduler, Play
from tests.run_builder import build_run, commit_step, commit_steps


class TestStarts:
    def end_with(self, run: RunDir, failure_class: FailureClass, verdict: Verdict) -> None:
        token = claim_next_attempt(run)
        with LedgerWriter(run, f"attempt-{token.attempt}") as ledger:
            ledger.append(Kind.ATTEMPT_STARTED, token, nodes=list(NODES))
            ledger.append(
                Kind.ATTEMPT_ENDED,
                token,
                failure_class=failure_class,
                verdict=verdict,
                evidence="x",
            )

    @pytest.mark.parametrize(
        ("failure_class", "exit_code"),
        [
            (FailureClass.COMPLETED, EXIT_OK),
            (FailureClass.CANCELLED, EXIT_DO_NOT_RESTART),
            (FailureClass.USER_ERROR, EXIT_DO_NOT_RESTART),
        ],
    )
    def test_a_start_after_a_terminal_verdict_leaves_at_once(
        self,
        run: RunDir,
        play: Callable[..., Play],
        failure_class: FailureClass,
        exit_code: int,
    ) -> None:
        self.end_with(run, failure_class, Verdict.STOP)
        before = read_ledger(run).events
        one = play(restart_count=1)
        assert one.exit_code == exit_code
        one.hello("n2")
        assert one.socket.to("leave") == ["n2"]
        one.signal("SIGTERM")
        one.coordinator.on_message("n2", {"type": "agent_failed", "reason": "no route"})
        assert one.coordinator.dismissed
        assert one.coordinator.token is None
        assert newest_token(run) == Token(1, 1)
        assert read_ledger(run).events == before
        assert one.intent(1) is None

    def test_a_cancelled_run_does_not_start_again(
        self, run: RunDir, play: Callable[..., Play]
    ) -> None:
        self.end_with(run, FailureClass.PREEMPTED, Verdict.REQUEUE)
        record(run, "cancel", Kind.CANCEL_REQUESTED, by="someone")
        one = play(restart_count=1)
        assert one.end[:2] == (FailureClass.CANCELLED, Verdict.STOP)
        assert one.intent(1) == "stop"

    def test_a_cancel_during_the_run_wins_over_slurms_word(
        self, run: RunDir, play: Callable[..., Play]
    ) -> None:
        one = play(scheduler=FakeScheduler(PREEMPTED))
        one.hello(*NODES)
        record(run, "cancel", Kind.CANCEL_REQUESTED, by="someone")
        one.signal("SIGTERM")
        for node in NODES:
            one.tell(node, "begun", step=6)
        one.stopped_all(6)
        assert one.end[:2] == (FailureClass.CANCELLED, Verdict.STOP)


class TestCheckpoints:
    def test_the_usable_ones_are_offered_newest_first(
        self, run: RunDir, play: Callable[..., Play]
    ) -> None:
        commit_steps(run, 4, 8)
        one = play()
        one.hello(*NODES)
        for _, message in one.socket.of("start"):
            assert list(message["start"]["resume_steps"]) == [8, 4]
        assert one.event(Kind.GENERATION_STARTED).facts["resume_step"] == 8

    def test_a_recorded_checkpoint_that_is_gone_stops_the_run(
        self, run: RunDir, play: Callable[..., Play]
    ) -> None:
        first = play()
        first.hello(*NODES)
        first.worker("committed", step=5, bytes=5)
        first.failed_all("network")
        one = play(restart_count=1)
        one.hello(*NODES)
        failure_class, verdict, evidence = one.end
        assert (failure_class, verdict) == (FailureClass.CHECKPOINT, Verdict.STOP)
        assert "step 5 was recorded" in evidence
        assert one.socket.of("start") == []

    def test_one_that_does_not_verify_is_marked_and_the_older_one_taken(
        self, run: RunDir, play: Callable[..., Play]
    ) -> None:
        commit_steps(run, 4, 8)
        (checkpoint_path(run, 8) / "shard").write_bytes(b"cut")
        one = play()
        one.hello(*NODES)
        assert one.event(Kind.CHECKPOINT_BAD).facts["step"] == 8
        assert (checkpoint_path(run, 8) / BAD).exists()
        assert one.event(Kind.GENERATION_STARTED).facts["resume_step"] == 4

    def test_one_that_cannot_be_read_now_is_not_passed_over(
        self, run: RunDir, play: Callable[..., Play]
    ) -> None:
        """A moment's EIO or ESTALE once cost the newest checkpoint for good."""
        commit_steps(run, 4, 8)
        mark = checkpoint_path(run, 8) / "COMMITTED"
        whole = mark.read_bytes()
        mark.unlink()
        mark.symlink_to(mark)
        one = play()
        one.hello(*NODES)
        assert one.end[:2] == (FailureClass.STORAGE, Verdict.REQUEUE)
        assert "cannot read what to resume from: step-8" in one.end[2]
        assert one.socket.of("start") == []
        mark.unlink()
        mark.write_bytes(whole)
        again = play(restart_count=1)
        again.hello(*NODES)
        assert again.event(Kind.GENERATION_STARTED).facts["resume_step"] == 8

    @pytest.mark.parametrize("failure_class", ["unknown", "checkpoint"])
    def test_a_crash_in_the_load_blames_the_checkpoint(
        self, run: RunDir, play: Callable[..., Play], failure_class: str
    ) -> None:
        commit_steps(run, 4, 8)
        one = play()
        one.hello(*NODES)
        words = {"kind": "error", "type": "E", "message": "bad", "failure_class": failure_class}
        one.ended("n1", 0, 1, exit_status=1, phase="load", last_words=words)
        one.ended("n2", 2, 3, exit_status=1, phase="load", last_words=words)
        assert one.end[0] is FailureClass.CHECKPOINT
        assert "step-8: its load crashed" in one.end[2]
        assert committed_steps(run) == [4]
        again = play(restart_count=1)
        again.hello(*NODES)
        assert list(again.socket.of("start")[0][1]["start"]["resume_steps"]) == [4]

    def test_a_network_error_in_the_load_blames_nothing(
        self, run: RunDir, play: Callable[..., Play]
    ) -> None:
        commit_steps(run, 8)
        one = play()
        one.hello(*NODES)
        one.failed("n2", 2, failure_class="network")
        one.wait(GATHER_S + 1)
        killed = {"exit_status": -9, "last_words": None, "phase": "load"}
        one.ended("n1", 0, 1, **killed)
        one.ended("n2", 3, **killed)
        assert one.end[0] is FailureClass.NETWORK
        assert committed_steps(run) == [8]

    def test_a_kill_in_the_load_blames_nothing(
        self, run: RunDir, play: Callable[..., Play]
    ) -> None:
        """Once the only checkpoint was given up for it, and the run with it."""
        commit_steps(run, 8)
        one = play()
        one.hello(*NODES)
        one.ended("n2", 2, exit_status=-9, last_words=None, phase="load")
        one.failed("n1", 0, 1, failure_class="network")
        one.failed("n2", 3, failure_class="network")
        assert one.end[:2] == (FailureClass.UNKNOWN, Verdict.REQUEUE)
        assert committed_steps(run) == [8]

    def test_one_that_a_worker_finds_bad_is_marked(
        self, run: RunDir, play: Callable[..., Play]
    ) -> None:
        commit_steps(run, 4, 8)
        one = play()
        one.hello(*NODES)
        one.worker("checkpoint_bad", step=8, reason="digest")
        assert committed_steps(run) == [4]
        assert one.event(Kind.CHECKPOINT_BAD).facts == {"step": 8, "reason": "digest"}


class TestFence:
    def test_a_fenced_coordinator_leaves_without_a_verdict(
        self, run: RunDir, running: Play
    ) -> None:
        claim_next_attempt(run)
        running.failed_all("network")
        assert running.exit_code == EXIT_OK
        assert running.intent() is None
        kinds = [event.kind for event in running.events]
        assert Kind.ATTEMPT_ENDED not in kinds
        assert running.events[-1].facts["failure_class"] == FailureClass.FENCED

    def test_one_fenced_before_its_workers_start_starts_none(
        self, run: RunDir, play: Callable[..., Play]
    ) -> None:
        one = play()
        claim_next_attempt(run)
        one.hello(*NODES)
        assert one.socket.of("start") == []
        assert one.exit_code == EXIT_OK
        assert one.intent() is None

    def test_a_late_commit_of_the_attempt_before_does_not_count(
        self, run: RunDir, play: Callable[..., Play]
    ) -> None:
        old = commit_steps(run, 4)
        one = play()
        one.hello(*NODES)
        with pytest.raises(Fenced, match="fenced off"):
            commit_step(run, old, 8)
        assert committed_steps(run) == [4]


PREEMPTED_NEW = SlurmWord("RUNNING", 0, preempted=True, version=(24, 11))
REQUEUED = SlurmWord("COMPLETING", 1, version=(22, 5))
LIMIT = SlurmWord("COMPLETING", 0, reason="TimeLimit", version=(22, 5))
SCANCEL = SlurmWord("COMPLETING", 0, version=(22, 5))

INTENTS: dict[str, dict[str, str | None]] = {
    # what happened: {continuation: the intent}
    "preempted": {"requeue": "requeue", "resubmit": "resubmit", "chain": None, "none": "stop"},
    "preempted, 24.11": {"requeue": None, "resubmit": "resubmit", "chain": None, "none": "stop"},
    "requeued by hand": {"requeue": None, "resubmit": None, "chain": None, "none": "stop"},
    "time limit": {"requeue": "requeue", "resubmit": "resubmit", "chain": None, "none": "stop"},
    "failure": {"requeue": "requeue", "resubmit": "resubmit", "chain": None, "none": "stop"},
    "failure, requeued": {"requeue": None, "resubmit": None, "chain": None, "none": "stop"},
    "unknown sender": {"requeue": None, "resubmit": None, "chain": "stop", "none": "stop"},
    "scancel": dict.fromkeys(("requeue", "resubmit", "chain", "none"), "stop"),
    "user error": dict.fromkeys(("requeue", "resubmit", "chain", "none"), "stop"),
    "completed": dict.fromkeys(("requeue", "resubmit", "chain", "none"), "done"),
}
WORDS: dict[str, SlurmWord | None] = {
    "unknown sender": None,
    "preempted": PREEMPTED,
    "preempted, 24.11": PREEMPTED_NEW,
    "requeued by hand": REQUEUED,
    "time limit": LIMIT,
    "scancel": SCANCEL,
    "failure, requeued": REQUEUED,
}


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {}
    for word in ("requeue", "resubmit", "chain", "none"):
        folder = tmp_path_factory.mktemp(word)
        run = build_run(folder, *BASE, f"launch.continuation={word}")
        found[word] = run.run_yaml.read_text()
    return found


@pytest.mark.parametrize("continuation", ["requeue", "resubmit", "chain", "none"])
@pytest.mark.parametrize("happened", INTENTS)
def test_the_intent_follows_from_class_continuation_and_version(
    run: RunDir,
    play: Callable[..., Play],
    templates: dict[str, str],
    happened: str,
    continuation: str,
) -> None:
    run.run_yaml.write_text(templates[continuation])
    one = play(scheduler=FakeScheduler(WORDS.get(happened, RUNNING)))
    one.hello(*NODES)
    if happened.startswith("failure"):
        one.failed_all("network")
    elif happened == "user error":
        one.failed_all("user_error")
    elif happened == "completed":
        one.finished_all()
    else:
        one.signal("SIGTERM")
        for node in NODES:
            one.tell(node, "begun", step=6)
        one.stopped_all(6)
    assert one.intent() == INTENTS[happened][continuation]


class TestLocal:
    def local(self, tmp_path: Path, play: Callable[..., Play], **facts: Any) -> Play:
        overrides = ("launch.devices_per_node=2", "train.steps=10", "recovery.restart=requeue")
        run = build_run(tmp_path / "local", *overrides) if "run" not in facts else facts.pop("run")
        one = play(run=run, nodes=("n1",), local=True, **facts)
        one.hello("n1")
        return one

    def test_a_failure_starts_the_next_attempt_here_after_a_growing_pause(
        self, tmp_path: Path, play: Callable[..., Play]
    ) -> None:
        first = self.local(tmp_path, play)
        first.failed("n1", 0, 1, failure_class="network")
        assert first.coordinator.outcome is not None
        assert first.coordinator.outcome.restart_after_s == 0
        second = self.local(tmp_path, play, run=first.run)
        second.failed("n1", 0, 1, failure_class="network")
        assert second.coordinator.outcome is not None
        assert second.coordinator.outcome.restart_after_s == 1
        third = self.local(tmp_path, play, run=first.run)
        third.failed("n1", 0, 1, failure_class="network")
        assert third.coordinator.outcome is not None
        assert third.coordinator.outcome.restart_after_s is None
        assert third.exit_code == EXIT_DO_NOT_RESTART

    def test_a_signal_to_a_local_agent_is_its_owners(
        self, tmp_path: Path, play: Callable[..., Play]
    ) -> None:
        one = self.local(tmp_path, play)
        one.signal("SIGTERM")
        one.tell("n1", "begun", step=3)
        one.ended("n1", 0, 1, last_words={"kind": "stopped", "step": 3, "saved": True})
        assert one.end[:2] == (FailureClass.CANCELLED, Verdict.STOP)
        assert one.scheduler.asked == 0
        assert list(one.run.intents_dir.iterdir()) == []
