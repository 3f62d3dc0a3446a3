"""The restart machine: its stories one by one, then any events in any order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from air_hpc.config.spec import RecoverySpec
from air_hpc.recovery.decide import NOT_RETRIED, decide
from air_hpc.recovery.restart import (
    Action,
    Decide,
    GiveUp,
    Kill,
    Phase,
    RestartMachine,
    RestartPolicy,
    SetFlag,
    SetTarget,
    Start,
    StoppedIdle,
    TooFew,
)
from air_hpc.rundir.state import End
from air_hpc.rundir.words import FREE, FailureClass, Verdict

START_TIMEOUT_S, STOP_TIMEOUT_S, SETTLE_S = 100.0, 50.0, 10.0
GATHER_S, LEAVE_S, KILL_WAIT_S = 1.0, 300.0, 10.0


def policy(*sizes: int) -> RestartPolicy:
    return RestartPolicy(
        sizes,
        START_TIMEOUT_S,
        STOP_TIMEOUT_S,
        settle_s=SETTLE_S,
        gather_s=GATHER_S,
        leave_s=LEAVE_S,
        kill_wait_s=KILL_WAIT_S,
    )


def started(nodes: str, *sizes: int) -> RestartMachine:
    """A machine whose whole allocation arrived at 0."""
    machine = RestartMachine(nodes, policy(*sizes), 0.0)
    actions = [action for node in nodes for action in machine.arrive(node, 0.0)]
    actions = actions or machine.tick(SETTLE_S)
    assert actions == [Start(1, tuple(nodes[: sizes[0]]))]
    return machine


def die(machine: RestartMachine, node: str, now: float, *others: str) -> None:
    """A worker of `node` fails at `now`; all are killed and say so."""
    machine.ended(node, now, failed=True, all_ended=True)
    machine.tick(now + GATHER_S)
    for other in others:
        machine.ended(other, now + GATHER_S, failed=True, all_ended=True)


class TestArrival:
    def test_the_first_generation_starts_when_the_last_node_has_arrived(self) -> None:
        machine = RestartMachine("abc", policy(3), 0.0)
        assert machine.arrive("c", 1.0) == machine.arrive("a", 2.0) == []
        assert machine.next_deadline == START_TIMEOUT_S
        assert machine.arrive("b", 3.0) == [Start(1, ("a", "b", "c"))]
        assert machine.phase is Phase.RUNNING
        assert machine.active == ("a", "b", "c")

    def test_spares_that_do_not_arrive_are_waited_for_only_so_long(self) -> None:
        machine = RestartMachine("abcd", policy(2), 0.0)
        assert machine.arrive("d", 1.0) == machine.arrive("b", 5.0) == []
        assert machine.next_deadline == 5.0 + SETTLE_S
        assert machine.tick(14.9) == []
        assert machine.tick(15.0) == [Start(1, ("b", "d"))]

    def test_a_generation_that_is_no_longer_full_waits_for_the_others_again(self) -> None:
        """Once, it gave up ten seconds after it had been full, with a spare still to come."""
        machine = RestartMachine("abc", policy(2), 0.0)
        machine.arrive("a", 0.0)
        machine.arrive("b", 0.0)
        assert machine.lose("a", 1.0) == []
        assert machine.next_deadline == START_TIMEOUT_S
        assert machine.tick(SETTLE_S) == []
        assert machine.arrive("c", 20.0) == [Start(1, ("b", "c"))]

    def test_an_elastic_run_starts_smaller_at_the_deadline(self) -> None:
        machine = RestartMachine("abcd", policy(4, 2, 1), 0.0)
        for node in "bcd":
            assert machine.arrive(node, 1.0) == []
        assert machine.tick(START_TIMEOUT_S) == [Start(1, ("b", "c"))]

    def test_who_did_not_arrive_by_the_deadline_is_named(self) -> None:
        machine = RestartMachine("abc", policy(3), 0.0)
        machine.arrive("b", 0.0)
        assert machine.tick(START_TIMEOUT_S) == [TooFew(("a", "c"), 1)]
        assert machine.phase is Phase.DECIDING
        assert not machine.can_continue

    def test_nobody_is_waited_for_once_the_rest_is_lost_or_unfit(self) -> None:
        machine = RestartMachine("abc", policy(3, 1), 0.0)
        machine.arrive("b", 0.0)
        assert machine.lose("a", 1.0) == []
        assert machine.reject("c", 2.0) == [Start(1, ("b",))]

    def test_what_can_no_longer_be_filled_is_not_waited_for(self) -> None:
        machine = RestartMachine("abc", policy(3), 0.0)
        machine.arrive("a", 0.0)
        assert machine.lose("b", 1.0) == [TooFew(("b", "c"), 1)]

    def test_a_node_that_is_not_fit_is_not_started_on(self) -> None:
        machine = RestartMachine("abc", policy(2), 0.0)
        machine.arrive("a", 0.0)
        machine.reject("a", 0.0)
        machine.arrive("b", 0.0)
        assert machine.arrive("c", 0.0) == [Start(1, ("b", "c"))]
        assert machine.unfit == {"a"}

    def test_a_node_of_another_allocation_is_nobody(self) -> None:
        machine = RestartMachine("a", policy(1), 0.0)
        assert machine.arrive("z", 0.0) == machine.lose("z", 0.0) == machine.reject("z", 0.0) == []
        assert not machine.lost | machine.unfit
        assert machine.fit == ()

    def test_a_stop_before_the_start_ends_the_attempt(self) -> None:
        machine = RestartMachine("ab", policy(2), 0.0)
        machine.arrive("a", 0.0)
        assert machine.request_stop("SIGTERM", 1.0) == [StoppedIdle()]
        assert machine.arrive("b", 2.0) == machine.tick(START_TIMEOUT_S) == []
        assert machine.decided(go_on=False, delay_s=0, now=3.0) == []
        assert machine.phase is Phase.OVER


class TestRestart:
    def test_after_a_kill_from_outside_nobody_else_is_awaited(self) -> None:
        """What the others would still say cannot explain it; the run once stood still for it."""
        machine = started("ab", 2)
        acts = machine.ended("b", 1.0, failed=True, all_ended=False, is_cause=True)
        assert [type(act) for act in acts] == [Kill]
        assert machine.ended("a", 1.1, failed=True, all_ended=True, is_cause=True) == []
        assert machine.ended("b", 1.2, failed=True, all_ended=True) == [Decide()]

    def test_a_dead_worker_is_gathered_killed_decided_and_started_again(self) -> None:
        machine = started("ab", 2)
        assert machine.next_deadline is None
        assert machine.ended("a", 20.0, failed=True, all_ended=False) == []
        assert machine.tick(20.9) == []
        assert machine.tick(21.0) == [Kill("the others have ended")]
        assert machine.ended("a", 21.1, failed=True, all_ended=True) == []
        assert machine.ended("b", 21.2, failed=True, all_ended=True) == [Decide()]
        assert machine.can_continue
        assert machine.decided(go_on=True, delay_s=0.0, now=21.3) == [Start(2, ("a", "b"))]

    def test_a_back_off_is_waited_out(self) -> None:
        machine = started("ab", 2)
        die(machine, "a", 20.0, "b")
        assert machine.decided(go_on=True, delay_s=7.0, now=30.0) == []
        assert machine.phase is Phase.PAUSING
        assert machine.next_deadline == 37.0
        assert machine.tick(36.9) == []
        assert machine.tick(37.0) == [Start(2, ("a", "b"))]

    def test_a_spare_takes_the_ranks_of_a_lost_node(self) -> None:
        machine = started("abc", 2)
        assert machine.lose("a", 20.0) == [Kill("node a is lost")]
        assert machine.ended("b", 20.5, failed=True, all_ended=True) == [Decide()]
        assert machine.can_continue
        assert machine.decided(go_on=True, delay_s=0, now=21.0) == [Start(2, ("b", "c"))]
        assert machine.lost == {"a"}

    def test_a_lost_spare_disturbs_nobody(self) -> None:
        machine = started("abc", 2)
        assert machine.lose("c", 20.0) == []
        assert not machine.killed
        assert machine.fit == ("a", "b")

    def test_an_elastic_run_shrinks_to_the_next_size(self) -> None:
        machine = started("abcd", 4, 2, 1)
        machine.lose("b", 20.0)
        for node in "acd":
            actions = machine.ended(node, 20.5, failed=True, all_ended=True)
        assert actions == [Decide()]
        assert machine.decided(go_on=True, delay_s=0, now=21.0) == [Start(2, ("a", "c"))]

    def test_the_full_count_cannot_go_on_without_a_node(self) -> None:
        machine = started("ab", 2)
        machine.lose("b", 20.0)
        assert machine.ended("a", 20.5, failed=True, all_ended=True) == [Decide()]
        assert not machine.can_continue
        assert machine.decided(go_on=False, delay_s=0, now=21.0) == []
        assert machine.phase is Phase.OVER

    def test_all_nodes_lost_is_an_end_too(self) -> None:
        machine = started("ab", 2)
        assert machine.lose("a", 20.0) == [Kill("node a is lost")]
        assert machine.lose("b", 20.0) == [Decide()]

    def test_a_node_that_reports_no_end_of_its_killed_workers_is_given_up(self) -> None:
        machine = started("abc", 3, 2)
        assert machine.condemn("hang", 20.0) == [Kill("hang")]
        assert machine.condemn("again", 21.0) == []
        machine.ended("a", 21.0, failed=True, all_ended=True)
        machine.ended("c", 21.0, failed=True, all_ended=True)
        assert machine.next_deadline == 30.0
        assert machine.tick(30.0) == [GiveUp(("b",)), Decide()]
        assert machine.decided(go_on=True, delay_s=0, now=31.0) == [Start(2, ("a", "c"))]

    def test_a_policy_that_always_leaves_cannot_continue_after_the_first(self) -> None:
        leaves = replace(policy(2), restarts_inside=False)
        machine = RestartMachine("ab", leaves, 0.0)
        assert machine.can_continue is False
        machine.arrive("a", 0.0)
        assert machine.arrive("b", 0.0) == [Start(1, ("a", "b"))]
        die(machine, "a", 20.0, "b")
        assert not machine.can_continue

    def test_a_node_lost_in_a_pause_is_found_missing_at_its_end(self) -> None:
        machine = started("ab", 2)
        die(machine, "a", 20.0, "b")
        machine.decided(go_on=True, delay_s=5, now=22.0)
        assert machine.lose("b", 23.0) == []
        assert machine.tick(27.0) == [TooFew(("b",), 1)]
        assert machine.phase is Phase.DECIDING

    def test_a_node_that_comes_late_takes_part_in_the_next_generation(self) -> None:
        machine = RestartMachine("abc", policy(3, 2), 0.0)
        machine.arrive("a", 0.0)
        machine.arrive("c", 0.0)
        assert machine.tick(START_TIMEOUT_S) == [Start(1, ("a", "c"))]
        assert machine.arrive("b", 150.0) == []
        die(machine, "a", 200.0, "c")
        assert machine.decided(go_on=True, delay_s=0, now=202.0) == [Start(2, ("a", "b", "c"))]

    def test_a_worker_that_left_as_agreed_gives_the_others_time_to_follow(self) -> None:
        machine = started("ab", 2)
        machine.ended("a", 20.0, failed=False, all_ended=True)
        assert machine.next_deadline == 20.0 + LEAVE_S
        machine.ended("b", 30.0, failed=True, all_ended=False)
        assert machine.next_deadline == 30.0 + GATHER_S
        assert machine.tick(31.0) == [Kill("the others have ended")]


class TestStop:
    def test_all_run_to_the_largest_begun_step_and_leave(self) -> None:
        machine = started("ab", 2)
        assert machine.request_stop("SIGUSR2", 20.0) == [SetFlag()]
        assert machine.request_stop("SIGTERM", 20.1) == []
        assert machine.begun("a", 7, 20.2) == []
        assert machine.flag_missing == ("b",)
        assert machine.begun("b", 8, 20.3) == [SetTarget(8)]
        machine.ended("a", 21.0, failed=False, all_ended=True)
        assert machine.ended("b", 21.0, failed=False, all_ended=True) == [Decide()]
        assert not machine.can_continue
        assert machine.stop_reason == "SIGUSR2"

    def test_a_stop_that_is_not_agreed_kills(self) -> None:
        machine = started("ab", 2)
        machine.request_stop("SIGTERM", 20.0)
        machine.begun("a", 7, 20.2)
        assert machine.next_deadline == 20.0 + STOP_TIMEOUT_S
        assert machine.tick(70.0) == [Kill("no stop agreed: b did not report")]

    def test_an_agreed_step_that_is_not_saved_kills(self) -> None:
        machine = started("a", 1)
        machine.request_stop("SIGTERM", 20.0)
        assert machine.begun("a", -1, 30.0) == [SetTarget(0)]
        assert machine.tick(80.0) == [Kill("the agreed step was not saved before the deadline")]

    def test_a_stop_in_a_pause_ends_the_attempt(self) -> None:
        machine = started("ab", 2)
        die(machine, "a", 20.0, "b")
        machine.decided(go_on=True, delay_s=5, now=22.0)
        assert machine.request_stop("SIGTERM", 23.0) == [StoppedIdle()]
        assert machine.tick(99.0) == []

    def test_a_stop_while_deciding_wins(self) -> None:
        machine = started("ab", 2)
        die(machine, "a", 20.0, "b")
        assert machine.request_stop("SIGTERM", 22.0) == []
        assert not machine.can_continue
        assert machine.decided(go_on=True, delay_s=0, now=23.0) == [StoppedIdle()]

    def test_a_killed_generation_is_not_asked_to_stop_any_more(self) -> None:
        """Once it was given a target, which no worker was left to save."""
        machine = started("ab", 2)
        machine.lose("b", 20.0)
        assert machine.request_stop("SIGTERM", 20.1) == machine.begun("a", 3, 20.2) == []
        assert machine.flag_missing == ()
        assert machine.ended("a", 20.5, failed=True, all_ended=True) == [Decide()]
        assert machine.decided(go_on=True, delay_s=0, now=21.0) == [StoppedIdle()]


# -- any order of events ---------------------------------------------------------------------------


@dataclass
class Watched:
    """A machine, and what it must keep to, followed from its inputs and actions alone."""

    machine: RestartMachine
    nodes: tuple[str, ...]
    arrived: set[str] = field(default_factory=set)
    out: set[str] = field(default_factory=set)
    now: float = 0.0
    stop_asked: bool = False
    starts: int = 0
    live: tuple[str, ...] | None = None
    """The nodes of the generation that runs now."""
    reported: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    begun: dict[str, int] = field(default_factory=dict)
    killed_at: float | None = None
    seen: list[type[Action]] = field(default_factory=list)
    """What the live generation was told."""
    disturbed: bool = False
    """Whether anything has begun to end the live generation."""

    @property
    def fit(self) -> tuple[str, ...]:
        return tuple(n for n in self.nodes if n in self.arrived and n not in self.out | self.lost)

    def event(self, kind: str, node: str, step: int, bit: bool) -> list[Action]:
        """Give one event to the machine, and check what it answers."""
        machine, phase = self.machine, self.machine.phase
        due = machine.next_deadline
        known = node in self.nodes
        match kind:
            case "arrive":
                self.arrived |= {node} & set(self.nodes)
                actions = machine.arrive(node, self.now)
            case "lose":
                self.lost |= {node} & set(self.nodes)
                self.disturbed |= self.live is not None and node in self.live
                actions = machine.lose(node, self.now)
            case "reject":
                self.out |= {node} & set(self.nodes)
                actions = machine.reject(node, self.now)
            case "ended":
                if self.live is not None and node in self.live:
                    self.disturbed = True
                    self.reported |= {node} if step % 3 else set()
                actions = machine.ended(node, self.now, failed=bit, all_ended=step % 3 != 0)
            case "condemn":
                self.disturbed |= self.live is not None
                actions = machine.condemn("hang", self.now)
            case "stop":
                self.stop_asked |= phase is not Phase.OVER
                self.disturbed |= self.live is not None
                actions = machine.request_stop("SIGTERM", self.now)
            case "begun":
                if SetFlag in self.seen and self.live is not None and node in self.live:
                    self.begun.setdefault(node, step)
                actions = machine.begun(node, step, self.now)
            case "decided":
                actions = machine.decided(go_on=bit, delay_s=float(step), now=self.now)
            case _:
                actions = machine.tick(self.now)
                is_due = due is not None and self.now >= due
                assert bool(actions) is is_due, "a tick acts when it is due, and only then"
        if not known and kind in ("arrive", "lose", "reject", "ended", "begun"):
            assert not actions
        if phase is Phase.OVER:
            assert not actions
            assert machine.phase is Phase.OVER
        for action in actions:
            self.check(action)
        assert (machine.phase is Phase.RUNNING) is (self.live is not None)
        assert machine.fit == self.fit
        assert machine.generation == self.starts
        assert machine.lost == self.lost
        assert machine.stop_reason is None or self.stop_asked
        return actions

    def check(self, action: Action) -> None:
        """What each action takes for granted."""
        sizes, fit = self.machine.policy.sizes, self.fit
        fills = [size for size in sizes if size <= len(fit)]
        live = self.live
        if isinstance(action, Start):
            assert live is None, "two generations at a time"
            assert not self.stop_asked, "a start after a stop"
            self.starts += 1
            assert action == Start(self.starts, fit[: max(fills)])
            self.live = action.nodes
            self.killed_at, self.disturbed = None, False
            self.reported, self.begun, self.seen = set(), {}, []
            return
        if isinstance(action, StoppedIdle | TooFew):
            assert live is None
            if isinstance(action, StoppedIdle):
                assert self.stop_asked
            else:
                assert not fills
                coming = set(self.nodes) - self.arrived - self.out - self.lost
                hopeless = not coming or len(fit) + len(coming) < min(sizes, default=0)
                assert self.starts or hopeless or self.now >= START_TIMEOUT_S, "given up early"
                assert action.arrived == len(fit)
                assert {*action.missing, *fit} == set(self.nodes)
            return
        assert live is not None
        assert type(action) not in self.seen, "said twice to one generation"
        if isinstance(action, Kill):
            self.killed_at = self.now
        elif isinstance(action, SetFlag | SetTarget):
            assert self.stop_asked
            assert self.killed_at is None, "asked after the kill"
            if isinstance(action, SetTarget):
                assert self.begun.keys() == set(live)
                assert action.step == max(0, *self.begun.values())
        elif isinstance(action, GiveUp):
            assert self.killed_at is not None
            assert self.now >= self.killed_at + KILL_WAIT_S
            assert set(action.nodes) == set(live) - self.reported - self.lost
            self.lost |= set(action.nodes)
        else:
            assert set(live) <= self.reported | self.lost, "decided while workers live"
            self.live = None
        self.seen.append(type(action))

    def fall_silent(self) -> float:
        """Only ticks from now on, each when it is due: how long until nothing is awaited."""
        began = self.now
        while (due := self.machine.next_deadline) is not None:
            assert len(self.seen) < 9
            self.now = max(self.now, due)
            assert self.event("tick", "", 0, False)
        return self.now - began


NODES = ("a", "b", "c", "d", "e")
SIZES = {"same": (5,), "spare": (3,), "elastic": (5, 4, 2, 1), "requeue": ()}
KINDS = ("arrive", "lose", "reject", "ended", "condemn", "stop", "begun", "decided", "tick")
COMMON = ("arrive", "arrive", "ended", "ended", "begun", "decided", "tick")
"""Said more often: without them most lists of events never leave the arrival."""

events = st.lists(
    st.tuples(
        st.sampled_from(KINDS + COMMON),
        st.sampled_from((*NODES, "stranger")),
        st.integers(-1, 5),
        st.booleans(),
        st.sampled_from((0.0, 0.0, 0.125, 1.0, 10.0, 400.0)),
    ),
    max_size=80,
)


def watched(sizes: tuple[int, ...], present: int = 0) -> Watched:
    """A fresh machine, `present` nodes of which have arrived already."""
    watcher = Watched(RestartMachine(NODES, policy(*sizes), 0.0), NODES)
    for node in NODES[:present]:
        watcher.event("arrive", node, 0, False)
    return watcher


@pytest.mark.parametrize("restart", sorted(SIZES))
@settings(max_examples=100, deadline=None)
@given(happened=events, present=st.sampled_from((0, 4, 5)))
def test_any_order_of_events_ends_with_one_live_generation_at_a_time(
    restart: str, happened: list[tuple[str, str, int, bool, float]], present: int
) -> None:
    """Invariant 3. What is promised is checked after every event (`Watched`)."""
    watcher = watched(SIZES[restart], present)
    for kind, node, step, bit, passed in happened:
        watcher.now += passed
        watcher.event(kind, node, step, bit)
    took_s = watcher.fall_silent()
    phase = watcher.machine.phase
    if phase is Phase.RUNNING:
        assert not watcher.disturbed, "an end that nobody waits for"
        watcher.event("condemn", "", 0, False)
        assert watcher.fall_silent() <= KILL_WAIT_S
        phase = watcher.machine.phase
    assert phase in (Phase.DECIDING, Phase.OVER)
    longest_pause_s = 5
    assert took_s <= longest_pause_s + max(
        START_TIMEOUT_S, 2 * STOP_TIMEOUT_S + KILL_WAIT_S, LEAVE_S + KILL_WAIT_S
    )


@settings(max_examples=100, deadline=None)
@given(happened=events, extra=st.lists(st.floats(0, 500), max_size=30))
def test_ticks_that_are_not_due_change_nothing(
    happened: list[tuple[str, str, int, bool, float]], extra: list[float]
) -> None:
    """A timer at `next_deadline` and one that never rests see the same."""
    rare, often = watched(SIZES["elastic"]), watched(SIZES["elastic"])
    for kind, node, step, bit, passed in happened:
        until = rare.now + passed
        while (due := rare.machine.next_deadline) is not None and due <= until:
            rare.now = often.now = max(rare.now, due)
            for moment in sorted(extra):
                if often.now + moment < due:
                    often.machine.tick(often.now + moment)
            assert rare.event("tick", "", 0, False) == often.event("tick", "", 0, False)
        rare.now = often.now = until
        for _ in range(3):
            assert often.event("tick", "", 0, False) == []
        assert rare.event(kind, node, step, bit) == often.event(kind, node, step, bit)


@given(
    restart=st.sampled_from(["same", "spare", "elastic"]),
    budget=st.builds(
        RecoverySpec,
        max_failures=st.integers(0, 6),
        max_unknown=st.integers(0, 6),
        max_no_progress=st.integers(1, 5),
    ),
    happened=st.lists(
        st.tuples(
            st.sampled_from(sorted(FailureClass)),
            st.sampled_from((0, 0, 1)),
            st.none() | st.sampled_from(NODES),
        ),
        min_size=20,
        max_size=60,
    ),
)
def test_starts_inside_and_across_attempts_keep_the_budget(
    restart: str, budget: RecoverySpec, happened: list[tuple[FailureClass, int, str | None]]
) -> None:
    """Invariant 3, budget kept: however a run's generations end, and wherever the next starts."""
    history: list[End] = []
    committed = in_a_row = charged = 0
    watcher = watched(SIZES[restart], len(NODES))
    for failure_class, progress, lost in happened:
        watcher.fall_silent()
        machine = watcher.machine
        assert machine.phase is Phase.RUNNING
        committed += progress
        if lost is not None:
            watcher.event("lose", lost, 0, False)
        watcher.event("condemn", "", 0, False)
        for node in machine.active:
            watcher.event("ended", node, 1, True)
        assert machine.phase is Phase.DECIDING
        decision = decide(
            failure_class, committed, history, budget, can_continue=machine.can_continue
        )
        newer = not history or committed > (history[-1].committed_step or 0)
        free = failure_class in FREE and (newer or failure_class is not FailureClass.TIME_LIMIT)
        if progress:
            in_a_row = 0
        in_a_row += not free
        charged += not free
        history.append(End(None, failure_class, committed))
        if decision.verdict is Verdict.STOP:
            break
        assert failure_class not in NOT_RETRIED
        assert in_a_row < budget.max_no_progress
        assert charged <= budget.max_failures + budget.max_unknown
        starts = watcher.starts
        goes_on = decision.verdict is Verdict.CONTINUE
        watcher.event("decided", "", int(decision.delay_s), goes_on)
        if goes_on:
            watcher.fall_silent()
            assert watcher.starts == starts + 1, "it was said that it can continue"
        else:
            assert watcher.machine.phase is Phase.OVER
            watcher = watched(SIZES[restart], len(NODES))
