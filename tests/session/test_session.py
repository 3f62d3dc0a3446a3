"""The worker's contract with its agent, with real processes on the worker's side."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from air_hpc.errors import AirHpcError
from air_hpc.rundir.atomic import write_file
from air_hpc.rundir.commit import committed_steps, digest_file
from air_hpc.rundir.fence import Fenced, Token, claim_next_attempt, record_inherited
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.spool import effective_samples, iterate_samples
from air_hpc.session.messages import MAX_BYTES, Message, decode, encode, socket_pair
from air_hpc.session.page import NONE, PHASES, Page, Word
from air_hpc.session.session import Session, StopNotAgreed, WorkerEnv

LEASE_NS = 2**62


def worker_env(run: RunDir, rank: int = 0, world_size: int = 1) -> WorkerEnv:
    return WorkerEnv(run, Token(1, 1), rank, rank, world_size, world_size, 0, stop_timeout_s=60)


@pytest.fixture
def pair(run: RunDir) -> Iterator[tuple[Session, Page, socket.socket]]:
    """Rank 0's session, its page, and the agent's end of its channel."""
    token = claim_next_attempt(run)
    record_inherited(run, token, {})
    page = Page.create()
    page.write(Word.LEASE_NS, LEASE_NS)
    ours, theirs = socket_pair()
    yield Session(worker_env(run), page, theirs), page, ours
    ours.close()
    theirs.close()


def received(channel: socket.socket) -> list[dict[str, object]]:
    channel.setblocking(False)
    messages = []
    with contextlib.suppress(BlockingIOError):
        while packet := channel.recv(MAX_BYTES):
            message = decode(packet)
            assert message is not None
            messages.append(message)
    return messages


# -- the page ------------------------------------------------------------------------------------


def test_a_fresh_page_has_nothing_begun_no_target_and_no_lease() -> None:
    page = Page.create()
    assert [page.read(word) for word in (Word.BEGUN_STEP, Word.DONE_STEP, Word.TARGET_STEP)] == [
        NONE, NONE, NONE,
    ]  # fmt: skip
    assert page.read(Word.STOP_FLAG) == page.read(Word.LEASE_NS) == 0
    assert PHASES[page.read(Word.PHASE)] == "start"
    page.close()
    page.close()


@given(st.dictionaries(st.sampled_from(Word), st.integers(-(2**63), 2**63 - 1)))
def test_words_are_seen_through_another_mapping_and_apart_from_each_other(
    values: dict[Word, int],
) -> None:
    page = Page.create()
    other = Page.attach(os.dup(page.fd))
    for word, value in values.items():
        page.write(word, value)
    for word, value in values.items():
        assert other.read(word) == value
    other.close()
    page.close()


def test_a_word_is_never_seen_half_written_by_another_process() -> None:
    page = Page.create()
    low, high = 0x0101010101010101, 0x7E7E7E7E7E7E7E7E
    page.write(Word.BEGUN_STEP, low)
    pid = os.fork()
    if pid == 0:
        while True:
            page.write(Word.BEGUN_STEP, high)
            page.write(Word.BEGUN_STEP, low)
    try:
        assert {page.read(Word.BEGUN_STEP) for _ in range(50_000)} <= {low, high}
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        page.close()


# -- the stop agreement --------------------------------------------------------------------------


def _train(run: RunDir, rank: int, world_size: int, page: Page, steps: int, seed: int) -> None:
    """A worker's loop with steps of random length; its last word is in DONE_STEP."""
    pause = random.Random(seed)
    session = Session(worker_env(run, rank + 1, world_size), page, None)  # rank 0 would spool
    for step in range(1, steps + 1):
        if not session.begin_step(step):
            break
        time.sleep(pause.choice([0, 0, 0.0005, 0.003]))
        session.end_step(step)


def _fork(action: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


@pytest.mark.parametrize("seed", range(12))
def test_all_workers_do_every_step_up_to_one_target_and_none_past_it(
    run: RunDir, seed: int
) -> None:
    rng = random.Random(seed)
    world_size, steps = rng.choice([2, 3, 4]), rng.choice([10, 10_000, 10_000])
    pages = [Page.create() for _ in range(world_size)]
    children = [
        _fork(lambda rank=rank, page=page: _train(run, rank, world_size, page, steps, seed + rank))
        for rank, page in enumerate(pages)
    ]
    time.sleep(rng.uniform(0, 0.04))
    for page in rng.sample(pages, len(pages)):
        page.write(Word.STOP_FLAG, 1)
    time.sleep(0.01)
    target = max(page.read(Word.BEGUN_STEP) for page in pages)
    for page in rng.sample(pages, len(pages)):
        page.write(Word.TARGET_STEP, target)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    done = [page.read(Word.DONE_STEP) for page in pages]
    for page in pages:
        page.close()
    assert codes == [0] * world_size
    assert set(done) == ({target} if target != NONE else {NONE})


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_interleaving_of_steps_and_flags_ends_at_one_step(data: st.DataObject) -> None:
    """The protocol by its atomic acts, each worker and the coordinator moved in any order.

    A worker under the flag without a target waits, as `begin_step` does.
    """
    world_size = data.draw(st.integers(1, 4))
    pages = [Page.create() for _ in range(world_size)]
    workers = [_acts(page) for page in pages]
    for _ in range(data.draw(st.integers(0, 30))):
        next(workers[data.draw(st.integers(0, world_size - 1))])
    for page in data.draw(st.permutations(pages)):
        page.write(Word.STOP_FLAG, 1)
        for _ in range(data.draw(st.integers(0, 3))):
            next(workers[data.draw(st.integers(0, world_size - 1))])
    for worker in workers:  # the coordinator's pause: whoever was about to read the flag has
        next(worker)
    target = max(page.read(Word.BEGUN_STEP) for page in pages)
    order = data.draw(st.permutations(range(world_size)))
    for index in order:
        pages[index].write(Word.TARGET_STEP, target)
        for _ in range(data.draw(st.integers(0, 5))):
            next(workers[data.draw(st.integers(0, world_size - 1))], None)
    for worker in workers:
        for _ in worker:
            pass
    assert {page.read(Word.DONE_STEP) for page in pages} == {target}
    for page in pages:
        page.close()


def _acts(page: Page) -> Iterator[None]:
    step = 0
    while True:
        step += 1
        page.write(Word.BEGUN_STEP, step)
        yield
        if page.read(Word.STOP_FLAG):
            while (target := page.read(Word.TARGET_STEP)) == NONE:
                yield
            if step > target:
                return
        assert page.read(Word.DONE_STEP) == (step - 1 or NONE), "a step was missed"
        page.write(Word.DONE_STEP, step)


def test_begin_step_publishes_before_it_reads_the_flag(
    pair: tuple[Session, Page, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, page, _ = pair
    acts: list[tuple[str, Word]] = []
    read, write = Page.read, Page.write
    monkeypatch.setattr(Page, "read", lambda s, w: (acts.append(("read", w)), read(s, w))[1])
    monkeypatch.setattr(Page, "write", lambda s, w, v: (acts.append(("write", w)), write(s, w, v)))
    assert session.begin_step(1)
    assert acts[:2] == [("write", Word.BEGUN_STEP), ("read", Word.STOP_FLAG)]
    assert page.read(Word.BEGUN_STEP) == 1


def test_a_target_that_never_comes_is_an_error_before_long(
    pair: tuple[Session, Page, socket.socket],
) -> None:
    session, page, _ = pair
    session.env = replace(session.env, stop_timeout_s=0.02)
    page.write(Word.STOP_FLAG, 1)
    assert session.stop_requested()
    with pytest.raises(StopNotAgreed, match=r"rank 0: no common step .* within 0\.02 s"):
        session.begin_step(5)


def test_a_worker_already_past_its_last_step_needs_no_target(
    pair: tuple[Session, Page, socket.socket],
) -> None:
    session, page, channel = pair
    assert session.begin_step(1)
    session.end_step(1)
    page.write(Word.STOP_FLAG, 1)
    session.finished(1)
    assert [m["kind"] for m in received(channel)] == ["training_started", "finished"]


# -- phases, messages ----------------------------------------------------------------------------


def test_phases_nest_and_return_also_after_an_error(
    pair: tuple[Session, Page, socket.socket],
) -> None:
    session, page, _ = pair

    def now() -> str:
        return PHASES[page.read(Word.PHASE)]

    with session.phase("load"):
        seen = []

        def fail() -> None:
            with session.phase("data"):
                seen.append(now())
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert seen == ["data"]
        assert now() == "load"
    assert now() == "start"
    session.begin_step(1)
    assert now() == "step"
    with pytest.raises(ValueError, match="tuple"), session.phase("nonsense"):
        pass


def test_compute_totals_reach_the_page(pair: tuple[Session, Page, socket.socket]) -> None:
    session, page, _ = pair
    session.computed(2_000_000, 4)
    assert (page.read(Word.COMPUTE_NS), page.read(Word.COMPUTE_STEPS)) == (2_000_000, 4)


def test_messages_arrive_whole_and_in_order(pair: tuple[Session, Page, socket.socket]) -> None:
    session, _, channel = pair
    session.begin_step(7)
    session.end_step(7)
    session.note(Message.MEASURED, device_name="é\n", loss=float("nan"))
    session.stopped(7, saved=True)
    first, second, third = received(channel)
    assert first == {"kind": "training_started", "rank": 0, "step": 7}
    assert second["device_name"] == "é\n"
    assert third == {"kind": "stopped", "rank": 0, "step": 7, "saved": True}


def test_an_error_names_itself_however_long_its_traceback(
    pair: tuple[Session, Page, socket.socket],
) -> None:
    session, _, channel = pair
    text = "Traceback\n" + "\N{SNOWMAN}" * 500_000 + "ValueError: the end"
    session.failed(ValueError("x" * 5000), traceback=text, failure_class="data")
    (message,) = received(channel)
    assert str(message["traceback"]).endswith("ValueError: the end")
    assert (message["type"], message["failure_class"], message["step"]) == (
        "ValueError",
        "data",
        NONE,
    )
    assert message["rank"] == 0


def test_facts_too_long_for_a_packet_do_not_end_the_channel(
    pair: tuple[Session, Page, socket.socket],
) -> None:
    """The kernel once refused such a packet, which looked like an agent that had gone."""
    session, _, channel = pair
    session.note(Message.MEASURED, table=list(range(200_000)), small=1)
    session.note(Message.MEASURED, **{f"key_{n}": "v" * 4000 for n in range(500)})
    session.note(Message.MEASURED, **{f"key_{n}": n for n in range(8_000)})
    session.finished(3)
    big, many, scalars, last = received(channel)
    assert big["small"] == 1
    assert many["rank"] == 0
    assert scalars == {"kind": "measured", "truncated": True}
    assert last["kind"] == "finished"


facts = st.dictionaries(
    st.text(max_size=8),
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.lists(st.integers(), max_size=3),
    max_size=5,
)  # fmt: skip


@given(facts, st.integers(1, 30_000))
def test_every_packet_fits_and_short_ones_are_whole(
    values: dict[str, object], repeated: int
) -> None:
    values.pop("kind", None)
    assert decode(encode("measured", values)) == {"kind": "measured", **values}
    long = {key: str(value) * repeated for key, value in values.items()}
    assert len(encode("measured", long)) <= MAX_BYTES


@given(
    st.binary(max_size=50) | st.sampled_from([b"[" * 60_000, b"[1]", b'{"kind": 1}', b"", b"\xff"])
)
def test_what_is_no_message_decodes_to_nothing_or_to_one_with_a_kind(data: bytes) -> None:
    message = decode(data)
    assert message is None or isinstance(message["kind"], str)


def test_an_agent_that_is_gone_harms_nobody(pair: tuple[Session, Page, socket.socket]) -> None:
    session, _, channel = pair
    channel.close()
    for step in range(1, 4):
        assert session.begin_step(step)
        session.end_step(step, {"train/loss": 1.0})
    session.note(Message.MEASURED, x=1)
    session.stopped(3, saved=False)
    assert list(effective_samples(session.run)) == [1, 2, 3]


# -- saves ---------------------------------------------------------------------------------------


def _save(session: Session, step: int) -> None:
    folder = session.begin_save(step)
    write_file(folder / "rank-0.bin", b"abc")
    session.commit_save(
        step,
        {"rank-0.bin": digest_file(folder / "rank-0.bin")},
        facts={},
        started=1.0,
        blocking_s=0.5,
        duration_s=2.0,
    )


def test_a_committed_step_has_its_metrics_on_disk(
    run: RunDir, pair: tuple[Session, Page, socket.socket]
) -> None:
    session, _, channel = pair
    session.begin_step(1)
    session.end_step(1, {"train/loss": 2.0})
    _save(session, 1)
    assert [sample.step for sample in iterate_samples(run)] == [1]
    assert committed_steps(run) == [1]
    assert received(channel)[-1] == {
        "kind": "committed", "rank": 0, "step": 1, "bytes": 3, "started": 1.0,
        "blocking_s": 0.5, "duration_s": 2.0,
    }  # fmt: skip
    assert session.retire(keep_last=1, keep_every_steps=None, verified=None) == []


def test_without_a_lease_nothing_is_saved_or_removed(
    run: RunDir, pair: tuple[Session, Page, socket.socket]
) -> None:
    session, page, _ = pair
    folder = session.begin_save(1)
    write_file(folder / "a", b"abc")
    files = {"a": digest_file(folder / "a")}
    page.write(Word.LEASE_NS, time.monotonic_ns() - 1)
    with pytest.raises(Fenced, match="rank 0: the lease ran out"):
        session.commit_save(1, files, facts={}, started=0, blocking_s=0, duration_s=0)
    with pytest.raises(Fenced):
        session.begin_save(2)
    with pytest.raises(Fenced):
        session.retire(keep_last=1, keep_every_steps=None, verified=None)
    assert committed_steps(run) == []
    page.write(Word.LEASE_NS, time.monotonic_ns() + 60 * 10**9)
    session.commit_save(1, files, facts={}, started=0, blocking_s=0, duration_s=0)
    assert committed_steps(run) == [1]


def test_a_newer_attempt_fences_a_session_with_a_valid_lease(
    run: RunDir, pair: tuple[Session, Page, socket.socket]
) -> None:
    session, _, _ = pair
    record_inherited(run, claim_next_attempt(run), {})
    with pytest.raises(Fenced, match=r"fenced off by 2\.1"):
        _save(session, 1)
    assert committed_steps(run) == []


def test_an_aborted_save_is_told_and_leaves_nothing(
    run: RunDir, pair: tuple[Session, Page, socket.socket]
) -> None:
    session, _, channel = pair
    folder = session.begin_save(1)
    write_file(folder / "a", b"abc")
    session.abort_save(folder, 1, "No space left on device")
    assert list(run.checkpoints_dir.iterdir()) == []
    assert received(channel)[-1]["reason"] == "No space left on device"
    session.abort_save(folder, 1, "again")


def test_why_a_worker_leaves_is_told_although_its_metrics_cannot_be_written(
    pair: tuple[Session, Page, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk the spool's last write once took the error's message with it."""
    session, _, channel = pair
    session.begin_step(1)
    session.end_step(1, {"train/loss": 1.0})

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    session.failed(OSError(28, "full"), traceback="…", failure_class="storage")
    assert received(channel)[-1]["failure_class"] == "storage"


# -- how a worker starts -------------------------------------------------------------------------


def test_the_environment_carries_everything_to_the_worker(run: RunDir) -> None:
    env = WorkerEnv(run, Token(3, 2), 5, 1, 8, 4, 1, (30, 20), 7.5, ((3, 5), (8, 8)), True, 11, 12)
    assert WorkerEnv.from_environ(env.to_environ()) == env


@pytest.mark.parametrize(
    ("key", "value"),
    [("RANK", None), ("RANK", "x"), ("AIR_HPC_TOKEN", "1"), ("AIR_HPC_RESUME_STEPS", "5"),
     ("AIR_HPC_RESUME_STEPS", "[")],
)  # fmt: skip
def test_a_process_that_no_agent_started_is_told_so(
    run: RunDir, key: str, value: str | None
) -> None:
    environ = worker_env(run).to_environ()
    if value is None:
        del environ[key]
    else:
        environ[key] = value
    with pytest.raises(AirHpcError, match="a worker is started by its agent"):
        WorkerEnv.from_environ(environ)


def test_a_worker_attaches_to_the_page_and_channel_that_it_inherits(run: RunDir) -> None:
    page = Page.create()
    page.write(Word.LEASE_NS, LEASE_NS)
    ours, theirs = socket_pair()
    env = replace(worker_env(run), page_fd=page.fd, socket_fd=theirs.fileno())

    def work() -> None:
        session = Session.attach(env.to_environ())
        assert session.begin_step(1)
        session.end_step(1, {"train/loss": 3.0})
        session.finished(1)

    pid = _fork(work)
    theirs.close()
    assert os.waitpid(pid, 0)[1] == 0
    assert page.read(Word.DONE_STEP) == 1
    assert PHASES[page.read(Word.PHASE)] == "step"
    assert [m["kind"] for m in received(ours)] == ["training_started", "finished"]
    assert [sample.metrics for sample in iterate_samples(run)] == [{"train/loss": 3.0}]
    page.close()
    ours.close()


def test_only_rank_0_spools_and_speaks_of_training(run: RunDir) -> None:
    ours, theirs = socket_pair()
    session = Session(worker_env(run, rank=1, world_size=2), Page.create(), theirs)
    session.begin_step(1)
    session.end_step(1, {"train/loss": 1.0})
    session.finished(1)
    assert not session.is_first
    assert list(run.metrics_dir.iterdir()) == []
    assert [m["kind"] for m in received(ours)] == ["finished"]
    ours.close()
    theirs.close()


def test_a_standalone_session_inherits_what_it_is_told_and_no_more(run: RunDir) -> None:
    first = Session.standalone(run)
    for step in (1, 2):
        _save(first, step)
    second = Session.standalone(run, resume_steps=(1,))
    assert second.resume_candidates() == [run.checkpoints_dir / "step-1"]
    assert committed_steps(run) == [1]
    assert (second.token, second.world_size) == (Token(2, 1), 1)
