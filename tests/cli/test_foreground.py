import subprocess
import sys
from pathlib import Path

import pytest

from air_hpc.cli.foreground import exit_code_of, follow, notice
from air_hpc.rundir.events import Event, Kind
from air_hpc.rundir.fence import Token
from air_hpc.rundir.state import RunStatus
from air_hpc.rundir.words import FailureClass, RunState, Verdict
from air_hpc.runs.process import ProcessIdentity
from air_hpc.runs.status import view_run
from tests.runs.made import MadeRun


@pytest.mark.parametrize(
    ("state", "failure_class", "verdict", "code"),
    [
        (RunState.FINISHED, FailureClass.COMPLETED, Verdict.STOP, 0),
        (RunState.FAILED, FailureClass.USER_ERROR, Verdict.STOP, 93),
        (RunState.FAILED, FailureClass.CHECKPOINT, Verdict.STOP, 93),
        (RunState.FAILED, FailureClass.ENVIRONMENT, Verdict.STOP, 1),
        (RunState.FAILED, FailureClass.UNKNOWN, None, 1),
        (RunState.CANCELLED, FailureClass.CANCELLED, Verdict.STOP, 1),
        (RunState.REQUEUED, FailureClass.TIME_LIMIT, Verdict.REQUEUE, 1),
    ],
)
def test_exit_codes(
    state: RunState, failure_class: FailureClass, verdict: Verdict | None, code: int
) -> None:
    status = RunStatus(state=state, failure_class=failure_class, verdict=verdict)
    assert exit_code_of(status) == code


@pytest.mark.parametrize(
    ("kind", "facts", "text"),
    [
        (Kind.RESUMED, {"step": 40, "lost_steps": 3}, "step 40, 3 steps are trained again"),
        (Kind.CHECKPOINT_COMMITTED, {"step": 5, "bytes": 2048, "blocking_s": 0.5}, "2.00 KiB"),
        (Kind.CHECKPOINT_FAILED, {"step": 5, "reason": "disk full"}, "disk full"),
        (Kind.SIGNAL, {"name": "SIGUSR2"}, "SIGUSR2"),
        (Kind.STOP_AGREED, {"target_step": 9}, "to step 9"),
        (Kind.GENERATION_ENDED, {"failure_class": "hang", "evidence": "rank 3"}, "rank 3"),
        (Kind.ATTEMPT_ENDED, {"failure_class": "hang", "verdict": "requeue"}, "requeue"),
    ],
)
def test_what_happens_is_told_in_words(kind: Kind, facts: dict[str, object], text: str) -> None:
    assert text in (notice(Event(0.0, kind, Token(1, 1), facts)) or "")


@pytest.mark.parametrize("kind", list(Kind))
def test_an_event_without_its_facts_never_raises(kind: Kind) -> None:
    notice(Event(0.0, kind, None, {}))


def test_following_a_run_that_has_ended_tells_its_story(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = MadeRun(tmp_path / "runs").submitted().training()
    run.metrics({step: {"train/loss": 5.0 / step} for step in range(1, 11)})
    run.event(Kind.CHECKPOINT_COMMITTED, Token(1, 1), step=10, bytes=1).ended()
    outcome = follow(run.dir, 10)
    assert outcome.exit_code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "Training begins with step 1.",
        "Saved step 10 (1 B).",
        "step 10/10  loss 0.5",
    ]


def test_the_first_ctrl_c_asks_the_run_to_stop_and_the_second_leaves_it_to_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stubborn = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); input()"
    agent = subprocess.Popen(
        [sys.executable, "-c", stubborn], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert agent.stdout is not None
        agent.stdout.readline()
        run = MadeRun(tmp_path / "runs", "tiny-1").event(Kind.SUBMITTED, cluster="local")
        run.training(scheduler="local", **ProcessIdentity.of(agent.pid).to_facts())
        later = MadeRun(tmp_path / "runs", "tiny-2").event(Kind.SUBMITTED, cluster="local")

        def interrupted(seconds: float) -> None:
            raise KeyboardInterrupt

        outcome = follow(run.dir, None, others=[later.dir], sleep=interrupted)
        assert (outcome.left, outcome.exit_code) == (True, 130)
        assert agent.poll() is None
        assert view_run(run.dir).status.cancel_requested
        assert view_run(later.dir).status.state is RunState.CANCELLED
        told = capsys.readouterr().out
        assert "Press again to leave it to that" in told
        assert "Left to itself: the run goes on saving" in told
    finally:
        agent.communicate()
