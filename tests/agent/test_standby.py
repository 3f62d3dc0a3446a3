"""A node that stands by: when it acts for a coordinator that is gone, and when it must not."""

from __future__ import annotations

import pytest

from air_hpc.agent.environment import JobContext
from air_hpc.agent.standby import ASK_AGAIN_S, ENDED_S, StandBy
from air_hpc.agent.survivor import Standing, standing
from air_hpc.plan.frozen import read_run_yaml
from air_hpc.recovery.cause import SlurmWord
from air_hpc.rundir.events import Kind, LedgerWriter, read_ledger
from air_hpc.rundir.fence import Token, claim_next_attempt
from air_hpc.rundir.layout import RunDir

CONTEXT = JobContext("slurm", "n2", 1, ("n1", "n2"), "7", None, None, 0, None)
LEASE_S = 15.0


class Slurm:
    """The job as Slurm sees it."""

    def __init__(self) -> None:
        self.said = SlurmWord("RUNNING", 0)
        self.nodes = ["n1", "n2"]
        self.asked = 0
        self.requeued = 0

    def end_time(self) -> float | None:
        return None

    def word(self) -> SlurmWord | None:
        return self.said

    def holds(self, node: str) -> bool | None:
        self.asked += 1
        return node in self.nodes

    def requeue(self) -> bool:
        self.requeued += 1
        return True

    def cancel(self) -> bool:
        raise AssertionError("a run that goes on is not cancelled")


class Node:
    """The second of two nodes, standing by."""

    def __init__(self, run: RunDir) -> None:
        self.now = 0.0
        self.slurm = Slurm()
        self.run = run
        claim_next_attempt(run)
        self.tell(Kind.ATTEMPT_STARTED, job_id="7", restart_count=0)
        spec = read_run_yaml(run.run_yaml.read_text()).spec
        assert spec.recovery.lease_s == LEASE_S
        clock = lambda: self.now  # noqa: E731
        self.stand_by = StandBy(CONTEXT, run, spec, self.slurm, say=print, clock=clock)

    def tell(self, kind: Kind, **facts: object) -> None:
        with LedgerWriter(self.run, "attempt-1") as ledger:
            ledger.append(kind, Token(1, 1), **facts)

    def hear(self, seconds: float) -> None:
        """The coordinator answers."""
        for _ in range(int(seconds)):
            self.now += 1
            assert not self.stand_by.heard({"type": "pong", "over": False})

    def wait(self, seconds: float) -> bool:
        """Nobody answers; whether it leaves."""
        for _ in range(int(seconds)):
            self.now += 1
            if self.stand_by.silent():
                return True
        return False


@pytest.fixture
def node(run: RunDir) -> Node:
    return Node(run)


def test_while_the_coordinator_answers_nothing_is_asked(node: Node) -> None:
    node.hear(1000)
    assert not node.wait(LEASE_S)
    assert (node.slurm.asked, node.slurm.requeued) == (0, 0)
    assert node.stand_by.heard({"type": "pong", "over": True})


def test_the_last_node_ends_the_attempt_of_a_coordinator_that_died_first(node: Node) -> None:
    """A first node that died, and a second one's agent that was killed: nobody was left to ask."""
    node.hear(3)
    assert node.wait(60)
    assert node.slurm.requeued == 1
    assert standing(CONTEXT, node.run) is Standing.TO_BE_REQUEUED


def test_a_node_that_was_given_up_acts_only_once_slurm_has_lost_the_coordinators(
    node: Node,
) -> None:
    """It may be the way to the coordinator alone that is broken: then the run goes on."""
    node.tell(Kind.NODE_LOST, node="n2", why="silent")
    assert not node.wait(10 * ASK_AGAIN_S)
    assert node.slurm.requeued == 0
    assert node.slurm.asked <= 10, "Slurm is asked seldom"
    node.slurm.nodes = ["n2"]
    assert node.wait(2 * ASK_AGAIN_S)
    assert node.slurm.requeued == 1
    assert read_ledger(node.run).events[-1].kind == Kind.ATTEMPT_ENDED


def test_a_decided_requeue_that_does_not_come_is_asked_for(node: Node) -> None:
    """The coordinator's node wrote the verdict, and was cut off before its script could act."""
    node.tell(Kind.NODE_LOST, node="n2", why="silent")
    node.tell(Kind.ATTEMPT_ENDED, failure_class="node_lost", verdict="requeue")
    assert not node.wait(ENDED_S)
    assert node.slurm.requeued == 0
    assert node.wait(ENDED_S)
    assert node.slurm.requeued == 1


@pytest.mark.parametrize("word", [SlurmWord("RUNNING", 1), SlurmWord("COMPLETING", 0)])
def test_a_requeue_that_came_is_not_asked_for_again(node: Node, word: SlurmWord) -> None:
    node.tell(Kind.ATTEMPT_ENDED, failure_class="node_lost", verdict="requeue")
    node.slurm.said = word
    assert node.wait(3 * ENDED_S)
    assert node.slurm.requeued == 0


@pytest.mark.parametrize("verdict", ["stop"])
def test_a_run_that_is_over_is_left_alone(node: Node, verdict: str) -> None:
    node.tell(Kind.ATTEMPT_ENDED, failure_class="completed", verdict=verdict)
    assert node.wait(60)
    assert node.slurm.requeued == 0


def test_an_attempt_of_a_later_start_is_left_alone(node: Node) -> None:
    claim_next_attempt(node.run)
    with LedgerWriter(node.run, "attempt-2") as ledger:
        ledger.append(Kind.ATTEMPT_STARTED, Token(2, 1), job_id="7", restart_count=1)
    assert node.wait(60)
    assert node.slurm.requeued == 0
