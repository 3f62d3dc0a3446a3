"""A submitter killed between any two writes, and the same submission repeated, submit once.

sbatch, squeue and scontrol are small programs here: what matters is when the submitter dies, and
the fake sbatch remembers what it accepted. The kill comes from an audit hook in a forked child,
just before its n-th write, rename, mkdir or start of a program.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from air_hpc.errors import EnvironmentFailure
from air_hpc.launch import submit as submitting
from air_hpc.launch.submission import load, submission_dir
from air_hpc.rundir.events import Kind, read_ledger
from air_hpc.rundir.layout import RunDir, list_runs
from air_hpc.runs.process import ProcessIdentity
from tests.launch import making
from tests.slurm import recorded

SBATCH = """#!/bin/bash
name=; for word in "$@"; do case $word in --job-name=*) name=${word#*=};; esac; done
script=${!#}
[[ -n $name ]] || name=$(sed -n 's/^#SBATCH --job-name=//p' "$script")
id=$(( $(wc -l < accepted) + 100 ))
printf '%s\\t%s\\t%s\\n' "$id" "$name" "$script" >> accepted
echo "*** welcome to the test site ***"
echo "$id;test"
"""
SQUEUE = """#!/bin/bash
name=; for word in "$@"; do case $word in --name=*) name=${word#*=};; esac; done
sep=$'\\x1f'
while IFS=$'\\t' read -r id found script; do
  if [[ $found == "$name" ]]; then
    printf "%s" "$id$sep$id$sep$id${sep}N/A${sep}PENDING${sep}None$sep$sep$sep$sep$sep"
    printf "%s\\n" "$name${sep}low$sep${sep}1"
  fi
done < accepted
"""
SCONTROL = """#!/bin/bash
case "$*" in
  "show config") cat config.txt;; *partitions) cat partitions.txt;; *nodes) cat nodes.txt;;
  *) exit 1;;
esac
"""
SACCT = "#!/bin/bash\necho 'Slurm accounting storage is disabled' >&2; exit 1\n"
SACCTMGR = "#!/bin/bash\nexit 1\n"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of fake Slurm commands, first on PATH; `accepted` is what sbatch took."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    programs = {"sbatch": SBATCH, "squeue": SQUEUE, "scontrol": SCONTROL, "sacct": SACCT,
                "sacctmgr": SACCTMGR}  # fmt: skip
    for name, text in programs.items():
        path = folder / name
        path.write_text(text.replace("accepted", str(folder / "accepted")))
        path.chmod(0o755)
    for name in ("config", "partitions", "nodes"):
        (folder / f"{name}.txt").write_text(
            recorded.text("22.05.8", name)
            .replace("accounting_storage/slurmdbd", "accounting_storage/none")
            .replace("SchedulerParameters     = ", "SchedulerParameters     = max_array_tasks=2,")
        )
    path = folder / "scontrol"
    path.write_text(path.read_text().replace("cat ", f"cat {folder}/"))
    (folder / "accepted").touch()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


class Attempt:
    """Submits in a forked child that is killed at its n-th write (None: never)."""

    def __init__(self, tmp_path: Path, number: int, **options: object) -> None:
        self.runs_dir = tmp_path / "runs"
        self.tmp_path = tmp_path
        self.options = {"nodes": 1, "continuation": "chain", "chain_length": 1, **options}
        self.number = number

    def go(self, kill_at: int | None) -> bool:
        """True when it came to its end, False when it was killed."""
        child = os.fork()
        if child == 0:
            self._child(kill_at)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            return False
        assert os.WEXITSTATUS(status) == 0, (self.tmp_path / "error").read_text()
        return True

    def _child(self, kill_at: int | None) -> None:
        try:
            seen = 0

            def hook(event: str, arguments: tuple[object, ...]) -> None:
                nonlocal seen
                if _writes(event, arguments):
                    if seen == kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    seen += 1

            tasks = making.tasks(self.runs_dir, self.number, **self.options)
            sys.addaudithook(hook)
            result = submitting.submit(
                tasks, submission_id="sweep-1", cwd=self.tmp_path, sleep=lambda s: None
            )
            kill_at = None
            (self.tmp_path / "result").write_text(
                json.dumps([[run.run_id, run.job, run.job_ids] for run in result.runs])
            )
            os._exit(0)
        except BaseException as error:
            import traceback

            kill_at = None
            (self.tmp_path / "error").write_text("".join(traceback.format_exception(error)))
            os._exit(1)


def _writes(event: str, arguments: tuple[object, ...]) -> bool:
    if event == "open":
        flags = arguments[2]
        return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))
    return event in {"os.rename", "os.mkdir", "os.symlink", "subprocess.Popen", "os.remove"}


def check(attempt: Attempt, slurm: Path, links: int = 1) -> None:
    """Everything was submitted, once, and every run knows it."""
    lines = (slurm / "accepted").read_text().splitlines()
    accepted = [line.split("\t") for line in lines]
    record = load(submission_dir(attempt.runs_dir, "sweep-1"))
    assert record is not None
    assert record.complete
    assert Counter(name for _, name, _ in accepted) == Counter(ask.name for ask in record.asks)
    assert {ask.job_id for ask in record.asks} == {job for job, _, _ in accepted}
    runs = json.loads((attempt.tmp_path / "result").read_text())
    assert len(runs) == attempt.number
    assert {run.run_id for run in list_runs(attempt.runs_dir)} == {run[0] for run in runs}
    for run_id, _, job_ids in runs:
        run = RunDir(attempt.runs_dir / run_id)
        told = [e for e in read_ledger(run).events if e.kind == Kind.SUBMITTED]
        assert [e.facts["job_id"] for e in told] == job_ids
        assert len(job_ids) == links
        assert (run.submit_dir / "submission.json").is_file()


@pytest.mark.parametrize(
    ("number", "links", "first"),
    # Sweeps differ from one run only after the first of their run directories.
    [
        pytest.param(1, 1, 0, id="one run"),
        pytest.param(3, 1, 40, id="two arrays", marks=pytest.mark.full),
        pytest.param(2, 2, 40, id="a chain", marks=pytest.mark.full),
    ],
)
def test_a_kill_at_any_write_and_a_retry_submit_once(
    number: int, links: int, first: int, tmp_path: Path, slurm: Path
) -> None:
    kill_at = first
    while True:
        folder = tmp_path / str(kill_at)
        folder.mkdir()
        attempt = Attempt(folder, number, chain_length=links)
        if attempt.go(kill_at):
            break
        assert attempt.go(None)
        check(attempt, slurm, links)
        (slurm / "accepted").write_text("")
        kill_at += 1
    assert kill_at > 20
    check(attempt, slurm, links)


def test_a_submitter_killed_again_and_again_submits_once(tmp_path: Path, slurm: Path) -> None:
    choose = random.Random(7)
    for round_ in range(10):
        folder = tmp_path / str(round_)
        folder.mkdir()
        attempt = Attempt(folder, 3)
        for _ in range(6):
            if attempt.go(choose.randrange(60)):
                break
        assert attempt.go(None)
        check(attempt, slurm)
        (slurm / "accepted").write_text("")


def test_repeating_a_finished_submission_submits_nothing(tmp_path: Path, slurm: Path) -> None:
    attempt = Attempt(tmp_path, 3)
    assert attempt.go(None)
    first = (tmp_path / "result").read_text()
    assert attempt.go(None)
    assert (tmp_path / "result").read_text() == first
    check(attempt, slurm)


def test_a_submission_that_another_process_still_makes_is_left_to_it(
    tmp_path: Path, slurm: Path
) -> None:
    """Once `--resume` removed the run directories of a large sweep that was being prepared."""
    attempt = Attempt(tmp_path, 3)
    assert not attempt.go(40)
    folder = submission_dir(attempt.runs_dir, "sweep-1")
    killed = json.loads((folder / "submitter.json").read_text())
    with subprocess.Popen(["sleep", "60"]) as busy:
        living = ProcessIdentity.of(busy.pid).to_facts()
        (folder / "submitter.json").write_text(json.dumps(living))
        with pytest.raises(EnvironmentFailure, match=f"by process {busy.pid}"):
            submitting.resume_submission(folder)
        busy.kill()
    assert load(folder) is not None
    (folder / "submitter.json").write_text(json.dumps(killed))
    assert attempt.go(None)
    check(attempt, slurm)
    assert not (folder / "submitter.json").exists()


def test_an_id_is_not_used_for_other_runs(tmp_path: Path, slurm: Path) -> None:
    assert Attempt(tmp_path, 3).go(None)
    with pytest.raises(submitting.BadInput, match="made of other runs"):
        submitting.submit(
            making.tasks(tmp_path / "runs", 2, nodes=1, continuation="chain"),
            submission_id="sweep-1",
            cwd=tmp_path,
        )


def test_an_sbatch_without_an_answer_is_looked_up_before_it_is_repeated(
    tmp_path: Path, slurm: Path
) -> None:
    """sbatch says "Socket timed out" although the controller took the job."""
    sbatch = slurm / "sbatch"
    lines = sbatch.read_text().splitlines()[:-2]
    lines += ["echo 'sbatch: error: Socket timed out on send/recv operation' >&2", "exit 1", ""]
    sbatch.write_text("\n".join(lines))
    attempt = Attempt(tmp_path, 3)
    assert attempt.go(None)
    check(attempt, slurm)


def test_an_sbatch_that_reached_nobody_is_repeated(tmp_path: Path, slurm: Path) -> None:
    sbatch = slurm / "sbatch"
    count = slurm / "count"
    head, _, rest = sbatch.read_text().partition("\n")
    fail = (
        f"echo x >> {count}; if (( $(wc -l < {count}) % 2 == 1 )); then "
        "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1; fi"
    )
    sbatch.write_text("\n".join([head, fail, rest]))
    attempt = Attempt(tmp_path, 3)
    assert attempt.go(None)
    check(attempt, slurm)


def test_a_full_queue_keeps_what_was_taken_and_the_rest_waits(tmp_path: Path, slurm: Path) -> None:
    sbatch = slurm / "sbatch"
    head, _, rest = sbatch.read_text().partition("\n")
    full = f"if (( $(wc -l < {slurm}/accepted) >= 1 )); then "
    full += "echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1; fi"
    sbatch.write_text("\n".join([head, full, rest]))
    runs_dir = tmp_path / "runs"
    tasks = making.tasks(runs_dir, 3, nodes=1, continuation="chain", chain_length=1)
    result = submitting.submit(tasks, submission_id="sweep-1", cwd=tmp_path)
    assert not result.complete
    assert [run.job_id is None for run in result.runs] == [False, False, True]
    assert "resume sweep-1" in str(result.warnings[-1])
    assert [s.id for s in submitting.unfinished(runs_dir)] == ["sweep-1"]
    sbatch.write_text("\n".join([head, rest]))
    again = submitting.resume_submission(submission_dir(runs_dir, "sweep-1"))
    assert again.complete
    assert len((slurm / "accepted").read_text().splitlines()) == 2
    assert submitting.unfinished(runs_dir) == ()


def test_a_limit_that_was_lifted_is_not_held_against_the_user(tmp_path: Path, slurm: Path) -> None:
    """The remembered site says one thing, the site by now another."""
    runs_dir = tmp_path / "runs"
    limited = slurm / "partitions.txt"
    before = limited.read_text()
    limited.write_text(before.replace("MaxTime=UNLIMITED", "MaxTime=00:05:00"))
    options = {"nodes": 1, "continuation": "chain", "chain_length": 1}
    submitting.submit(making.tasks(runs_dir, time_limit_min=5, **options), cwd=tmp_path)
    submitting.submit(making.tasks(runs_dir, time_limit_min=5, **options), cwd=tmp_path)
    assert (runs_dir / ".air_hpc" / "site.json").is_file()
    with pytest.raises(submitting.BadInput, match="above the maximum"):
        submitting.submit(making.tasks(runs_dir, time_limit_min=9, **options), cwd=tmp_path)
    limited.write_text(before)
    submitting.submit(making.tasks(runs_dir, time_limit_min=9, **options), cwd=tmp_path)
