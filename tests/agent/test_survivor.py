"""The survivor of a coordinator: whether, and how insistently, it gives Slurm the job back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from air_hpc.agent.environment import JobContext
from air_hpc.agent.survivor import end_as_survivor
from air_hpc.config.spec import RunSpec
from air_hpc.plan.frozen import read_run_yaml
from air_hpc.recovery.cause import SlurmWord
from air_hpc.rundir.events import Kind, LedgerWriter, read_ledger
from air_hpc.rundir.fence import Token, claim_next_attempt, newest_token
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.state import fold
from air_hpc.rundir.words import FailureClass

RUNNING = SlurmWord("RUNNING", 0)
CONTEXT = JobContext("slurm", "n2", 1, ("n1", "n2"), "7", None, None, 0, None)


class BusyController:
    """Slurm's controller, which does not answer the first `deaf` questions."""

    def __init__(self, word: SlurmWord, deaf: int) -> None:
        self._word = word
        self._deaf = deaf
        self.requeued = 0

    def _answers(self) -> bool:
        self._deaf -= 1
        return self._deaf < 0

    def end_time(self) -> float | None:
        return None

    def word(self) -> SlurmWord | None:
        return self._word if self._answers() else None

    def requeue(self) -> bool:
        if not self._answers():
            return False
        self.requeued += 1
        return True

    def cancel(self) -> bool:
        raise AssertionError("a run that goes on is not cancelled")


@pytest.fixture
def started(run: RunDir) -> RunDir:
    """A run whose first attempt is under way."""
    claim_next_attempt(run)
    return run


def survive(run: RunDir, controller: BusyController, tries: int = 4) -> None:
    spec: RunSpec = read_run_yaml(run.run_yaml.read_text()).spec
    end_as_survivor(CONTEXT, run, spec, controller, say=print, pauses_s=[0.0] * tries)


def test_a_controller_that_does_not_answer_is_asked_again(started: RunDir) -> None:
    """One question without an answer once left the job to run empty until its time limit."""
    controller = BusyController(RUNNING, deaf=2)
    survive(started, controller)
    assert controller.requeued == 1
    assert [e.kind for e in read_ledger(started).events] == [Kind.NODE_LOST, Kind.ATTEMPT_ENDED]


def test_a_controller_that_never_answers_is_left_and_nothing_is_written(started: RunDir) -> None:
    controller = BusyController(RUNNING, deaf=9)
    survive(started, controller)
    assert controller.requeued == 0
    assert read_ledger(started).events == ()


@pytest.mark.parametrize("word", [SlurmWord("RUNNING", 1), SlurmWord("COMPLETING", 0)])
def test_a_job_that_is_started_again_or_ended_already_is_left_alone(
    started: RunDir, word: SlurmWord
) -> None:
    controller = BusyController(word, deaf=0)
    survive(started, controller)
    assert controller.requeued == 0
    assert read_ledger(started).events == ()


def test_a_start_that_its_coordinator_never_claimed_is_claimed_and_given_back(run: RunDir) -> None:
    """It left no trace, so nobody asked, and the job ran on with nobody in it."""
    token = claim_next_attempt(run)
    with LedgerWriter(run, "attempt-1") as ledger:
        ledger.append(Kind.ATTEMPT_STARTED, token, job_id="7", restart_count=0)
        ledger.append(Kind.ATTEMPT_ENDED, token, failure_class="preempted", verdict="requeue")
    controller = BusyController(SlurmWord("RUNNING", 1), deaf=0)
    spec = read_run_yaml(run.run_yaml.read_text()).spec
    again = replace(CONTEXT, restart_count=1)
    end_as_survivor(again, run, spec, controller, say=print, pauses_s=[0.0])
    assert controller.requeued == 1
    assert newest_token(run) == Token(2, 1)
    last = fold(read_ledger(run).events).ends[-1]
    assert (last.token, last.failure_class) == (Token(2, 1), FailureClass.NOT_ARRIVED)
    end_as_survivor(again, run, spec, controller, say=print, pauses_s=[0.0])
    assert controller.requeued == 1, "the next survivor finds it done"


def test_a_finished_run_is_not_given_back(started: RunDir) -> None:
    with LedgerWriter(started, "attempt-1") as ledger:
        ledger.append(Kind.ATTEMPT_ENDED, Token(1, 1), failure_class="completed", verdict="stop")
    controller = BusyController(SlurmWord("RUNNING", 1), deaf=0)
    spec = read_run_yaml(started.run_yaml.read_text()).spec
    again = replace(CONTEXT, restart_count=1)
    end_as_survivor(again, started, spec, controller, say=print, pauses_s=[0.0])
    assert controller.requeued == 0
    assert newest_token(started) == Token(1, 1)


def test_a_ledger_that_takes_nothing_does_not_keep_the_job(started: RunDir) -> None:
    (started.ledger_dir / "survivor-1-n2.jsonl").symlink_to("/proc/nowhere/at-all")
    controller = BusyController(RUNNING, deaf=0)
    survive(started, controller)
    assert controller.requeued == 1
