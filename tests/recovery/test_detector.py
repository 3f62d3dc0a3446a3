"""The detector of dead nodes, rule by rule."""

from __future__ import annotations

import itertools

import pytest

from air_hpc.config.spec import RecoverySpec
from air_hpc.recovery.detector import Answer, Detector, DetectorPolicy, Lost, Probe

POLICY = DetectorPolicy.from_spec(RecoverySpec())
TICK_S = 0.1


class Watch:
    """A detector and its nodes, by hand: who beats, and how a port answers."""

    def __init__(self, *nodes: str, policy: DetectorPolicy = POLICY, proven: bool = True) -> None:
        self.now = 100.0
        self.detector = Detector(policy)
        self.answers = dict.fromkeys(nodes, Answer.CONNECTED if proven else Answer.SILENT)
        self.beating = set(nodes)
        self.probes: list[tuple[float, str]] = []
        self.lost: dict[str, Lost] = {}
        self._pending: list[tuple[float, str, Answer]] = []
        self.lost_at: dict[str, float] = {}
        for node in nodes:
            self.detector.watch(node, self.now)
        self.wait(3.0)
        self.probes.clear()

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.turn()

    def turn(self) -> None:
        for node in self.beating:
            self.detector.heard(node, self.now)
        due = [p for p in self._pending if p[0] <= self.now + 1e-9]
        self._pending = [p for p in self._pending if p not in due]
        for _, node, answer in due:
            self.detector.probed(node, answer, self.now)
        for action in self.detector.tick(self.now):
            if isinstance(action, Lost):
                self.lost[action.node] = action
                self.lost_at[action.node] = self.now
            else:
                self.probes.append((self.now, action.node))
                answer = self.answers[action.node]
                takes = POLICY.probe_timeout_s if answer is Answer.SILENT else 0.0
                self._pending.append((self.now + takes, action.node, answer))

    def falls_silent(self, node: str, answer: Answer) -> float:
        self.beating.discard(node)
        self.answers[node] = answer
        return self.now


def test_nodes_that_beat_are_probed_once_and_never_again() -> None:
    watch = Watch("a", "b")
    watch.wait(100)
    assert not watch.probes
    assert not watch.lost
    assert not watch.detector.unproven


def test_a_dead_agent_is_found_by_the_first_refusal() -> None:
    watch = Watch("a", "b")
    at = watch.falls_silent("b", Answer.REFUSED)
    watch.wait(5)
    assert watch.lost_at["b"] - at <= POLICY.suspect_s + 0.3
    assert "nobody listens" in watch.lost["b"].why
    assert "a" not in watch.lost
    assert watch.detector.watched == ("a",)


def test_a_dead_machine_is_found_within_the_heartbeat_timeout() -> None:
    watch = Watch("a")
    at = watch.falls_silent("a", Answer.SILENT)
    watch.wait(10)
    assert 4.5 <= watch.lost_at["a"] - at <= 5.0 + 1e-6
    assert "machine" in watch.lost["a"].why


def test_a_machine_that_dies_after_it_answered_is_found_as_soon() -> None:
    watch = Watch("a")
    watch.falls_silent("a", Answer.CONNECTED)
    watch.wait(8)
    at = watch.now
    watch.answers["a"] = Answer.SILENT
    watch.wait(7)
    assert watch.lost_at["a"] - at <= 5.0 + 1e-6


def test_a_stopped_agent_keeps_its_node_until_patience_ends() -> None:
    watch = Watch("a")
    at = watch.falls_silent("a", Answer.CONNECTED)
    watch.wait(14.5)
    assert not watch.lost
    watch.wait(1)
    assert watch.lost_at["a"] - at == pytest.approx(POLICY.patience_s, abs=0.2)
    assert "starved, stopped or hung" in watch.lost["a"].why


def test_a_beat_clears_everything() -> None:
    watch = Watch("a")
    watch.falls_silent("a", Answer.CONNECTED)
    watch.wait(12)
    watch.beating.add("a")
    watch.wait(0.2)
    watch.beating.clear()
    watch.wait(14)
    assert not watch.lost


def test_probes_of_a_node_begin_at_least_a_second_apart() -> None:
    watch = Watch("a")
    watch.falls_silent("a", Answer.CONNECTED)
    for _ in range(14):
        watch.detector.suspect_all(watch.now)
        watch.wait(1.0)
    times = [at for at, _ in watch.probes]
    assert len(times) >= 10
    assert all(b - a >= 1.0 - 1e-6 for a, b in itertools.pairwise(times))


def test_a_long_patience_spaces_its_probes_so_that_a_backlog_never_fills() -> None:
    policy = DetectorPolicy.from_spec(RecoverySpec(lease_s=600))
    watch = Watch("a", policy=policy)
    watch.falls_silent("a", Answer.CONNECTED)
    watch.wait(599)
    assert not watch.lost
    assert 30 < len(watch.probes) <= 65


def test_suspecting_everybody_finds_the_dead_one_among_those_that_beat() -> None:
    watch = Watch("a", "b", "c")
    at = watch.falls_silent("b", Answer.REFUSED)
    watch.wait(0.2)
    watch.detector.suspect_all(watch.now)
    watch.wait(3)
    assert watch.lost_at["b"] - at <= 0.2 + POLICY.probe_timeout_s + 0.3
    first, second = [begun for begun, node in watch.probes if node == "b" and begun > at]
    assert second - first >= POLICY.probe_timeout_s - 1e-6
    assert set(watch.lost) == {"b"}


def test_one_refusal_of_a_node_that_was_just_heard_is_not_enough() -> None:
    watch = Watch("a")
    watch.answers["a"] = Answer.REFUSED
    watch.beating.clear()
    watch.detector.suspect_all(watch.now)
    watch.wait(0.2)
    assert len(watch.probes) == 1
    watch.beating.add("a")
    watch.wait(20)
    assert not watch.lost


def test_a_refusal_that_a_beat_contradicts_says_nothing() -> None:
    detector = Detector(POLICY)
    detector.watch("a", 0.0)
    assert detector.tick(0.0) == [Probe("a")]
    detector.probed("a", Answer.CONNECTED, 0.0)
    assert detector.tick(1.6) == [Probe("a")]
    detector.heard("a", 1.7)
    detector.probed("a", Answer.REFUSED, 1.8)
    assert detector.tick(1.9) == []


def test_a_stall_of_the_observer_is_held_against_nobody() -> None:
    watch = Watch("a", "b")
    watch.falls_silent("b", Answer.CONNECTED)
    watch.now += 100
    watch.detector.heard("a", watch.now)
    watch.detector.forgive(100, watch.now)
    at = watch.now
    watch.wait(10)
    assert not watch.lost
    # And what was read after the stall counts from then, not from the stall's length later.
    watch.beating.clear()
    watch.answers["a"] = Answer.REFUSED
    watch.wait(2)
    assert watch.lost_at["a"] - at <= 12.1


def test_a_port_that_never_answered_proves_nothing_by_refusing() -> None:
    """A firewall that rejects once looked like a thousand dead agents."""
    watch = Watch("a", "b", proven=False)
    watch.answers["a"] = Answer.REFUSED
    watch.wait(60)
    assert watch.detector.unproven == ("a", "b")
    watch.beating.clear()
    watch.wait(14)
    assert not watch.lost
    watch.wait(1.5)
    assert set(watch.lost) == {"a", "b"}


def test_an_observer_that_could_not_ask_waits_for_patience() -> None:
    watch = Watch("a")
    watch.falls_silent("a", Answer.UNKNOWN)
    watch.wait(14)
    assert not watch.lost
    watch.wait(1.5)
    assert "a" in watch.lost


def test_a_probe_whose_answer_is_lost_is_made_again() -> None:
    detector = Detector(POLICY)
    detector.watch("a", 0.0)
    assert detector.tick(0.0) == [Probe("a")]
    assert detector.tick(1.4) == []
    assert detector.tick(1.9) == []
    assert detector.tick(2.1) == [Probe("a")]


def test_a_node_that_left_is_not_missed() -> None:
    watch = Watch("a", "b")
    watch.falls_silent("a", Answer.REFUSED)
    watch.detector.forget("a")
    watch.wait(20)
    assert not watch.lost
    watch.detector.heard("a", watch.now)
    assert watch.detector.watched == ("b",)


def test_short_times_of_a_config_keep_their_order() -> None:
    policy = DetectorPolicy.from_spec(
        RecoverySpec(heartbeat_interval_s=0.1, heartbeat_timeout_s=1.0, lease_s=0.5)
    )
    assert policy.suspect_s == 0.5
    assert policy.suspect_s + policy.probe_timeout_s <= policy.timeout_s <= policy.patience_s


def test_a_tick_over_thousands_of_beating_nodes_looks_at_few() -> None:
    nodes = [f"n{index}" for index in range(4096)]
    detector = Detector(POLICY)
    looked = 0
    original = detector._look

    def counted(node: object, at: float) -> object:
        nonlocal looked
        looked += 1
        return original(node, at)  # type: ignore[arg-type]

    detector._look = counted  # type: ignore[assignment, method-assign]
    for node in nodes:
        detector.watch(node, 0.0)
    for node in nodes:
        detector.probed(node, Answer.CONNECTED, 0.0)
    for action in detector.tick(0.0):
        assert isinstance(action, Probe)
        detector.probed(action.node, Answer.CONNECTED, 0.0)
    looked = 0
    for tick in range(1, 101):
        if tick % 5 == 0:
            for node in nodes:
                detector.heard(node, tick / 10)
        assert detector.tick(tick / 10) == []
    assert looked < len(nodes) * 15
