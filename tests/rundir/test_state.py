"""The fold of the ledger: states, and where the time went, against sums done by hand."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from air_hpc.rundir.events import Event, Kind, merge, parse_ledger
from air_hpc.rundir.fence import Token
from air_hpc.rundir.state import RunStatus, TimeSpent, fold
from air_hpc.rundir.words import TERMINAL, FailureClass, RunState, Verdict


def at(time: float, kind: str, token: str | None = None, **facts: Any) -> Event:
    return Event(time, kind, None if token is None else Token.parse(token), facts)


def began(time: float, token: str, resume: int | None = None) -> list[Event]:
    """An attempt's start, 10 s of loading, and the first step."""
    events = [
        at(time, Kind.ATTEMPT_STARTED, token, job_id="7", nodes=["a"], restart_count=0),
        at(time, Kind.GENERATION_STARTED, token, resume_step=resume),
    ]
    if resume is not None:
        events.append(at(time + 10, Kind.RESUMED, token, step=resume))
    return [*events, at(time + 10, Kind.TRAINING_STARTED, token, step=(resume or 0) + 1)]


def committed(time: float, token: str, step: int, started: float | None = None) -> Event:
    return at(time, Kind.CHECKPOINT_COMMITTED, token, step=step, started=started or time)


def ended(time: float, token: str, failure: str, verdict: str, step: int | None = None) -> Event:
    facts: dict[str, Any] = {"failure_class": failure, "verdict": verdict, "evidence": "said so"}
    if step is not None:
        facts["step"] = step
    return at(time, Kind.ATTEMPT_ENDED, token, **facts)


# -- arithmetic ----------------------------------------------------------------------------------


def test_one_attempt_from_submission_to_the_end() -> None:
    status = fold(
        [
            at(0, Kind.SUBMITTED, job_id=7),
            *began(100, "1.1"),  # trains from 110
            committed(160, "1.1", 50, started=155),
            at(200, Kind.STOP_AGREED, "1.1", target_step=90),
            committed(204, "1.1", 90, started=200),
            at(205, Kind.GENERATION_ENDED, "1.1", failure_class="completed", step=90),
            ended(206, "1.1", "completed", "stop", step=90),
        ],
        now=10_000,
    )
    assert status.time == TimeSpent(queued_s=100, starting_s=10, training_s=90, stopping_s=6)
    assert status.time.goodput == pytest.approx(90 / 106)
    assert (status.state, status.step, status.committed_step) == (RunState.FINISHED, 90, 90)
    assert (status.submitted, status.started, status.ended) == (0, 100, 206)
    assert status.job_id == "7"


@pytest.mark.parametrize("cluster", ["local", "allocation"])
def test_the_process_of_a_run_without_sbatch_is_no_job(cluster: str) -> None:
    """MLflow was once told the id of a process as that of a job."""
    submitted = at(0, Kind.SUBMITTED, job_id="4711", cluster=cluster)
    assert fold([submitted]).job_id is None
    assert fold([submitted, *began(1, "1.1")]).job_id == "7"


def test_three_attempts_with_a_rollback() -> None:
    events = [
        at(0, Kind.SUBMITTED, job_id="7"),
        *began(10, "1.1"),  # trains 20..100
        committed(60, "1.1", 40, started=55),  # 35 s of training are in it
        ended(100, "1.1", "node_lost", "requeue", step=80),
        *began(150, "2.1", resume=40),  # 50 queued, 10 starting; trains 160..220
        committed(200, "2.1", 80, started=190),  # 35 + 30
        at(220, Kind.STOP_AGREED, "2.1", target_step=100),
        committed(230, "2.1", 100, started=220),  # 35 + 60
        ended(232, "2.1", "preempted", "requeue", step=100),
        *began(300, "3.1", resume=100),  # 68 queued, 10 starting; trains 310..400
        ended(400, "3.1", "completed", "stop", step=200),
    ]
    status = fold(events)
    assert status.time == TimeSpent(
        queued_s=10 + 50 + 68,
        starting_s=30,
        training_s=35 + 60 + 90,
        lost_s=80 - 35,
        stopping_s=12,
    )
    assert status.time.wall_s == 400
    assert status.rolled_back == ((41, 80),)
    assert [end.failure_class for end in status.ends] == ["node_lost", "preempted", "completed"]
    assert [end.committed_step for end in status.ends] == [40, 100, 100]
    assert status.attempt == 3


def test_two_rollbacks_to_the_same_commit_lose_both_trainings() -> None:
    events = [
        *began(0, "1.1"),  # trains 10..60
        committed(30, "1.1", 20),  # 20 s are in it
        ended(60, "1.1", "device", "requeue", step=50),
        *began(60, "2.1", resume=20),  # trains 70..100
        ended(100, "2.1", "device", "requeue", step=45),
        *began(100, "3.1", resume=20),  # trains 110..130
    ]
    status = fold(events, now=130)
    assert status.time == TimeSpent(starting_s=30, training_s=20 + 20, lost_s=30 + 30)
    assert status.rolled_back == ((21, 50), (21, 45))
    assert status.state == RunState.RUNNING


def test_a_bad_checkpoint_loses_what_was_trained_since_the_one_before() -> None:
    events = [
        *began(0, "1.1"),  # trains 10..60
        committed(20, "1.1", 10),  # 10 s
        committed(40, "1.1", 30),  # 30 s
        ended(60, "1.1", "preempted", "requeue"),
        at(70, Kind.ATTEMPT_STARTED, "2.1"),
        at(71, Kind.CHECKPOINT_BAD, "2.1", step=30, reason="torn"),
        at(80, Kind.RESUMED, "2.1", step=10),
        at(80, Kind.TRAINING_STARTED, "2.1", step=11),
    ]
    status = fold(events, now=100)
    assert status.time == TimeSpent(queued_s=10, starting_s=20, training_s=10 + 20, lost_s=40)
    assert status.bad_steps == (30,)
    assert status.resume_step == 10
    assert status.rolled_back == ((11, 30),)


def test_a_start_from_scratch_loses_everything_before() -> None:
    status = fold([*began(0, "1.1"), committed(40, "1.1", 9), *began(50, "1.2")], now=70)
    assert status.time == TimeSpent(starting_s=20, training_s=10, lost_s=40)


def test_training_past_the_last_commit_of_a_lost_node_is_lost_although_it_named_no_step() -> None:
    """It once stayed in the kept time: nothing said that steps past the commit existed."""
    events = [
        *began(0, "1.1"),
        committed(50, "1.1", 40),  # 40 s of training, then silence from the node
        ended(90, "1.1", "node_lost", "requeue"),
        *began(100, "2.1", resume=40),
    ]
    assert fold(events).time == TimeSpent(queued_s=10, starting_s=20, training_s=40, lost_s=40)


def test_a_commit_without_an_event_is_learnt_from_the_resume() -> None:
    """Its writer died between the rename and the event."""
    events = [
        *began(0, "1.1"),
        ended(60, "1.1", "node_lost", "requeue"),
        *began(60, "2.1", resume=30),  # 50 s of training count as kept: when it was is unknown
        ended(90, "2.1", "node_lost", "requeue", step=60),  # 20 s more
        *began(90, "3.1", resume=30),
    ]
    status = fold(events)
    assert status.committed_step == 30
    assert status.time == TimeSpent(starting_s=30, training_s=50, lost_s=20)


def test_a_save_that_began_before_the_stop_holds_no_training_after_it_began() -> None:
    events = [
        *began(0, "1.1"),  # trains 10..100
        at(100, Kind.STOP_AGREED, "1.1", target_step=90),
        committed(103, "1.1", 80, started=90),
        ended(110, "1.1", "time_limit", "requeue", step=90),
        *began(110, "2.1", resume=80),
    ]
    assert fold(events).time == TimeSpent(starting_s=20, training_s=80, lost_s=10, stopping_s=10)


# -- states --------------------------------------------------------------------------------------


def test_states_follow_the_way_of_a_run() -> None:
    events = [
        at(0, Kind.SUBMITTED, job_id="7"),
        at(1, Kind.ATTEMPT_STARTED, "1.1"),
        at(2, Kind.TRAINING_STARTED, "1.1", step=1),
        at(3, Kind.STOP_AGREED, "1.1", target_step=2),
        ended(4, "1.1", "preempted", "requeue"),
        at(5, Kind.ATTEMPT_STARTED, "2.1"),
        ended(6, "2.1", "user_error", "stop"),
        at(7, Kind.ATTEMPT_STARTED, "3.1"),
    ]
    states = [fold(events[: n + 1]).state for n in range(len(events))]
    assert states == [
        "PENDING", "STARTING", "RUNNING", "SAVING", "REQUEUED", "STARTING", "FAILED", "FAILED",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("failure", "verdict", "state"),
    [
        ("completed", "stop", RunState.FINISHED),
        ("cancelled", "stop", RunState.CANCELLED),
        ("hang", "stop", RunState.FAILED),
        ("hang", "exclude_and_requeue", RunState.REQUEUED),
        ("a new word", "stop", RunState.FAILED),
        ("hang", "a new word", RunState.FAILED),
    ],
)
def test_an_end_leads_to_its_state(failure: str, verdict: str, state: RunState) -> None:
    assert fold([*began(0, "1.1"), ended(20, "1.1", failure, verdict)]).state == state


def test_a_cancelled_queued_run_is_over_and_a_running_one_is_not_yet() -> None:
    assert fold([at(0, "submitted"), at(1, "cancel_requested")]).state == RunState.CANCELLED
    running = fold([*began(0, "1.1"), at(20, "cancel_requested")])
    assert (running.state, running.cancel_requested) == (RunState.RUNNING, True)


def test_a_refused_submission_is_over_until_one_is_accepted() -> None:
    events = [at(0, Kind.SUBMIT_FAILED, reason="no such account")]
    refused = fold(events, now=50)
    assert (refused.state, refused.failure_class) == (RunState.FAILED, FailureClass.ENVIRONMENT)
    assert refused.time.wall_s == 0
    accepted = fold([*events, at(60, Kind.SUBMITTED, job_id="8"), *began(90, "1.1")], now=110)
    assert accepted.state == RunState.RUNNING
    assert (accepted.failure_class, accepted.ended) == (None, None)
    assert accepted.time == TimeSpent(queued_s=90, starting_s=10, training_s=10)


def test_what_a_fenced_attempt_says_late_moves_only_its_own_end() -> None:
    """A node cut off for a while ended "its" run, which a newer attempt was training."""
    late = [
        committed(70, "1.1", 99),
        at(71, Kind.STOP_AGREED, "1.1", target_step=99),
        at(72, Kind.GENERATION_ENDED, "1.1", failure_class="network"),
        ended(73, "1.1", "network", "stop"),
    ]
    status = fold([*began(0, "1.1"), *began(50, "2.1"), *late], now=80)
    assert (status.state, status.attempt, status.committed_step) == (RunState.RUNNING, 2, None)
    assert status.failure_class is None
    assert [(end.token, end.failure_class) for end in status.ends] == [(Token(1, 1), "network")]
    assert status.time.wall_s == 80


def test_a_stop_in_the_pause_after_a_failure_does_not_forget_the_failure() -> None:
    """Both ends have the same token, since the next generation was never claimed: the later, free
    one once took the place of the one that costs budget."""
    status = fold(
        [
            at(10, Kind.ATTEMPT_STARTED, "1.1"),
            at(50, Kind.GENERATION_ENDED, "1.1", failure_class="hang", verdict="continue"),
            at(51, Kind.ATTEMPT_ENDED, "1.1", failure_class="preempted", verdict="requeue"),
            at(60, Kind.ATTEMPT_STARTED, "2.1"),
        ]
    )
    assert [end.failure_class for end in status.ends] == ["hang", "preempted"]


def test_an_attempt_without_an_end_counts_as_one_when_the_next_begins() -> None:
    """Its coordinator was killed; such a run was once restarted without end."""
    status = fold([*began(0, "1.1"), committed(20, "1.1", 5), *began(50, "2.1", resume=5)])
    (end,) = status.ends
    assert (end.token, end.failure_class, end.committed_step) == (Token(1, 1), "unknown", 5)
    assert "attempt 1 ended without a word" in end.evidence


def test_an_attempt_that_was_killed_after_a_signal_was_restarted_by_slurm() -> None:
    signalled = at(20, Kind.SIGNAL, "1.1", name="SIGTERM")
    status = fold([*began(0, "1.1"), signalled, *began(50, "2.1"), *began(90, "3.1")])
    assert [end.failure_class for end in status.ends] == ["requeued", "unknown"]


def test_nothing_after_the_end_changes_why_it_ended() -> None:
    end = [*began(0, "1.1"), ended(20, "1.1", "completed", "stop", step=9)]
    late = [
        at(21, Kind.GENERATION_ENDED, "1.1", failure_class="unknown"),
        at(22, Kind.RESUMED, "1.1", step=0),
        at(23, Kind.STOP_AGREED, "1.1"),
        at(24, Kind.SUBMIT_FAILED),
        ended(25, "1.1", "hang", "stop"),
    ]
    one, other = fold(end), fold([*end, *late], now=99)
    assert (other.state, other.failure_class, other.time) == (
        one.state,
        one.failure_class,
        one.time,
    )


# -- any sequence --------------------------------------------------------------------------------

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400)])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([*FailureClass, *Verdict]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
keys = st.sampled_from(
    ["step", "started", "nodes", "failure_class", "verdict", "evidence", "job_id", "reason",
     "resume_step", "restart_count", "array_task_id", "mlflow_run_id", "target_step"]
)  # fmt: skip
tokens = st.none() | st.builds(Token, st.integers(1, 3), st.integers(1, 2))
garbage = st.builds(
    Event,
    time=st.floats(allow_nan=False, allow_infinity=False, min_value=-1e9, max_value=1e12),
    kind=st.sampled_from([*map(str, Kind), "", "unknown", "__init__", "roll_back"]),
    token=tokens,
    facts=st.dictionaries(keys, values, max_size=5),
)
sensible = st.builds(
    lambda time, kind, token, step, failure, verdict: at(
        time, kind, str(token), step=step, failure_class=failure, verdict=verdict, nodes=["a"]
    ),
    st.integers(0, 1000),
    st.sampled_from(list(Kind)),
    st.builds(Token, st.integers(1, 3), st.integers(1, 2)),
    st.integers(0, 50),
    st.sampled_from(list(FailureClass)),
    st.sampled_from([Verdict.CONTINUE, Verdict.REQUEUE, Verdict.REQUEUE, Verdict.STOP]),
)


def _wall_s(events: list[Event] | tuple[Event, ...], status: RunStatus, now: float) -> float:
    """First event to the end of the run, by the clock that never steps back."""
    over = [fold(events[: n + 1]).terminal for n in range(len(events))]
    clocks = list(itertools.accumulate((event.time for event in events), max))
    if over[-1]:
        since = len(over) - len(list(itertools.takewhile(bool, reversed(over))))
        return clocks[since] - clocks[0]
    return max(clocks[-1], now) - clocks[0]


@settings(max_examples=120, deadline=None)
@given(st.lists(garbage | sensible, min_size=1, max_size=14), st.floats(-1e9, 1e12))
def test_times_are_never_negative_and_sum_to_the_wall_time(events: list[Event], now: float) -> None:
    status = fold(events, now)
    spent = [getattr(status.time, name) for name in TimeSpent.__dataclass_fields__]
    assert min(spent) >= 0
    assert status.time.wall_s == pytest.approx(_wall_s(events, status, now), rel=1e-9, abs=1e-3)
    assert fold(events, now) == status or "nan" in repr(status)
    assert status.terminal == (status.state in TERMINAL)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(garbage | sensible, max_size=6), max_size=4), st.randoms())
def test_the_order_in_which_files_are_read_changes_nothing(
    parts: list[list[Event]], random: Any
) -> None:
    named = [
        [Event(e.time, e.kind, e.token, e.facts, f"writer-{n}") for e in part]
        for n, part in enumerate(parts)
    ]
    merged = merge(named)
    random.shuffle(named)
    assert repr(merge(named)) == repr(merged)
    assert repr(fold(merge(named))) == repr(fold(merged))
    for part in named:
        own = [id(event) for event in merged if event.writer == (part[0].writer if part else "")]
        assert own == [id(event) for event in part], "a writer's own order was changed"


@settings(max_examples=80, deadline=None)
@given(st.lists(garbage | sensible, min_size=1, max_size=6), st.data())
def test_a_ledger_cut_anywhere_reads_as_a_prefix_of_itself(
    events: list[Event], data: st.DataObject
) -> None:
    text = "".join(event.to_json() + "\n" for event in events).encode()
    whole, unreadable = parse_ledger(text, "w")
    assert (len(whole), unreadable) == (len(events), 0)
    cut, skipped = parse_ledger(text[: data.draw(st.integers(0, len(text)))], "w")
    assert skipped <= 1
    assert repr(cut) == repr(whole[: len(cut)])
    fold(cut)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.binary(max_size=40) | values.map(lambda v: json.dumps(v).encode()), max_size=8))
def test_any_bytes_are_read(lines: list[bytes]) -> None:
    events, _ = parse_ledger(b"\n".join(lines), "w")
    fold(events)


@pytest.mark.parametrize(
    "line",
    [
        '{"time": 1' + "0" * 400 + ', "kind": "submitted"}',
        '{"time": 1' + "0" * 5000 + ', "kind": "submitted"}',
        '{"time": NaN, "kind": "submitted"}',
        '{"time": Infinity, "kind": "submitted"}',
        '{"time": "nan", "kind": "submitted"}',
        '{"time": 1, "kind": 5}',
        '{"time": 1, "kind": "submitted", "token": "one"}',
        '{"time": 1, "kind": "submitted", "token": 1}',
        '{"time": 1, "kind": "submitted", "facts": []}',
        '{"kind": "submitted"}',
        "[" * 100_000,
        "null",
        "\x00\x00",
    ],
)
def test_a_line_that_is_no_event_is_counted_and_skipped(line: str) -> None:
    good = at(1, "submitted").to_json()
    events, unreadable = parse_ledger(f"{line}\n{good}\n".encode(), "w")
    assert [event.kind for event in events] == ["submitted"]
    assert unreadable == 1


def test_kinds_and_facts_of_a_newer_version_are_kept() -> None:
    line = '{"v": 9, "time": 1.5, "kind": "moon_rose", "facts": {"phase": "full"}, "more": 1}'
    (event,), unreadable = parse_ledger(line.encode(), "w")
    assert (event.kind, event.facts, unreadable) == ("moon_rose", {"phase": "full"}, 0)
    assert fold([event]).state == RunState.PENDING


def test_an_empty_ledger_is_a_pending_run() -> None:
    assert fold([], now=5.0) == RunStatus()
    assert fold([]).time.goodput is None


def slow(time: float, rank: int, ratio: object = 1.18, change: str = "found") -> Event:
    facts = {"rank": rank, "node": "n3", "device": None, "ratio": ratio, "change": change}
    return at(time, Kind.STRAGGLER, "1.1", window_s=60, **facts)


def test_stragglers_are_those_of_the_present_generation_that_did_not_end() -> None:
    events = [*began(0, "1.1"), slow(20, 5), slow(21, 2), slow(22, 5, 1.4, "worse")]
    assert [str(each) for each in fold(events).stragglers] == [
        "rank 2 on n3 is 18 % slower than the median",
        "rank 5 on n3 is 40 % slower than the median",
    ]
    events.append(slow(30, 2, 1.0, "ended"))
    assert [each.rank for each in fold(events).stragglers] == [5]
    events.append(at(40, Kind.GENERATION_STARTED, "1.2"))
    assert fold(events).stragglers == ()
    assert fold([slow(1, 2, "much")]).stragglers == ()
