"""What `why` makes of ledgers: the first failure, what was done, what it cost, what comes next."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from air_hpc.cli.why import SHOWN_ENDS, describe
from air_hpc.rundir.events import Kind
from air_hpc.rundir.fence import Token
from air_hpc.rundir.words import FailureClass, RunState
from air_hpc.runs.hints import hint_of
from air_hpc.runs.status import view_run
from air_hpc.runs.why import Why, why
from air_hpc.slurm.jobs import JobRecord
from tests.cli.commands import ROOT
from tests.runs.made import FIRST, MadeRun

SECOND = Token(1, 2)
FAILED = {
    "failure_class": "network",
    "evidence": "rank 3 on n2: it broke",
    "rule": "gloo_lost_peer",
    "hint": "look there",
    "rank": 3,
    "node": "n2",
    "phase": "step",
    "step": 9,
}


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path / "runs").submitted().training()


def told(run: MadeRun) -> Why:
    return why(run.dir, ask_slurm=False)


def restarted(run: MadeRun, token: Token = SECOND, step: int = 4) -> MadeRun:
    """The next generation resumes from `step`."""
    run.event(Kind.GENERATION_STARTED, token, nodes=["n1"], resume_step=step)
    run.event(Kind.RESUMED, token, step=step, lost_steps=5)
    return run.event(Kind.TRAINING_STARTED, token, step=step + 1)


def test_a_run_that_is_fine_is_said_to_be(run: MadeRun) -> None:
    found = told(run)
    assert (found.first, found.ends) == (None, ())
    assert "nothing has gone wrong" in describe(found)
    assert found.next.what == "it trains on"


def test_a_run_that_is_done_is_said_to_be(run: MadeRun) -> None:
    text = describe(told(run.ended()))
    assert "all steps are done; nothing went wrong" in text
    assert "the run is complete" in text


def test_a_restart_inside_the_allocation_is_told_with_what_it_cost(run: MadeRun) -> None:
    run.event(Kind.CHECKPOINT_COMMITTED, FIRST, step=4)
    run.event(Kind.GENERATION_ENDED, FIRST, verdict="continue", reason="failure 1 of 10", **FAILED)
    restarted(run)
    (end,) = told(run).ends
    assert (end.lost_steps, end.down_s) == (5, 3.0)
    assert end.lost_s == 1.0, "one second was trained past the checkpoint"
    text = describe(told(run))
    assert "1.1 network -> restarted inside the allocation (failure 1 of 10)" in text
    assert "rank 3, node n2, in phase step" in text
    assert "by rule gloo_lost_peer" in text
    assert "look there" in text


def test_the_verdict_of_an_attempt_is_that_of_its_last_generation(run: MadeRun) -> None:
    run.event(Kind.GENERATION_ENDED, FIRST, **FAILED)
    run.ended(FIRST, failure_class="network", verdict="requeue", reason="r", evidence="e")
    (end,) = told(run).ends
    assert (str(end.verdict), end.reason, end.rank) == ("requeue", "r", 3)


def test_the_last_lines_of_the_rank_that_failed_first_are_shown(run: MadeRun) -> None:
    run.log("r3 | the line that tells\nr2 | another rank's\n", node="n2")
    run.log("r3 | of a later generation\n", SECOND, node="n2")
    run.event(Kind.GENERATION_ENDED, FIRST, **FAILED)
    assert told(run).log == ("the line that tells",)


def test_an_attempt_that_left_no_word_is_told(run: MadeRun) -> None:
    run.event(Kind.ATTEMPT_STARTED, Token(2, 1), nodes=["n1"])
    (end,) = told(run).ends
    assert end.evidence == "attempt 1 ended without a word"
    assert end.failure_class is FailureClass.UNKNOWN


def test_a_hang_names_the_silent_rank_and_the_stacks(run: MadeRun) -> None:
    run.event(Kind.HANG_FOUND, FIRST, rank=1, node="n1", phase="step", stacks="attempts/1/1/stacks")
    run.event(Kind.GENERATION_ENDED, FIRST, failure_class="hang", evidence="silent")
    text = describe(told(run))
    assert "rank 1, node n1, in phase step" in text
    assert str(run.dir.path / "attempts/1/1/stacks") in text.replace("\n         ", "")


def test_a_ledger_cut_in_mid_line_is_read_up_to_there(run: MadeRun) -> None:
    run.event(Kind.GENERATION_ENDED, FIRST, **FAILED)
    (path,) = run.dir.ledger_dir.glob("*.jsonl")
    whole = path.read_bytes()
    for cut in range(len(whole) - 400, len(whole) + 1, 7):
        path.write_bytes(whole[:cut])
        describe(told(run))
    path.write_bytes(whole + b'{"v":1,"time":17')
    found = told(run)
    assert len(found.ends) == 1
    assert "1 line of the ledger could not be read" in describe(found)


@pytest.mark.parametrize("value", [None, 3, [], {"a": 1}, "odd", float("nan")])
def test_facts_of_any_type_are_unknown_and_never_fatal(run: MadeRun, value: Any) -> None:
    for kind in (Kind.GENERATION_ENDED, Kind.ATTEMPT_ENDED, Kind.HANG_FOUND, Kind.RESUMED):
        facts = dict.fromkeys((*FAILED, "verdict", "reason", "lost_steps", "stacks"), value)
        run.event(kind, FIRST, **facts)
    run.event(Kind.GENERATION_ENDED, None)
    found = told(run)
    describe(found)
    json.dumps(found.to_json())


def test_a_run_without_a_ledger_and_without_run_yaml_is_still_told(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "runs")
    run.dir.run_yaml.write_text("no: run")
    found = told(run)
    assert found.view.status.state is RunState.PENDING
    assert "run.yaml could not be read" in describe(found)


def test_a_submission_that_was_refused_is_the_failure(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "runs").event(Kind.SUBMIT_FAILED, reason="Invalid account")
    text = describe(told(run))
    assert "FAILED (environment)" in text
    assert "Invalid account" in text


def test_what_waits_says_what_slurm_says(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "runs").submitted()
    job = JobRecord("100", "PENDING", reason="Resources", start_time=1_700_003_600.0)
    view = replace(
        view_run(run.dir, ask_slurm=False), slurm=job, reason="waits in the queue (Resources)"
    )
    found = why(run.dir, view=view)
    assert found.next.at == 1_700_003_600.0
    assert "waits in the queue (Resources)" in describe(found)


def test_what_is_held_says_what_releases_it(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "runs").submitted()
    view = view_run(run.dir, ask_slurm=False)
    held = replace(view, status=replace(view.status, state=RunState.HELD), reason="held by hand")
    assert why(run.dir, view=held).next.command == "scontrol release 100"


def test_an_end_that_only_slurm_knows_of_is_told(run: MadeRun) -> None:
    view = view_run(run.dir, ask_slurm=False)
    status = replace(
        view.status, state=RunState.FAILED, failure_class=FailureClass.HOST_MEMORY,
        evidence="Slurm job 100 ended OUT_OF_MEMORY",
    )  # fmt: skip
    found = why(run.dir, view=replace(view, status=status, source="sacct"))
    assert found.first is not None
    assert found.first.evidence == "Slurm job 100 ended OUT_OF_MEMORY"
    assert hint_of(FailureClass.HOST_MEMORY)[:20] in describe(found)


def test_many_ends_are_folded_into_counts(run: MadeRun) -> None:
    for generation in range(1, 41):
        token = Token(1, generation)
        run.event(Kind.GENERATION_ENDED, token, verdict="continue", **FAILED)
        restarted(run, Token(1, generation + 1))
    text = describe(told(run))
    assert f"{40 - SHOWN_ENDS} ends before these: {40 - SHOWN_ENDS} network; 170 steps lost" in text
    assert len(text.splitlines()) < 40, "one screen"


@pytest.mark.parametrize("columns", [40, 60, 120])
def test_no_line_of_prose_is_wider_than_the_terminal(run: MadeRun, columns: int) -> None:
    run.log("r3 | " + "x" * 500 + "\n", node="n2")
    run.event(Kind.GENERATION_ENDED, FIRST, **{**FAILED, "evidence": "word " * 80})
    assert max(map(len, describe(told(run), columns).splitlines())) <= columns


def test_json_has_null_where_nothing_is_known(run: MadeRun) -> None:
    run.event(Kind.GENERATION_ENDED, FIRST, failure_class="unknown", evidence="e")
    body = json.loads(json.dumps(told(run).to_json()))
    assert body["first"]["rank"] is body["first"]["verdict"] is body["fit"] is None
    assert body["next"]["command"] is None
    assert body["unreadable_ledger_lines"] == 0


def test_every_failure_class_has_a_hint() -> None:
    without = {c for c in FailureClass if not hint_of(c)}
    assert without == {FailureClass.COMPLETED, FailureClass.FENCED}


def test_the_page_of_examples_is_up_to_date() -> None:
    """docs/why.md is what `tools/show-why` prints."""
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "show-why"], capture_output=True, text=True, check=True
    ).stdout
    page = (ROOT / "docs" / "why.md").read_text(encoding="utf-8")
    assert made == page, "python tools/show-why > docs/why.md"
    missing = [
        c for c in FailureClass if c not in ("completed", "fenced") and f"## {c}" not in page
    ]
    assert missing == [], "an example for each class"
