"""The coordinator: who is waited for, how a generation ends, how a stop is agreed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from air_hpc.agent import ending
from air_hpc.errors import EXIT_DO_NOT_RESTART, EXIT_OK, EnvironmentFailure
from air_hpc.plan.frozen import read_run_yaml
from air_hpc.rundir.events import Kind
from air_hpc.rundir.state import fold
from air_hpc.rundir.words import FailureClass, RunState, Verdict
from tests.agent.play import (
    GATHER_S,
    KILL_WAIT_S,
    LEAVE_S,
    NODES,
    PREEMPTED,
    RUNNING,
    FakeScheduler,
    Play,
)


class TestRegistering:
    def test_workers_start_when_all_nodes_are_there(self, play: Callable[..., Play]) -> None:
        one = play()
        one.hello("n2")
        assert one.socket.of("start") == []
        one.hello("n1")
        starts = {node: message["start"] for node, message in one.socket.of("start")}
        assert list(starts["n1"]["ranks"]) == [0, 1]
        assert list(starts["n2"]["ranks"]) == [2, 3]
        assert [starts[node]["node_rank"] for node in NODES] == [0, 1]
        assert {start["world_size"] for start in starts.values()} == {4}
        assert {start["master_port"] for start in starts.values()} == {20001}
        assert one.event(Kind.GENERATION_STARTED).facts["resume_step"] is None

    def test_a_repeated_hello_starts_nothing_twice(self, running: Play) -> None:
        running.hello("n2")
        assert sorted(running.socket.to("start")) == ["n1", "n2"]

    def test_a_stranger_is_sent_away(self, play: Callable[..., Play]) -> None:
        one = play()
        one.hello("n7")
        assert one.socket.to("leave") == ["n7"]
        one.hello("n1")
        assert one.socket.of("start") == []

    def test_nodes_and_ranks_that_do_not_arrive_are_named(self, play: Callable[..., Play]) -> None:
        one = play()
        one.hello("n1")
        one.wait(59, beating=("n1",))
        assert one.coordinator.outcome is None
        one.wait(2, beating=("n1",))
        failure_class, verdict, evidence = one.end
        assert (failure_class, verdict) == (FailureClass.NOT_ARRIVED, Verdict.REQUEUE)
        assert "n2 (ranks 2-3)" in evidence
        assert "n1" not in evidence
        assert one.intent() == "requeue"
        assert "n1" in one.socket.to("leave")

    def test_nodes_that_cannot_train_together_stop_the_run(self, play: Callable[..., Play]) -> None:
        one = play()
        one.hello("n1")
        one.hello("n2", devices=[{"model": "cpu", "memory_bytes": None}])
        failure_class, verdict, evidence = one.end
        assert (failure_class, verdict) == (FailureClass.ENVIRONMENT, Verdict.STOP)
        assert "n2 has 1 devices" in evidence
        assert one.exit_code == EXIT_DO_NOT_RESTART
        assert one.intent() == "stop"
        assert one.socket.of("start") == []

    def test_a_signal_before_the_first_hello_is_heard(self, play: Callable[..., Play]) -> None:
        """It once was dropped, since its node was no member yet."""
        one = play(scheduler=FakeScheduler(PREEMPTED))
        one.signal("SIGTERM")
        failure_class, verdict, evidence = one.end
        assert (failure_class, verdict) == (FailureClass.PREEMPTED, Verdict.REQUEUE)
        assert "while no worker ran" in evidence
        assert set(one.socket.to("leave")) == set(NODES)

    def test_an_agent_that_fails_before_its_hello_ends_the_wait(
        self, play: Callable[..., Play]
    ) -> None:
        one = play()
        one.hello("n1")
        one.coordinator.on_message("n2", {"type": "agent_failed", "reason": "no route"})
        assert one.end[2] == "n2: its agent failed: no route"

    def test_workers_that_cannot_start_stop_the_run(self, running: Play) -> None:
        running.tell("n2", "start_failed", reason="no python", failure_class="environment")
        assert running.end[0] is FailureClass.ENVIRONMENT
        assert "n2 could not start workers: no python" in running.end[2]
        assert set(running.socket.to("kill")) == set(NODES)


class TestEnds:
    def test_all_finished_is_completed(self, running: Play) -> None:
        running.worker("committed", step=10, bytes=5)
        running.ended("n1", 0, 1)
        assert running.coordinator.outcome is None
        running.ended("n2", 2, 3)
        assert running.end[:2] == (FailureClass.COMPLETED, Verdict.STOP)
        assert running.exit_code == EXIT_OK
        assert running.intent() == "done"
        assert fold(running.events).state is RunState.FINISHED
        assert set(running.socket.to("leave")) == set(NODES)

    def test_a_node_that_missed_the_leave_is_told_again(self, running: Play) -> None:
        running.finished_all()
        before = running.socket.to("leave").count("n2")
        running.beat("n2")
        assert running.socket.to("leave").count("n2") == before + 1

    def test_the_coordinator_may_leave_when_all_others_have(self, running: Play) -> None:
        running.finished_all()
        assert not running.coordinator.everyone_left
        for node in NODES:
            running.coordinator.on_message(node, {"type": "bye"})
        assert running.coordinator.everyone_left

    def test_ends_whose_message_was_lost_come_with_a_heartbeat(self, running: Play) -> None:
        end = {"exit_status": 0, "phase": "finish", "done_step": 10}
        end["last_words"] = {"kind": "finished", "step": 10}
        running.ended("n1", 0, 1)
        running.beat("n2", ended=[{"rank": rank, **end} for rank in (2, 3)])
        assert running.end[0] is FailureClass.COMPLETED

    def test_a_repeated_end_keeps_the_time_of_the_first(self, running: Play) -> None:
        running.failed("n2", 2, failure_class="data")
        running.now += 0.5
        running.failed("n1", 0, 1, failure_class="storage")
        running.now += 0.25
        running.failed("n2", 2, 3, failure_class="data")
        assert running.end[0] is FailureClass.DATA

    def test_a_lost_node_ends_the_generation(self, running: Play) -> None:
        running.wait(3)
        running.wait(6, beating=("n1",))
        assert set(running.socket.to("kill")) == {"n1"}
        running.failed("n1", 0, 1, failure_class="network")
        failure_class, verdict, evidence = running.end
        assert (failure_class, verdict) == (FailureClass.NODE_LOST, Verdict.EXCLUDE_AND_REQUEUE)
        assert "n2 (at step 3)" in evidence
        assert running.intent() == "requeue\nexclude=n2"

    def test_a_stall_of_our_own_is_not_held_against_the_nodes(self, running: Play) -> None:
        running.wait(2)
        running.now += 30
        running.coordinator.tick()
        running.wait(2)
        assert running.coordinator.outcome is None
        assert running.socket.of("kill") == []

    def test_after_a_first_failure_the_others_are_awaited_and_then_killed(
        self, running: Play
    ) -> None:
        running.failed("n2", 3, failure_class="network")
        running.wait(GATHER_S - 0.5)
        assert running.socket.of("kill") == []
        running.wait(1)
        assert set(running.socket.to("kill")) == set(NODES)
        killed = {"exit_status": -9, "last_words": None, "phase": "step"}
        running.ended("n1", 0, 1, **killed)
        running.ended("n2", 2, **killed)
        failure_class, _, evidence = running.end
        assert failure_class is FailureClass.NETWORK
        assert "rank 3 on n2" in evidence

    def test_the_others_of_a_worker_that_was_killed_from_outside_are_killed_at_once(
        self, running: Play
    ) -> None:
        running.ended("n2", 3, exit_status=-9, last_words=None)
        assert set(running.socket.to("kill")) == set(NODES)

    def test_the_others_of_a_worker_that_aborted_are_awaited(self, running: Play) -> None:
        """A library aborts where another rank was lost: that one is still to be heard of."""
        running.ended("n2", 3, exit_status=-6, last_words=None)
        assert running.socket.of("kill") == []

    def test_a_worker_that_does_not_leave_with_the_others_is_killed(self, running: Play) -> None:
        """One that hung in its teardown once held all nodes until the time limit."""
        running.ended("n1", 0, 1)
        running.ended("n2", 2)
        running.wait(LEAVE_S - 1)
        assert running.socket.of("kill") == []
        running.wait(2)
        assert set(running.socket.to("kill")) == set(NODES)
        running.ended("n2", 3, exit_status=-9)
        assert running.end[1] is Verdict.REQUEUE
        assert "rank 3 on n2" in running.end[2]

    def test_a_failure_after_others_left_is_not_waited_for_longer(self, running: Play) -> None:
        running.ended("n1", 0, 1)
        running.failed("n2", 2)
        running.wait(GATHER_S + 1)
        assert set(running.socket.to("kill")) == set(NODES)

    def test_nodes_that_beat_but_report_no_end_of_their_killed_workers_are_lost(
        self, running: Play
    ) -> None:
        running.failed("n2", 3, failure_class="network")
        running.ended("n2", 2, exit_status=-9, last_words=None)
        running.wait(GATHER_S + KILL_WAIT_S + 1)
        assert running.end[0] is FailureClass.NODE_LOST
        assert running.end[2] == "no word from n1 (at step 3)"

    def test_a_user_error_is_not_retried(self, running: Play) -> None:
        running.failed_all("user_error")
        assert running.end[:2] == (FailureClass.USER_ERROR, Verdict.STOP)
        assert running.exit_code == EXIT_DO_NOT_RESTART
        assert running.intent() == "stop"
        assert fold(running.events).state is RunState.FAILED

    def test_the_third_failure_without_progress_stops(self, play: Callable[..., Play]) -> None:
        for attempt in range(3):
            one = play(restart_count=attempt)
            one.hello(*NODES)
            one.failed_all("network")
            expected = Verdict.STOP if attempt == 2 else Verdict.REQUEUE
            assert one.end[1] is expected
            assert one.intent(attempt) == str(expected)

    def test_attempts_that_end_without_a_word_use_up_the_budget(
        self, play: Callable[..., Play]
    ) -> None:
        """A run that takes its first node down was once restarted without end."""
        for attempt in range(3):
            one = play(restart_count=attempt)
            one.hello(*NODES)
            assert one.coordinator.outcome is None
        last = play(restart_count=3)
        failure_class, verdict, evidence = last.end
        assert (failure_class, verdict) == (FailureClass.UNKNOWN, Verdict.STOP)
        assert "attempt 3 ended without a word" in evidence
        assert last.intent(3) == "stop"

    def test_an_attempt_that_slurm_ended_in_its_save_costs_nothing(
        self, play: Callable[..., Play]
    ) -> None:
        for attempt in range(6):
            one = play(restart_count=attempt)
            one.hello(*NODES)
            one.signal("SIGTERM")
        assert play(restart_count=6).coordinator.outcome is None


class TestFailures:
    @pytest.mark.parametrize(
        ("error", "failure_class", "verdict"),
        [
            (OSError(28, "No space left on device"), FailureClass.STORAGE, Verdict.REQUEUE),
            (EnvironmentFailure("no list"), FailureClass.ENVIRONMENT, Verdict.STOP),
            (KeyError("step"), FailureClass.UNKNOWN, Verdict.REQUEUE),
        ],
    )
    def test_an_error_of_the_coordinators_own_process_has_a_verdict(
        self, running: Play, error: Exception, failure_class: FailureClass, verdict: Verdict
    ) -> None:
        """The job once ended without one, and nothing started it again."""
        running.coordinator.fail(error)
        assert running.end[:2] == (failure_class, verdict)
        assert "the agent on n1 failed" in running.end[2]
        assert running.intent() == str(verdict)
        assert set(running.socket.to("kill")) == set(NODES)

    def test_a_disk_that_takes_no_probe_leaves_the_verdict_standing(
        self, running: Play, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> bool:
            raise OSError(122, "Disk quota exceeded")

        monkeypatch.setattr(ending, "still_newest", full)
        monkeypatch.setattr(ending, "read_ledger", full)
        running.signal("SIGTERM")
        running.failed_all("storage")
        assert running.coordinator.outcome is not None
        assert any("Disk quota exceeded" in text for text in running.said)


class TestStops:
    def agree(self, one: Play, *steps: int) -> None:
        for node, step in zip(NODES, steps, strict=True):
            one.tell(node, "begun", step=step)

    def test_all_stop_at_the_largest_begun_step(self, play: Callable[..., Play]) -> None:
        one = play(scheduler=FakeScheduler(PREEMPTED))
        one.hello(*NODES)
        one.signal("SIGTERM", "n2")
        one.signal("SIGTERM", "n1")
        assert sorted(one.socket.to("stop")) == ["n1", "n2"]
        self.agree(one, 6, 7)
        assert {message["step"] for _, message in one.socket.of("target")} == {7}
        assert one.event(Kind.STOP_AGREED).facts["target_step"] == 7
        assert fold(one.events).state is RunState.SAVING
        assert one.scheduler.asked == 0
        one.worker("committed", step=7, bytes=5)
        one.stopped_all(7)
        failure_class, verdict, evidence = one.end
        assert (failure_class, verdict) == (FailureClass.PREEMPTED, Verdict.REQUEUE)
        assert "stopped at step 7" in evidence
        assert one.scheduler.asked == 1
        assert one.intent() == "requeue"
        assert one.event(Kind.SIGNAL).facts == {"name": "SIGTERM", "node": "n2"}

    def test_a_node_that_does_not_report_lets_the_deadline_pass(self, running: Play) -> None:
        running.signal("SIGTERM")
        running.tell("n1", "begun", step=6)
        running.wait(21)
        assert any("n2 did not report" in text for text in running.said)
        assert set(running.socket.to("kill")) == set(NODES)

    def test_a_node_that_missed_a_word_hears_it_again(self, running: Play) -> None:
        """A broken connection loses what was on its way."""
        running.signal("SIGTERM")
        running.tell("n1", "begun", step=6)
        running.socket.sent.clear()
        running.beat("n1", "n2")
        assert running.socket.to("stop") == ["n2"]
        running.tell("n2", "begun", step=7)
        running.socket.sent.clear()
        running.beat("n1")
        assert ("n1", {"type": "target", "token": "1.1", "step": 7}) in running.socket.sent

    def test_a_node_that_missed_its_start_is_told_again(self, running: Play) -> None:
        """Its workers were once awaited by all others until the rendezvous timed out."""
        first = dict(running.socket.of("start"))["n2"]
        running.socket.sent.clear()
        running.beat("n1")
        running.beat("n2", token=None)
        assert running.socket.of("start") == [("n2", first)]

    def test_a_save_that_takes_too_long_is_ended(self, running: Play) -> None:
        running.signal("SIGTERM")
        self.agree(running, 6, 6)
        running.wait(19)
        assert running.socket.of("kill") == []
        running.wait(2)
        assert set(running.socket.to("kill")) == set(NODES)

    def test_a_node_lost_during_the_stop_does_not_change_the_cause(
        self, play: Callable[..., Play]
    ) -> None:
        one = play(scheduler=FakeScheduler(PREEMPTED))
        one.hello(*NODES)
        one.wait(2)
        one.signal("SIGTERM")
        one.wait(6, beating=("n1",))
        one.ended("n1", 0, 1, exit_status=-9, last_words=None)
        failure_class, _, evidence = one.end
        assert failure_class is FailureClass.PREEMPTED
        assert "not saved" in evidence

    def test_our_own_timer_rings_ahead_of_the_limit(self, play: Callable[..., Play]) -> None:
        one = play(scheduler=FakeScheduler(RUNNING, end_time=1e9 + 1000 + 600))
        one.hello(*NODES)
        lead_s = read_run_yaml(one.run.run_yaml.read_text()).plan.lead_s
        one.wait(600 - lead_s - 2)
        assert one.socket.of("stop") == []
        one.wait(4)
        assert set(one.socket.to("stop")) == set(NODES)
        assert one.event(Kind.SIGNAL).facts["name"] == "timer"

    def test_workers_that_finish_meanwhile_have_completed(self, running: Play) -> None:
        running.signal("SIGTERM")
        self.agree(running, 10, 10)
        running.finished_all()
        assert running.end[0] is FailureClass.COMPLETED
        assert running.scheduler.asked == 0
