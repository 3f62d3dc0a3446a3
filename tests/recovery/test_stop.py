"""The stop agreement, alone and among modelled nodes and workers.

The model has the atomic actions of the real parts: a worker publishes the step it begins, then
reads its flag, then waits for the target under it (`Session.begin_step`); a node sets its workers'
flags one by one, then reads their published steps one by one (`WorkerGroup.set_stop_flag`);
messages of one node keep their order and take any time. A step is a collective: it ends when every
worker has begun it. hypothesis picks which action is next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from air_hpc.recovery.stop import Action, StopAgreement
from air_hpc.rundir.layout import create_run_dir
from air_hpc.session.page import NONE, Page, Word
from air_hpc.session.session import Session

TIMEOUT_S = 10.0


class TestAlone:
    def test_the_target_is_the_largest_step_begun_anywhere(self) -> None:
        stop = StopAgreement.among(["a", "b"], TIMEOUT_S)
        assert stop.request("SIGTERM", 0.0) is Action.SET_FLAG
        assert stop.report("a", 4) is None
        assert stop.missing == ("b",)
        assert stop.report("b", 5) is Action.SET_TARGET
        assert stop.target == 5

    def test_workers_that_began_nothing_stop_before_the_first_step(self) -> None:
        stop = StopAgreement.among(["a", "b"], TIMEOUT_S)
        stop.request("SIGTERM", 0.0)
        stop.report("a", NONE)
        stop.report("b", NONE)
        assert stop.target == 0

    def test_a_second_request_keeps_the_first_reason_and_deadline(self) -> None:
        stop = StopAgreement.among(["a"], TIMEOUT_S)
        stop.request("SIGUSR2", 0.0)
        assert stop.request("SIGTERM", 5.0) is None
        assert stop.reason == "SIGUSR2"
        assert stop.tick(10.0) is Action.GIVE_UP

    def test_a_repeated_report_changes_nothing(self) -> None:
        stop = StopAgreement.among(["a", "b"], TIMEOUT_S)
        stop.request("SIGTERM", 0.0)
        stop.report("a", 4)
        assert stop.report("a", 9) is None
        stop.report("b", 3)
        assert stop.target == 4
        assert stop.report("b", 9) is None
        assert stop.target == 4

    def test_a_report_that_nobody_asked_for_is_not_taken(self) -> None:
        stop = StopAgreement.among(["a"], TIMEOUT_S)
        assert stop.report("a", 4) is None
        stop.request("SIGTERM", 0.0)
        assert stop.report("stranger", 9) is None
        assert stop.missing == ("a",)

    def test_the_deadline_gives_up_once_and_for_all(self) -> None:
        stop = StopAgreement.among(["a", "b"], TIMEOUT_S)
        stop.request("SIGTERM", 100.0)
        stop.report("a", 4)
        assert stop.tick(109.9) is None
        assert stop.tick(110.0) is Action.GIVE_UP
        assert stop.tick(111.0) is None
        assert stop.report("b", 4) is None
        assert stop.target is None

    def test_no_deadline_runs_before_a_request_or_after_the_target(self) -> None:
        stop = StopAgreement.among(["a"], TIMEOUT_S)
        assert stop.tick(1e9) is None
        stop.request("SIGTERM", 0.0)
        stop.report("a", 1)
        assert stop.tick(1e9) is None


class RecordingPage(Page):
    """A page that notes which words are touched in which order."""

    touched: list[tuple[str, Word]]

    def read(self, word: Word) -> int:
        self.touched.append(("read", word))
        return super().read(word)

    def write(self, word: Word, value: int) -> None:
        self.__dict__.setdefault("touched", []).append(("write", word))
        super().write(word, value)


def test_a_real_worker_publishes_before_it_reads_the_flag(tmp_path: Path) -> None:
    """What the model below takes for granted."""
    session = Session.standalone(create_run_dir(tmp_path, "run"))
    page = RecordingPage.create()
    session._page = page
    page.write(Word.STOP_FLAG, 1)
    page.write(Word.TARGET_STEP, 5)
    page.touched.clear()
    assert session.begin_step(5)
    begun, flag, target = page.touched[:3]
    assert begun == ("write", Word.BEGUN_STEP)
    assert flag == ("read", Word.STOP_FLAG)
    assert target == ("read", Word.TARGET_STEP)
    assert not session.begin_step(6)
    page.close()


# -- the model -------------------------------------------------------------------------------------


@dataclass
class ModelWorker:
    begun: int = NONE
    done: int = 0
    flag: bool = False
    target: int = NONE
    entered: int = 0
    """The newest step it takes part in."""
    left_at: int | None = None
    finished: bool = False


@dataclass
class ModelNode:
    name: str
    workers: list[ModelWorker]
    alive: bool = True
    to_coordinator: deque[dict[str, Any]] = field(default_factory=deque)
    from_coordinator: deque[dict[str, Any]] = field(default_factory=deque)


class World:
    """Every process is a generator: each `next` is one atomic action, None means it cannot move."""

    def __init__(self, nodes: int, workers: int, first: int, last: int) -> None:
        self.nodes = [
            ModelNode(f"n{i}", [ModelWorker(done=first - 1) for _ in range(workers)])
            for i in range(nodes)
        ]
        self.first, self.last = first, last
        self.now = 0.0
        self.stop = StopAgreement.among([node.name for node in self.nodes], TIMEOUT_S)
        self.given_up = False
        self.choice = 0
        self.processes: list[tuple[ModelNode | None, Iterator[bool]]] = [(None, self.coordinator())]
        for node in self.nodes:
            self.processes.append((node, self.agent(node)))
            for worker in node.workers:
                self.processes.append((node, self.worker(worker)))

    @property
    def workers(self) -> list[ModelWorker]:
        return [worker for node in self.nodes for worker in node.workers]

    def worker(self, me: ModelWorker) -> Iterator[bool]:
        for step in range(self.first, self.last + 1):
            me.begun = step
            yield True
            flagged = me.flag
            yield True
            if flagged:
                while me.target == NONE:
                    yield False
                if step > me.target:
                    me.left_at = step - 1
                    return
            me.entered = step
            yield True
            while any(other.entered < step for other in self.workers):
                yield False
            me.done = step
            yield True
        me.finished = True

    def agent(self, node: ModelNode) -> Iterator[bool]:
        while True:
            if not node.from_coordinator:
                yield False
                continue
            message = node.from_coordinator.popleft()
            yield True
            if message["type"] == "stop":
                for worker in node.workers:
                    worker.flag = True
                    yield True
                begun = NONE
                for worker in node.workers:
                    begun = max(begun, worker.begun)
                    yield True
                node.to_coordinator.append({"type": "begun", "step": begun})
                yield True
            elif message["type"] == "target":
                for worker in node.workers:
                    worker.target = message["step"]
                    yield True

    def coordinator(self) -> Iterator[bool]:
        while True:
            self.act(self.stop.tick(self.now))
            waiting = [node for node in self.nodes if node.to_coordinator]
            if not waiting:
                yield False
                continue
            node = waiting[self.choice % len(waiting)]
            message = node.to_coordinator.popleft()
            if message["type"] == "signal":
                self.act(self.stop.request(node.name, self.now))
            else:
                self.act(self.stop.report(node.name, message["step"]))
            yield True

    def act(self, action: Action | None) -> None:
        if action is Action.GIVE_UP:
            self.given_up = True
        elif action is not None:
            message: dict[str, Any] = {"type": "stop"}
            if action is Action.SET_TARGET:
                message = {"type": "target", "step": self.stop.target}
            for node in self.nodes:
                node.from_coordinator.append(dict(message))

    # -- what the schedule can do ------------------------------------------------------------------

    def move(self, choice: int) -> None:
        self.choice, which = divmod(choice, len(self.processes))
        node, process = self.processes[which]
        if node is None or node.alive:
            next(process, None)

    def signal(self, choice: int) -> None:
        node = self.nodes[choice % len(self.nodes)]
        if node.alive:
            node.to_coordinator.append({"type": "signal"})

    def die(self, choice: int) -> None:
        """A node dies; what it said last may be lost or arrive."""
        node = self.nodes[choice % len(self.nodes)]
        node.alive = False
        if choice % 2:
            node.to_coordinator.clear()

    def settle(self) -> None:
        """Let everything run until nothing can move."""
        moved = True
        while moved:
            moved = False
            for node, process in self.processes:
                if node is None or node.alive:
                    moved |= bool(next(process, False))


shapes = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(0, 4))
moves = st.lists(st.integers(0, 999), max_size=120)


def scheduled(world: World, schedule: list[int], at: int, act: Callable[[int], None]) -> None:
    """Run a schedule; `act` happens after `at` of its moves."""
    for position, choice in enumerate(schedule):
        if position == at:
            act(choice)
        world.now += 0.001
        world.move(choice)
    if at >= len(schedule):
        act(at)


@settings(max_examples=150)
@given(shape=shapes, schedule=moves, at=st.integers(0, 120), again=st.booleans())
def test_any_interleaving_stops_all_workers_at_one_and_the_same_step(
    shape: tuple[int, int, int, int], schedule: list[int], at: int, again: bool
) -> None:
    """Invariant 4. Nobody runs past the target, and nobody waits for a step that none begins."""
    nodes, workers, first, steps = shape
    world = World(nodes, workers, first, first + steps - 1)

    def ask(choice: int) -> None:
        world.signal(choice)
        if again:
            world.signal(choice + 1)

    scheduled(world, schedule, at, ask)
    world.settle()
    assert not world.given_up
    target = world.stop.target
    assert target is not None
    ended_at = {w.left_at if w.left_at is not None else w.done for w in world.workers}
    assert len(ended_at) == 1
    assert all(w.finished or w.left_at is not None for w in world.workers)
    for worker in world.workers:
        assert worker.done <= max(target, first - 1)
        if not worker.finished:
            assert worker.left_at == worker.done == max(target, first - 1)


@settings(max_examples=150)
@given(
    shape=shapes,
    schedule=moves,
    asked=st.integers(0, 120),
    deaths=st.dictionaries(st.integers(0, 120), st.integers(0, 9), min_size=1, max_size=2),
)
def test_dying_nodes_never_make_the_survivors_stop_at_different_steps(
    shape: tuple[int, int, int, int],
    schedule: list[int],
    asked: int,
    deaths: dict[int, int],
) -> None:
    nodes, workers, first, steps = shape
    world = World(nodes, workers, first, first + steps - 1)
    for position, choice in enumerate(schedule):
        if position == asked:
            world.signal(choice)
        if position in deaths:
            world.die(deaths[position])
        world.now += 0.001
        world.move(choice)
    world.settle()
    before = world.stop.target
    world.now += TIMEOUT_S
    world.settle()
    survivors = [w for node in world.nodes if node.alive for w in node.workers]
    left = {w.left_at for w in survivors if w.left_at is not None}
    target = world.stop.target
    assert target == before, "a target after the deadline"
    if world.stop.requested:
        assert world.given_up is (target is None)
        if world.given_up:
            assert world.stop.missing
    if target is None:
        assert not left
    else:
        assert left <= {max(target, first - 1)}
        for worker in survivors:
            assert worker.done <= max(target, first - 1) or worker.finished


def test_the_model_finds_an_agreement_that_reads_before_it_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The property above is able to fail: nodes that report before the flags are set disagree."""

    def hasty_agent(self: World, node: ModelNode) -> Iterator[bool]:
        while True:
            if not node.from_coordinator:
                yield False
                continue
            message = node.from_coordinator.popleft()
            yield True
            if message["type"] == "stop":
                begun = max(worker.begun for worker in node.workers)
                yield True
                for worker in node.workers:
                    worker.flag = True
                node.to_coordinator.append({"type": "begun", "step": begun})
                yield True
            else:
                for worker in node.workers:
                    worker.target = message["step"]

    monkeypatch.setattr(World, "agent", hasty_agent)
    world = World(1, 1, 1, 3)
    worker = world.workers[0]
    coordinator, agent, trainer = (process for _, process in world.processes)
    next(trainer)
    world.signal(0)
    next(coordinator)
    next(agent)
    next(agent)  # reads that step 1 has begun
    for _ in range(5):
        next(trainer)  # steps on to 2 before the flag is set
    world.settle()
    assert worker.done > (world.stop.target or 0)
