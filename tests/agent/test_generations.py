"""Restarts inside the allocation: one generation after another under one attempt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from air_hpc.recovery.exclusions import active
from air_hpc.recovery.hang import RankReport
from air_hpc.rundir.events import Kind
from air_hpc.rundir.exclusions import read_exclusions
from air_hpc.rundir.fence import Token, newest_token
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.state import fold
from air_hpc.rundir.words import FailureClass, RunState, Verdict
from tests.agent.play import BASE as REQUEUES
from tests.agent.play import KILL_WAIT_S, NODES, PREEMPTED, FakeScheduler, Play
from tests.run_builder import build_run

BASE = (*REQUEUES, "recovery.restart=same")


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_run(tmp_path_factory.mktemp("same"), *BASE).run_yaml.read_text()


@pytest.fixture
def one(run: RunDir, same: str, play: Callable[..., Play]) -> Play:
    run.run_yaml.write_text(same)
    started = play()
    started.hello(*NODES)
    return started


def starts(one: Play) -> list[dict[str, Any]]:
    return [message["start"] for node, message in one.socket.of("start") if node == "n1"]


def test_after_a_failure_the_next_generation_starts_on_the_same_nodes(one: Play) -> None:
    one.failed_all("network")
    first, second = starts(one)
    assert (first["token"], second["token"]) == ("1.1", "1.2")
    assert second["ranks"] == first["ranks"]
    assert second["master_port"] != first["master_port"], "the old one may still be taken"
    assert newest_token(one.run) == Token(1, 2)
    ended = one.event(Kind.GENERATION_ENDED)
    assert ended.facts["verdict"] == Verdict.CONTINUE
    assert ended.token == Token(1, 1)
    status = fold(one.events)
    assert (status.state, status.attempt, status.generation) == (RunState.STARTING, 1, 2)
    assert [end.failure_class for end in status.ends] == [FailureClass.NETWORK]
    assert one.scheduler.asked == 0, "what an attempt survives is no business of Slurm's"


def test_a_generation_ended_before_its_workers_started_is_not_the_end_of_the_run(
    one: Play,
) -> None:
    """No end of any worker was once taken for all ends being good, and the run for finished."""
    one.signal("SIGTERM")
    one.wait(21)
    assert sorted(set(one.socket.to("kill"))) == list(NODES)
    for node in NODES:
        one.tell(node, "none_here")
    assert one.end[:2] == (FailureClass.CANCELLED, Verdict.STOP)
    assert fold(one.events).state is RunState.CANCELLED


def test_the_third_failure_without_progress_stops_the_run_inside_the_attempt(one: Play) -> None:
    one.failed_all("network")
    one.failed_all("network")
    assert len(starts(one)) == 2
    one.wait(1.5)
    assert len(starts(one)) == 3
    one.failed_all("network")
    assert one.end[:2] == (FailureClass.NETWORK, Verdict.STOP)
    assert one.intent() == "stop"


def test_what_an_older_generation_still_says_is_not_the_present_ones(one: Play) -> None:
    one.failed_all("network")
    old = {"rank": 0, "exit_status": 1, "phase": "step", "done_step": 1, "last_words": None}
    message = {"type": "ended", "token": "1.1", "workers": [old]}
    one.coordinator.on_message("n1", message)
    one.wait(3)
    assert one.socket.of("kill") == []


def test_a_lost_node_leaves_too_few_and_the_job_is_requeued(one: Play) -> None:
    one.wait(2)
    one.wait(6, beating=("n1",))
    one.failed("n1", 0, 1, failure_class="network")
    assert one.end[:2] == (FailureClass.NODE_LOST, Verdict.EXCLUDE_AND_REQUEUE)
    assert one.event(Kind.NODE_LOST).facts["node"] == "n2"


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_node_that_slurm_lost_trains_no_further_though_it_works(one: Play, node: str) -> None:
    """Under --no-kill the run went on there, on devices that Slurm could give to another job."""
    one.tell(node, "disowned")
    assert sorted(one.socket.to("kill")) == sorted(set(NODES) - ({node} - {"n1"}))
    for other, ranks in (("n1", (0, 1)), ("n2", (2, 3))):
        one.failed(other, *ranks)
    failure_class, verdict, _ = one.end
    assert (failure_class, verdict) == (FailureClass.NODE_LOST, Verdict.REQUEUE)
    assert one.event(Kind.NODE_LOST).facts["node"] == node
    assert one.intent() == "requeue"


def test_a_lost_node_that_is_heard_again_is_told_to_leave(one: Play) -> None:
    one.wait(2)
    one.wait(6, beating=("n1",))
    one.beat("n2")
    assert "n2" in one.socket.to("leave")
    assert "n1" not in one.socket.to("leave")


def test_a_signal_in_the_pause_between_generations_ends_the_attempt(
    one: Play, play: Callable[..., Play]
) -> None:
    one.scheduler.said = PREEMPTED
    one.failed_all("network")
    one.failed_all("network")
    one.signal("SIGTERM")
    assert one.end[:2] == (FailureClass.PREEMPTED, Verdict.REQUEUE)
    assert "while no worker ran" in one.end[2]
    one.wait(5)
    assert len(starts(one)) == 2


def test_a_node_that_never_heard_of_its_start_does_not_hold_up_the_next(one: Play) -> None:
    one.failed("n1", 0, 1, failure_class="network")
    one.wait(1.5, beating=())
    assert set(one.socket.to("kill")) == set(NODES)
    one.tell("n2", "none_here")
    assert [s["token"] for s in starts(one)] == ["1.1", "1.2"]


def test_a_preemption_is_never_continued_inside_the_allocation(
    one: Play, play: Callable[..., Play]
) -> None:
    one.scheduler.said = PREEMPTED
    one.signal("SIGTERM")
    for node in NODES:
        one.tell(node, "begun", step=6)
    one.failed_all("network")
    assert one.end[0] is FailureClass.PREEMPTED
    assert one.end[1] is Verdict.REQUEUE


def test_nodes_that_send_no_end_after_the_kill_are_given_up(one: Play) -> None:
    one.failed("n1", 0, 1, failure_class="network")
    one.wait(2 + KILL_WAIT_S)
    assert one.event(Kind.NODE_LOST).facts["node"] == "n2"
    assert one.end[:2] == (FailureClass.NODE_LOST, Verdict.REQUEUE)


def test_a_start_after_ends_that_nobody_judged_asks_the_budget_first(
    tmp_path: Path, run: RunDir, same: str, play: Callable[..., Play]
) -> None:
    run.run_yaml.write_text(same)
    for attempt in range(2):
        before = play(restart_count=attempt)
        before.hello(*NODES)
        before.failed_all("network")  # and then its coordinator is killed
    last = play(restart_count=2, scheduler=FakeScheduler())
    assert last.end[1] is Verdict.STOP


def overdue(rank: int = 2) -> dict[str, Any]:
    return {"rank": rank, "phase": "step", "step": 4, "for_s": 301.0, "limit_s": 300.0}


def report(rank: int, node: str, **facts: Any) -> dict[str, Any]:
    known = {"state": "S", "answered": True, "phase": "step", "begun": 4, "done": 3}
    return RankReport(**{"rank": rank, "node": node, **known, **facts}).to_json()


def test_a_hang_is_looked_into_on_all_nodes_named_and_restarted(one: Play) -> None:
    one.beat("n2", overdue=[overdue()])
    assert one.socket.to("inspect") == ["n1", "n2"]
    one.beat("n1", overdue=[overdue(0)])
    assert len(one.socket.to("inspect")) == 2, "once"
    one.tell("n1", "inspected", reports=[report(0, "n1"), report(1, "n1")])
    one.wait(1)
    assert one.socket.of("kill") == []
    stopped = report(3, "n2", state="T", answered=False)
    one.tell("n2", "inspected", reports=[report(2, "n2"), stopped])
    one.wait(0.5)
    found = one.event(Kind.HANG_FOUND).facts
    assert (found["rank"], found["node"], found["phase"]) == (3, "n2", "step")
    one.failed_all("unknown")
    ended = one.event(Kind.GENERATION_ENDED).facts
    assert (ended["failure_class"], ended["verdict"]) == ("hang", "continue")
    assert "rank 3 on n2" in ended["evidence"]
    assert len(starts(one)) == 2


def test_a_node_that_does_not_answer_the_question_is_blamed(one: Play) -> None:
    one.beat("n2", overdue=[overdue()])
    one.tell("n1", "inspected", reports=[report(0, "n1"), report(1, "n1")])
    one.wait(9)
    assert one.event(Kind.HANG_FOUND).facts["node"] == "n2"


def test_a_dead_agent_is_found_as_soon_as_a_worker_misses_it(one: Play) -> None:
    one.wait(2)
    one.prober.gone = {"n2"}
    one.failed("n1", 0, failure_class="network")
    for _ in range(25):
        one.now += 0.1
        one.beat("n1")
        one.coordinator.tick()
    lost = one.event(Kind.NODE_LOST).facts
    assert lost["node"] == "n2"
    assert "its agent is gone" in lost["why"]


def test_a_starved_agent_is_not_taken_for_dead(one: Play) -> None:
    one.wait(2)
    for _ in range(12):
        one.now += 1
        one.beat("n1")
        one.coordinator.tick()
    one.beat("n2")
    assert one.socket.of("kill") == []


def test_a_slow_rank_stands_in_the_ledger_with_its_node(one: Play) -> None:
    for second in range(1, 140):
        total = second * 10**9
        one.beat("n1", compute={"0": [total, second * 10], "1": [total, second * 10]})
        one.beat("n2", compute={"2": [total, second * 10], "3": [2 * total, second * 10]})
        one.wait(1)
    slow = one.event(Kind.STRAGGLER).facts
    assert (slow["rank"], slow["node"], slow["device"]) == (3, "n2", "cpu")
    assert slow["ratio"] == pytest.approx(2.0, abs=0.1)
    assert [each.rank for each in fold(one.events).stragglers] == [3]


def test_a_slow_rank_is_evidence_against_its_node_where_the_config_wants_it(
    tmp_path: Path, play: Callable[..., Play]
) -> None:
    one = play(run=build_run(tmp_path / "runs", *BASE, "recovery.straggler.exclude=true"))
    one.hello(*NODES)
    for second in range(1, 140):
        total = second * 10**9
        one.beat("n1", compute={"0": [total, second * 10], "1": [total, second * 10]})
        one.beat("n2", compute={"2": [total, second * 10], "3": [2 * total, second * 10]})
        one.wait(1)
    (standing,) = active(read_exclusions(one.run.runs_dir).entries, one.now + 1e9)
    assert standing.node == "n2"
    assert "straggler" in standing.reason
    assert one.socket.of("kill") == []


THREE = (*NODES, "n3")


class TestFewerNodes:
    def begin(self, folder: Path, play: Callable[..., Play], *overrides: str) -> Play:
        one = play(run=build_run(folder / "runs", *REQUEUES, *overrides), nodes=THREE)
        one.hello(*THREE)
        one.wait(2, beating=THREE)
        return one

    def started_on(self, one: Play) -> list[list[str]]:
        return [
            list(event.facts["nodes"])
            for event in one.events
            if event.kind == Kind.GENERATION_STARTED
        ]

    def test_a_spare_takes_the_place_of_a_lost_node(
        self, tmp_path: Path, play: Callable[..., Play]
    ) -> None:
        one = self.begin(tmp_path, play, "recovery.restart=spare", "recovery.spare_nodes=1")
        assert "n3" not in one.socket.to("start")
        one.wait(6, beating=("n1", "n3"))
        one.failed("n1", 0, 1, failure_class="network")
        assert self.started_on(one) == [["n1", "n2"], ["n1", "n3"]]
        ended = one.event(Kind.GENERATION_ENDED).facts
        assert (ended["failure_class"], ended["verdict"]) == ("node_lost", "continue")

    def test_a_machine_that_died_is_avoided_for_a_while(
        self, tmp_path: Path, play: Callable[..., Play]
    ) -> None:
        """Slurm takes minutes to find out, and could hand it out again."""
        one = self.begin(tmp_path, play, "recovery.restart=spare", "recovery.spare_nodes=1")
        one.wait(6, beating=("n1", "n3"))
        (standing,) = active(read_exclusions(one.run.runs_dir).entries, one.now + 1e9)
        assert (standing.node, standing.failure_class) == ("n2", "node_lost")
        assert standing.until - standing.time == 3600

    def test_an_agent_that_died_alone_is_held_against_no_machine(
        self, tmp_path: Path, play: Callable[..., Play]
    ) -> None:
        one = self.begin(tmp_path, play, "recovery.restart=spare", "recovery.spare_nodes=1")
        one.prober.gone = {"n2"}
        for _ in range(40):
            one.now += 0.1
            one.beat("n1", "n3")
            one.coordinator.tick()
        assert one.event(Kind.NODE_LOST).facts["node"] == "n2"
        assert read_exclusions(one.run.runs_dir).entries == ()

    def test_a_lost_spare_disturbs_nobody(self, tmp_path: Path, play: Callable[..., Play]) -> None:
        one = self.begin(tmp_path, play, "recovery.restart=spare", "recovery.spare_nodes=1")
        one.wait(6, beating=NODES)
        assert one.event(Kind.NODE_LOST).facts["node"] == "n3"
        assert one.socket.of("kill") == []

    def test_an_elastic_run_goes_on_with_fewer_replicas(
        self, tmp_path: Path, play: Callable[..., Play]
    ) -> None:
        one = self.begin(
            tmp_path, play, "launch.nodes=3", "recovery.restart=elastic", "recovery.min_nodes=2",
            "train.global_batch_size=24", "train.micro_batch_size=2",
        )  # fmt: skip
        one.wait(6, beating=("n1", "n3"))
        one.failed("n1", 0, 1, failure_class="network")
        one.failed("n3", 4, 5, failure_class="network")
        assert self.started_on(one) == [["n1", "n2", "n3"], ["n1", "n3"]]
        again = [m["start"] for n, m in one.socket.of("start") if n == "n3"][-1]
        assert (again["world_size"], list(again["ranks"]), again["node_rank"]) == (4, [2, 3], 1)
        one.wait(6, beating=("n1",))
        one.failed("n1", 0, 1, failure_class="network")
        assert one.end[:2] == (FailureClass.NODE_LOST, Verdict.EXCLUDE_AND_REQUEUE)

    def fail_device(self, one: Play) -> None:
        """A device of n2 fails, and n2's own checks show it."""
        one.failed("n2", 2, failure_class="device")
        one.failed("n2", 3, failure_class="network")
        one.failed("n1", 0, 1, failure_class="network")
        if self.started_on(one) == [list(THREE)]:
            one.failed("n3", 4, 5, failure_class="network")
        assert one.socket.to("preflight") == list(THREE)
        ecc = {"name": "ecc", "ok": False, "said": "3 uncorrected errors"}
        for node in THREE:
            checks = [ecc] if node == "n2" else []
            message = {"type": "preflight", "request": "1.1", "checks": checks}
            one.coordinator.on_message(node, message)
        one.wait(0.5, beating=THREE)

    def test_a_node_whose_device_failed_is_left_out_and_avoided(
        self, tmp_path: Path, play: Callable[..., Play]
    ) -> None:
        one = self.begin(tmp_path, play, "recovery.restart=spare", "recovery.spare_nodes=1")
        self.fail_device(one)
        assert self.started_on(one) == [["n1", "n2"], ["n1", "n3"]]
        (standing,) = active(read_exclusions(one.run.runs_dir).entries, one.now + 1e9)
        assert (standing.node, standing.failure_class) == ("n2", "device")
        assert "3 uncorrected errors" in one.event(Kind.NODE_EXCLUDED).facts["reason"]

    def test_a_device_that_fails_without_a_spare_is_told_with_the_requeue(
        self, tmp_path: Path, play: Callable[..., Play]
    ) -> None:
        one = self.begin(tmp_path, play, "launch.nodes=3", "recovery.restart=same",
                         "train.global_batch_size=24")  # fmt: skip
        self.fail_device(one)
        assert one.end[:2] == (FailureClass.DEVICE, Verdict.EXCLUDE_AND_REQUEUE)
        assert one.intent() == "requeue\nexclude=n2"

    def test_a_device_that_fails_twice_is_left_out_whatever_its_checks_say(
        self, tmp_path: Path, play: Callable[..., Play]
    ) -> None:
        one = self.begin(tmp_path, play, "recovery.restart=spare", "recovery.spare_nodes=1")
        for _ in range(2):
            one.failed("n2", 2, failure_class="device")
            one.failed("n2", 3, failure_class="network")
            one.failed("n1", 0, 1, failure_class="network")
            one.wait(16, beating=THREE)
        assert self.started_on(one) == [["n1", "n2"], ["n1", "n2"], ["n1", "n3"]]

    def test_a_node_that_fails_its_pre_flight_takes_no_part(
        self, tmp_path: Path, play: Callable[..., Play]
    ) -> None:
        overrides = ("recovery.restart=spare", "recovery.spare_nodes=1")
        one = play(run=build_run(tmp_path / "runs", *REQUEUES, *overrides), nodes=THREE)
        bad = {"name": "clocks", "ok": False, "said": "hardware slowdown"}
        one.hello("n1", facts={"liveness_port": 9, "preflight": [bad], "preflight_s": 0.3})
        one.hello("n2", "n3")
        assert self.started_on(one) == [["n2", "n3"]]
        assert one.event(Kind.PREFLIGHT).facts["checks"] == [bad]
        assert one.event(Kind.NODE_EXCLUDED).facts["node"] == "n1"


class TestClocks:
    def arrive(self, one: Play, node: str, hello_s: float, beat_s: float) -> None:
        """A node whose messages show its clock so far from ours as they are read."""
        wall = one.now + 1e9
        facts = {"liveness_port": 9, "wall_time": wall + hello_s}
        hello = {"type": "hello", "index": 0, "boot_id": "one", "address": "127.0.0.1"}
        hello |= {"ports": [20001], "devices": [{"model": "cpu"}] * 2, "facts": facts}
        one.coordinator.on_message(node, hello)
        beat = {"type": "heartbeat", "sequence": 1, "wall_time": wall + beat_s}
        one.coordinator.on_message(node, beat)

    def test_a_hello_that_waited_for_its_coordinator_shows_no_clock(
        self, play: Callable[..., Play]
    ) -> None:
        """A node that began ten seconds before the first one was once left out for a day."""
        one = play()
        self.arrive(one, "n2", -10.0, -0.1)
        self.arrive(one, "n1", 0.0, 0.0)
        assert sorted(one.socket.to("start")) == list(NODES)

    def test_nor_does_a_beat_that_waited_for_a_coordinator_that_stood_still(
        self, play: Callable[..., Play]
    ) -> None:
        one = play()
        one.now += 8
        self.arrive(one, "n2", -8.0, -8.0)
        self.arrive(one, "n1", 0.0, 0.0)
        assert sorted(one.socket.to("start")) == list(NODES)

    def test_a_node_whose_clock_is_off_takes_no_part(self, play: Callable[..., Play]) -> None:
        one = play()
        self.arrive(one, "n2", 0.0, -10.0)
        self.arrive(one, "n1", 0.0, 0.0)
        assert one.end[0] is FailureClass.DEVICE
        assert "10.0 s behind" in one.end[2]


class TestDivergedLoss:
    def diverge(self, one: Play, action: str) -> None:
        facts = {"action": action, "reason": "loss is nan", "bad_step": 9, "from_step": 4}
        facts |= {"first_batch": 4, "last_batch": 8}
        words = {"kind": "error", "type": "LossDiverged", "message": "loss is nan"}
        words |= {"failure_class": "diverged", "facts": facts}
        for node, ranks in (("n1", (0, 1)), ("n2", (2, 3))):
            one.ended(node, *ranks, exit_status=1, phase="step", last_words=words)

    def test_a_rollback_steps_over_the_batches_that_it_names(self, one: Play) -> None:
        self.diverge(one, "rollback")
        assert one.event(Kind.DATA_SKIPPED).facts["first_batch"] == 4
        first, second = starts(one)
        assert list(first["skipped_batches"]) == []
        assert [tuple(pair) for pair in second["skipped_batches"]] == [(4, 8)]

    def test_a_guard_that_has_given_up_stops_the_run(self, one: Play) -> None:
        self.diverge(one, "stop")
        assert one.end[:2] == (FailureClass.DIVERGED, Verdict.STOP)
