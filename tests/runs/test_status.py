"""What becomes of the ledger's word when Slurm, or this machine, says something else."""

import subprocess
import sys
from pathlib import Path

import pytest

from air_hpc.cli.status import describe
from air_hpc.rundir.events import Kind
from air_hpc.rundir.fence import Token
from air_hpc.rundir.words import FailureClass, RunState
from air_hpc.runs.process import ProcessIdentity
from air_hpc.runs.status import view_run, view_runs
from tests.runs.made import MadeRun, ToldSlurm, accounted, queued

SCRIPT_KEYS = [
    "run_id",
    "state",
    "step",
    "attempt",
    "generation",
    "job_id",
    "nodes",
    "mlflow_run_id",
]


def test_the_keys_that_scripts_rely_on_come_first_and_unknown_is_none(
    tmp_path: Path, slurm: ToldSlurm
) -> None:
    slurm.tell("squeue", queued("100_3", "PENDING", "Priority"))
    run = MadeRun(tmp_path / "runs").submitted("100", 3)
    body = view_run(run.dir).to_json()
    assert list(body)[: len(SCRIPT_KEYS)] == SCRIPT_KEYS
    assert [body[key] for key in SCRIPT_KEYS] == [
        "tiny-1", "PENDING", None, None, None, "100_3", None, None,
    ]  # fmt: skip
    assert body["reason"] == "waits in the queue (Priority)"
    assert body["goodput"] is None


def test_one_squeue_call_serves_all_runs_and_none_asks_for_those_that_ended(
    tmp_path: Path, slurm: ToldSlurm
) -> None:
    runs = [MadeRun(tmp_path / "runs", f"tiny-{n}").submitted("100", n) for n in range(3)]
    done = MadeRun(tmp_path / "runs", "tiny-done").submitted("90").training().ended()
    slurm.tell("squeue", *(queued(f"100_{n}", "PENDING") for n in range(3)))
    views = view_runs([run.dir for run in (*runs, done)])
    assert [str(view.status.state) for view in views] == ["PENDING"] * 3 + ["FINISHED"]
    assert len(slurm.calls("squeue")) == 1
    assert "90" not in slurm.calls("squeue")[0].split("--jobs ")[1].split(",")
    assert not slurm.calls("sacct")


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("PENDING", "JobHoldMaxRequeue"),
        ("PENDING", "JobHeldUser"),
        ("PENDING", "launch failed requeued held"),
        ("REQUEUE_HOLD", "None"),
        ("SPECIAL_EXIT", "None"),
    ],
)
def test_a_held_job_is_shown_with_how_to_release_it(
    tmp_path: Path, slurm: ToldSlurm, state: str, reason: str
) -> None:
    slurm.tell("squeue", queued("100_3", state, reason))
    view = view_run(MadeRun(tmp_path / "runs").submitted("100", 3).dir)
    assert view.status.state is RunState.HELD
    assert view.source == "squeue"
    assert "scontrol release 100_3" in (view.reason or "")


def test_a_job_that_slurm_requeued_without_our_agents_is_requeued(
    tmp_path: Path, slurm: ToldSlurm
) -> None:
    slurm.tell("squeue", queued("100", "PENDING", "BeginTime"))
    view = view_run(MadeRun(tmp_path / "runs").submitted().training(job_id="100").dir)
    assert (view.status.state, view.source) == (RunState.REQUEUED, "squeue")


@pytest.mark.parametrize(
    ("state", "run_state", "failure_class"),
    [
        ("CANCELLED by 1000", RunState.CANCELLED, FailureClass.CANCELLED),
        ("TIMEOUT", RunState.FAILED, FailureClass.TIME_LIMIT),
        ("NODE_FAIL", RunState.FAILED, FailureClass.NODE_LOST),
        ("OUT_OF_MEMORY", RunState.FAILED, FailureClass.HOST_MEMORY),
        ("FAILED", RunState.FAILED, FailureClass.UNKNOWN),
    ],
)
def test_a_job_that_ended_without_its_agents_word_ends_the_run_by_slurms(
    tmp_path: Path,
    slurm: ToldSlurm,
    state: str,
    run_state: RunState,
    failure_class: FailureClass,
) -> None:
    slurm.tell("sacct", accounted("100", state, code="1:0"))
    view = view_run(MadeRun(tmp_path / "runs").submitted().training(job_id="100").dir)
    assert view.status.state is run_state
    assert view.status.failure_class is failure_class
    assert view.source == "sacct"
    assert "without a last word" in (view.reason or "")


def test_a_job_that_was_cancelled_in_the_queue_has_no_log_to_look_at(
    tmp_path: Path, slurm: ToldSlurm
) -> None:
    line = accounted("100", "CANCELLED by 1000")
    slurm.tell("sacct", line.replace("\x1fn1\x1f", "\x1fNone assigned\x1f"))
    view = view_run(MadeRun(tmp_path / "runs").submitted().dir)
    assert view.status.state is RunState.CANCELLED
    assert (view.reason or "").endswith("before its agents said a word")


def test_time_stands_still_where_slurm_says_the_run_ended(tmp_path: Path, slurm: ToldSlurm) -> None:
    run = MadeRun(tmp_path / "runs").submitted().training(job_id="100")
    slurm.tell("sacct", accounted("100", "NODE_FAIL"))
    view = view_run(run.dir)
    assert view.status.time.wall_s < 24 * 3600  # and not the years since


def test_a_job_that_ended_a_moment_ago_is_given_time_to_have_its_say(
    tmp_path: Path, slurm: ToldSlurm
) -> None:
    run = MadeRun(tmp_path / "runs").submitted().training(job_id="100")
    slurm.tell("sacct", accounted("100", "COMPLETED", end="2023-11-14T22:20:00"))
    ended = view_run(run.dir).slurm
    assert ended is not None
    assert ended.end_time is not None
    just_after = ended.end_time + 5
    view = view_runs([run.dir], clock=lambda: just_after)[0]
    assert (view.status.state, view.source) == (RunState.RUNNING, "ledger")
    late = view_runs([run.dir], clock=lambda: just_after + 120)[0]
    assert late.status.state is RunState.FAILED


def test_a_job_that_slurm_forgot_ends_the_run(tmp_path: Path, slurm: ToldSlurm) -> None:
    view = view_run(MadeRun(tmp_path / "runs").submitted().training(job_id="100").dir)
    assert view.status.state is RunState.FAILED
    assert "no longer knows" in (view.reason or "")


def test_a_slurm_that_does_not_answer_changes_nothing_and_is_said(
    tmp_path: Path, slurm: ToldSlurm
) -> None:
    for program in ("squeue", "sacct", "scontrol"):
        slurm.tell(program, error="Access denied")
    view = view_run(MadeRun(tmp_path / "runs").submitted().training(job_id="100").dir)
    assert (view.status.state, view.source) == (RunState.RUNNING, "ledger")
    assert "did not answer" in (view.reason or "")


def test_a_chain_lives_while_one_of_its_jobs_does(tmp_path: Path, slurm: ToldSlurm) -> None:
    run = MadeRun(tmp_path / "runs").submitted("100").submitted("101").training(job_id="100")
    run.ended(failure_class="time_limit", verdict="requeue")
    slurm.tell(
        "squeue", queued("100", "TIMEOUT", end="2023-11-14T22:20:00"), queued("101", "PENDING")
    )
    view = view_run(run.dir)
    assert view.status.state is RunState.REQUEUED
    assert view.source == "ledger"


def test_a_run_that_was_resubmitted_waits_with_its_next_job(
    tmp_path: Path, slurm: ToldSlurm
) -> None:
    """The next job stands in the ledger before it starts: else the run looked ended meanwhile."""
    run = MadeRun(tmp_path / "runs").submitted("100", 3)
    run.training(job_id="103", array_job_id="100", array_task_id=3)
    run.ended(failure_class="time_limit", verdict="requeue").submitted("200", 3)
    slurm.tell("squeue", queued("200_3", "PENDING", "Dependency"))
    slurm.tell("sacct", accounted("100_3", "TIMEOUT"))
    view = view_run(run.dir)
    assert (view.status.state, view.to_json()["job_id"]) == (RunState.REQUEUED, "200_3")


def test_a_submission_that_was_cut_off_says_how_to_finish_it(tmp_path: Path) -> None:
    view = view_run(MadeRun(tmp_path / "runs", submission="sweep-1").dir)
    assert view.status.state is RunState.PENDING
    assert f"run --resume sweep-1 --runs-dir {tmp_path}/runs" in (view.reason or "")


def test_the_last_word_written_between_the_two_questions_counts(
    tmp_path: Path, slurm: ToldSlurm
) -> None:
    """Once a run was called FAILED that had FINISHED while squeue was being asked."""
    run = MadeRun(tmp_path / "runs").submitted().training(job_id="100")
    line = (
        '{"v":1,"time":1700000500,"kind":"attempt_ended","token":"1.1",'
        '"facts":{"failure_class":"completed","verdict":"stop"}}'
    )
    squeue = slurm.folder / "squeue"
    squeue.write_text(f"#!/bin/sh\necho '{line}' >> {run.dir.ledger_dir}/late.jsonl\n")
    assert view_run(run.dir).status.state is RunState.FINISHED


def test_the_step_is_the_spools_where_the_generation_got_further(
    tmp_path: Path, slurm: ToldSlurm
) -> None:
    slurm.tell("squeue", queued("100", "RUNNING"))
    run = MadeRun(tmp_path / "runs").submitted().training(job_id="100")
    run.event(Kind.CHECKPOINT_COMMITTED, Token(1, 1), step=2)
    run.metrics({n: {"train/loss": 5.0 - n} for n in range(1, 5)})
    body = view_run(run.dir).to_json()
    assert (body["step"], body["committed_step"], body["loss"]) == (4, 2, 1.0)


def test_the_spool_of_an_older_generation_does_not_raise_the_step(
    tmp_path: Path, slurm: ToldSlurm
) -> None:
    slurm.tell("squeue", queued("100", "RUNNING"))
    run = MadeRun(tmp_path / "runs").submitted().training(job_id="100")
    run.event(Kind.CHECKPOINT_COMMITTED, Token(1, 1), step=2)
    run.metrics({n: {"train/loss": 1.0} for n in range(1, 9)})
    run.ended(failure_class="node_lost", verdict="requeue")
    run.event(Kind.ATTEMPT_STARTED, Token(2, 1), job_id="100", nodes=["n3"])
    run.event(Kind.RESUMED, Token(2, 1), step=2)
    assert view_run(run.dir).step == 2


class TestLocal:
    def local(self, tmp_path: Path, process: ProcessIdentity) -> MadeRun:
        run = MadeRun(tmp_path / "runs")
        run.event(Kind.SUBMITTED, job_id="77", cluster="local", pid=process.pid)
        return run.training(scheduler="local", **process.to_facts())

    def test_a_living_agent_keeps_the_ledgers_word(self, tmp_path: Path) -> None:
        view = view_run(self.local(tmp_path, ProcessIdentity.of()).dir)
        assert (view.status.state, view.reason) == (RunState.RUNNING, None)
        assert view.to_json()["job_id"] is None

    def test_an_agent_that_died_without_a_word_fails_the_run(self, tmp_path: Path) -> None:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        identity = ProcessIdentity.of(process.pid)
        run = self.local(tmp_path, identity)
        assert view_run(run.dir).status.state is RunState.RUNNING
        process.communicate()
        view = view_run(run.dir)
        assert (view.status.state, view.source) == (RunState.FAILED, "process")
        assert "without a word" in (view.reason or "")

    def test_a_recycled_pid_is_not_taken_for_the_agent(self, tmp_path: Path) -> None:
        own = ProcessIdentity.of()
        assert own.started is not None
        former = ProcessIdentity(own.pid, own.started - 1000, own.boot_id, own.host)
        view = view_run(self.local(tmp_path, former).dir)
        assert view.status.state is RunState.FAILED

    def test_another_machines_agent_is_unknown_not_dead(self, tmp_path: Path) -> None:
        other = ProcessIdentity(2**22 - 1, 1.0, "another-boot", "another-host")
        view = view_run(self.local(tmp_path, other).dir)
        assert view.status.state is RunState.RUNNING
        assert "another machine" in (view.reason or "")

    def test_a_reboot_ends_what_ran_here(self, tmp_path: Path) -> None:
        own = ProcessIdentity.of()
        before = ProcessIdentity(own.pid, own.started, "the-boot-before", own.host)
        view = view_run(self.local(tmp_path, before).dir)
        assert view.status.state is RunState.FAILED

    def test_a_starter_that_ended_before_the_agent_spoke_fails_the_run(
        self, tmp_path: Path
    ) -> None:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        run = MadeRun(tmp_path / "runs", submission="one")
        run.event(Kind.SUBMITTED, cluster="local", **ProcessIdentity.of(process.pid).to_facts())
        assert view_run(run.dir).status.state is RunState.PENDING
        process.communicate()
        view = view_run(run.dir)
        assert view.status.state is RunState.FAILED
        assert "before it said a word" in (view.reason or "")

    def test_an_agent_inside_a_living_allocation_can_be_gone(
        self, tmp_path: Path, slurm: ToldSlurm
    ) -> None:
        slurm.tell("squeue", queued("100", "RUNNING"))
        own = ProcessIdentity.of()
        assert own.started is not None
        gone = ProcessIdentity(own.pid, own.started - 1000, own.boot_id, own.host)
        run = MadeRun(tmp_path / "runs").event(Kind.SUBMITTED, job_id="7", cluster="allocation")
        run.training(scheduler="slurm", job_id="100", **gone.to_facts())
        assert view_run(run.dir).status.state is RunState.FAILED


def test_slow_ranks_are_told(tmp_path: Path) -> None:
    facts = {"rank": 5, "node": "n3", "device": "A100", "ratio": 1.18, "window_s": 60.0}
    run = MadeRun(tmp_path / "runs").submitted().training()
    run.event(Kind.STRAGGLER, Token(1, 1), change="found", **facts)
    view = view_run(run.dir, ask_slurm=False)
    assert view.to_json()["stragglers"] == [
        {"rank": 5, "node": "n3", "device": "A100", "ratio": 1.18}
    ]
    assert "rank 5 on n3 (A100) is 18 % slower than the median" in describe(view)
