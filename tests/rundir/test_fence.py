"""A fenced writer commits nothing that counts, however its calls fall between those of others."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from air_hpc.errors import EnvironmentFailure
from air_hpc.rundir import commit
from air_hpc.rundir.commit import find_candidates, inheritable, mark_bad
from air_hpc.rundir.fence import (
    Fenced,
    Token,
    claim,
    claim_next_attempt,
    newest_inherited,
    newest_token,
    next_attempt,
    record_inherited,
    still_newest,
    tokens,
)
from air_hpc.rundir.layout import RunDir, create_run_dir
from air_hpc.rundir.retention import retire, sweep_leftovers
from tests.interleave import interleave
from tests.rundir.writers import SHARDS, attempt, content, newest, save

# -- interleavings -------------------------------------------------------------------------------


@dataclass
class Attempt:
    """An attempt that notes what it was promised."""

    run: RunDir
    saves: int
    distrusts: bool
    """Whether loading the newest checkpoint crashes, so that it is marked and made anew."""
    token: Token | None = None
    resumed: int = 0
    accepted: dict[int, str] | None = None
    own: dict[int, str] = field(default_factory=dict)

    def __call__(self) -> None:
        self.token = claim_next_attempt(self.run)
        usable = list(find_candidates(self.run).usable)
        if self.distrusts and usable:
            mark_bad(self.run, usable.pop(0).step, "its load crashed", token=self.token)
        record_inherited(self.run, self.token, inheritable(usable))
        self.accepted = inheritable(usable)
        sweep_leftovers(self.run, self.token)
        self.resumed = usable[0].step if usable else 0
        for index in range(self.saves):
            step = self.resumed + 10 * (index + 1)
            done = save(self.run, self.token, step, SHARDS[:1])
            if done.token == self.token:
                self.own[step] = done.manifest_sha256
            for gone in retire(self.run, self.token, keep_last=1, verified=self.resumed or None):
                self.own.pop(gone, None)


bursts = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60)), max_size=16)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    schedule=bursts,
    saves=st.lists(st.integers(1, 2), min_size=2, max_size=3),
    distrusts=st.lists(st.booleans(), min_size=3, max_size=3),
    bad=st.booleans(),
)
@example(schedule=[(0, 30), (1, 200)], saves=[2, 2], distrusts=[True] * 3, bad=True)
def test_what_counts_is_the_newest_attempts_and_what_it_accepted(
    schedule: list[tuple[int, int]], saves: list[int], distrusts: list[bool], bad: bool
) -> None:
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        run = create_run_dir(Path(folder), "tiny-1")
        attempt(run, saves=2)
        if bad:
            mark_bad(run, 20, "torn")
        writers = [Attempt(run, *pair) for pair in zip(saves, distrusts, strict=False)]
        errors = interleave(writers, schedule)
        current = newest_token(run)
        for writer, error in zip(writers, errors, strict=True):
            if writer.token == current:
                assert error is None, f"the newest attempt failed: {error!r}"
                _check_newest(run, writer)
            elif error is not None:
                # Fenced, or its folder was swept from under it: nothing but that.
                assert isinstance(error, Fenced | commit.CheckpointInvalid | FileNotFoundError)
        assert attempt(run), "the run cannot go on"


def _check_newest(run: RunDir, writer: Attempt) -> None:
    assert writer.token is not None
    assert writer.accepted is not None
    usable = {checkpoint.step: checkpoint for checkpoint in find_candidates(run).usable}
    for step, sha in writer.own.items():
        assert usable[step].manifest_sha256 == sha, f"step {step} of {writer.token} was replaced"
        name = SHARDS[0]
        assert (usable[step].path / name).read_bytes() == content(writer.token, step, name)
    for step, checkpoint in usable.items():
        if checkpoint.token != writer.token:
            assert writer.accepted.get(step) == checkpoint.manifest_sha256, "a late commit counts"
    assert newest(run) == max([*writer.own, writer.resumed])


def test_an_older_writer_stopped_anywhere_in_a_replacement_harms_nobody(folder: Path) -> None:
    """It once removed the newer generation's commit by name: what it judged was no longer there."""
    for calls in range(1000):
        run = create_run_dir(folder, f"run-{calls}")
        attempt(run, saves=2)
        mark_bad(run, 20, "torn")
        older, newer = Attempt(run, 1, False), Attempt(run, 1, False)
        _, error = interleave([older, newer], [(0, calls), (1, 100_000)])
        if newer.token == newest_token(run):
            assert error is None
            _check_newest(run, newer)
        shutil.rmtree(run.path)
        if newer.resumed == 20:  # the older one was through before the newer one looked
            break
    assert calls > 60


# -- tokens --------------------------------------------------------------------------------------


def test_tokens_are_ordered_by_attempt_and_then_generation() -> None:
    names = ["10.1", "2.11", "2.2", "1.1"]
    assert [str(t) for t in sorted(map(Token.parse, names))] == ["1.1", "2.2", "2.11", "10.1"]


@pytest.mark.parametrize("text", ["", "1", "1.", ".1", "1.1.1", "a.b", "-1.1", "1.1\n", " 1.1"])
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a token"):
        Token.parse(text)


def test_a_claim_is_won_once_and_only_forward(run: RunDir) -> None:
    claim(run, Token(1, 1))
    with pytest.raises(Fenced, match="claimed already"):
        claim(run, Token(1, 1))
    claim(run, Token(2, 1))
    with pytest.raises(Fenced, match=r"fenced off by 2\.1"):
        claim(run, Token(1, 2))
    claim(run, Token(2, 2))
    assert newest_token(run) == Token(2, 2)
    assert next_attempt(run) == 3
    assert claim_next_attempt(run) == Token(3, 1)


def test_the_look_at_the_newest_token_leaves_nothing_behind(run: RunDir) -> None:
    claim(run, Token(1, 1))
    assert still_newest(run, Token(1, 1))
    assert not still_newest(run, Token(1, 2))
    assert [path.name for path in run.tokens_dir.iterdir()] == ["1.1"]


def test_strange_names_among_the_tokens_are_passed_over(run: RunDir) -> None:
    claim(run, Token(1, 1))
    for name in (".probe-0123", "lost+found", "1.x", ".nfs0001"):
        (run.tokens_dir / name).mkdir()
    assert tokens(run) == [Token(1, 1)]


def _claim_in_process(run: RunDir, barrier, answers) -> None:  # type: ignore[no-untyped-def]
    barrier.wait()
    try:
        answers.put(str(claim_next_attempt(run)))
    except Fenced:
        answers.put("fenced")


def test_processes_that_claim_at_once_get_different_tokens_and_the_highest_stays(
    run: RunDir,
) -> None:
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        barrier, answers = context.Barrier(4), context.Queue()
        processes = [
            context.Process(target=_claim_in_process, args=(run, barrier, answers))
            for _ in range(4)
        ]
        for process in processes:
            process.start()
        got = [answers.get(timeout=60) for _ in processes]
        for process in processes:
            process.join()
        won = [name for name in got if name != "fenced"]
        assert len(set(won)) == len(won)
        assert str(newest_token(run)) in won, "nobody got the run"


# -- what is inherited ---------------------------------------------------------------------------


def test_only_the_newest_list_decides_and_a_generation_without_one_is_passed_over(
    run: RunDir,
) -> None:
    assert newest_inherited(run) is None
    for token in (Token(1, 1), Token(2, 1)):
        claim(run, token)
    record_inherited(run, Token(2, 1), {10: "b"})
    record_inherited(run, Token(1, 1), {10: "a"})  # a late one
    claim(run, Token(3, 1))
    found = newest_inherited(run)
    assert found is not None
    assert (found.token, found.checkpoints) == (Token(2, 1), {10: "b"})


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"checkpoints": {"x": "y"}}', b"\xff"])
def test_a_damaged_list_is_a_clear_error_and_not_a_traceback(run: RunDir, text: bytes) -> None:
    attempt(run)
    (run.tokens_dir / "1.1" / "inherited.json").write_bytes(text)
    with pytest.raises(EnvironmentFailure, match=r"damaged.*next: restore the file"):
        find_candidates(run)


def test_a_late_commit_of_an_older_generation_does_not_count(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = claim_next_attempt(run)
    record_inherited(run, older, {})
    save(run, older, 10)
    newer = claim_next_attempt(run)
    record_inherited(run, newer, inheritable(find_candidates(run).usable))
    with pytest.raises(Fenced):
        save(run, older, 20)
    with monkeypatch.context() as patch:  # its look came before the claim, its rename after
        patch.setattr(commit, "require_newest", lambda run, token: None)
        save(run, older, 20)
    assert [checkpoint.step for checkpoint in find_candidates(run).usable] == [10]
    again = save(run, newer, 20)
    assert again.token == newer
    assert newest(run) == 20
