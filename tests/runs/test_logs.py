from collections.abc import Callable
from pathlib import Path

from air_hpc.rundir.events import Kind
from air_hpc.rundir.fence import Token
from air_hpc.runs.logs import LogLine, Selection, follow, log_files, read_lines, tail
from tests.runs.made import MadeRun


def texts(lines: list[LogLine | None]) -> list[str]:
    return [line.text for line in lines if line is not None]


def everything(run: MadeRun, selection: Selection) -> list[str]:
    files = log_files(run.dir, selection)
    return [li.text for file in files for li in read_lines(file) if selection.wants(li)]


def test_lines_are_chosen_by_rank_attempt_generation_and_node(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "runs")
    run.log("r0 | first\nr1 | second\nr10 | tenth\n")
    run.log("r2 | elsewhere\n", node="n2")
    run.log("r0 | again\n", Token(1, 2))
    run.log("r0 | later\n", Token(2, 1))
    assert everything(run, Selection(rank=1)) == ["second"]
    assert everything(run, Selection(node="n2")) == ["elsewhere"]
    assert everything(run, Selection(attempt=1, generation=2)) == ["again"]
    assert everything(run, Selection(rank=0)) == ["first", "again", "later"]


def test_attempts_are_ordered_as_numbers(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "runs")
    for attempt in (10, 9, 2):
        run.log(f"r0 | {attempt}\n", Token(attempt, 1))
    assert everything(run, Selection()) == ["2", "9", "10"]


def test_the_batch_log_lies_beside_the_submission_and_has_no_rank(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "runs", submission="sweep-1").submitted("100", 3)
    folder = run.dir.shared_dir / "submissions" / "sweep-1"
    (folder / "100_3.log").write_text("slurmstepd: error: told\n")
    (folder / "100_4.log").write_text("another run's\n")
    assert everything(run, Selection()) == ["slurmstepd: error: told"]
    assert everything(run, Selection(rank=0)) == []


def test_the_tail_is_counted_back_over_files_and_long_lines(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "runs")
    long = "x" * 200_000
    run.log(f"r0 | one\nr1 | noise\nr0 | {long}\n")
    run.log("r1 | noise\nr0 | three\nr0 | unfinished", Token(2, 1))
    got = [line.text for line in tail(run.dir, Selection(rank=0), 3)]
    assert got == [long, "three", "unfinished"]
    assert tail(run.dir, Selection(rank=0), 0) == []


def test_text_that_is_no_utf_8_is_shown_all_the_same(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "runs")
    run.log("").write_bytes(b"r0 | caf\xe9\n")
    assert everything(run, Selection()) == ["caf\ufffd"]


def steps(*actions: Callable[[], object]) -> tuple[Callable[[], bool], Callable[[float], None]]:
    """The run ends after as many pauses as there are actions, one done in each."""
    left = list(actions)
    return (lambda: not left), (lambda seconds: left.pop(0)() and None)


def test_following_goes_on_into_the_next_attempt_until_the_run_ends(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "runs")
    run.log("r0 | one\nr0 | tw")
    ended, pause = steps(
        lambda: run.log("o\n"),
        lambda: run.log("r0 | three\n", Token(2, 1)),
        lambda: run.log("r0 | last, without an end", Token(2, 1)),
    )
    got = texts(list(follow(run.dir, Selection(), ended=ended, pause=pause)))
    assert got == ["one", "two", "three", "last, without an end"]


def test_following_from_a_tail_repeats_and_loses_nothing(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "runs")
    run.log("r0 | old\nr0 | a\nr0 | b\n")
    ended, pause = steps(lambda: run.log("r0 | c\n"))
    got = texts(list(follow(run.dir, Selection(), ended=ended, count=2, pause=pause)))
    assert got == ["a", "b", "c"]


def test_what_a_local_agent_said_is_its_batch_log(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "runs", submission="one")
    run.event(Kind.SUBMITTED, job_id="77", cluster="local", pid=77)
    log = run.dir.shared_dir / "submissions" / "one" / "77_0_log.out"
    log.write_text("No module named torch\n")
    assert everything(run, Selection()) == ["No module named torch"]
