from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from air_hpc.launch import excluding, prepare
from air_hpc.launch.submission import Submission
from air_hpc.rundir.exclusions import Exclusion, append_exclusions, exclusions_file
from air_hpc.slurm import snapshot
from air_hpc.slurm.site import Snapshot
from tests.launch.making import spec, task, tasks
from tests.slurm import recorded


@pytest.fixture
def site() -> Snapshot:
    return snapshot.parse(recorded.texts("22.05.8"), taken_at=1.0)


def failed(node: str, hours: float = 1.0) -> Exclusion:
    now = time.time()
    return Exclusion(node, now, now + 3600 * hours, "Xid 79", "device", "tiny-1")


def avoid(runs_dir: Path, site: Snapshot | None, **launch: object) -> excluding.Avoid:
    made = task(spec(runs_dir, **launch))
    return excluding.for_run(runs_dir, made.spec, made.plan, site)


def test_what_is_avoided_is_an_argument_of_sbatch_and_is_told(
    tmp_path: Path, site: Snapshot
) -> None:
    append_exclusions(tmp_path, [failed("n3"), failed("n2", hours=-1)])
    found = avoid(tmp_path, site, sbatch={"exclude": "n1"})
    assert found.sbatch_args == ("--exclude=n[1,3]",)
    (problem,) = found.problems
    assert problem.warning
    assert (problem.key, problem.value) == ("nodes", "n3")
    assert "device, Xid 79" in problem.message


def test_without_exclusions_the_scripts_own_header_holds(tmp_path: Path, site: Snapshot) -> None:
    assert avoid(tmp_path, site, sbatch={"exclude": "n1"}) == excluding.Avoid()
    append_exclusions(tmp_path, [failed("n3")])
    assert avoid(tmp_path, site, cluster={"kind": "local"}) == excluding.Avoid()


def test_a_list_that_cannot_be_read_stops_no_submission(tmp_path: Path, site: Snapshot) -> None:
    exclusions_file(tmp_path).mkdir(parents=True)
    found = avoid(tmp_path, site)
    assert found.sbatch_args == ()
    assert "are not applied" in found.problems[0].message


def submission(runs_dir: Path) -> Submission:
    checked = prepare.check(tasks(runs_dir), cwd=runs_dir, snapshot=None)
    planned = prepare.plan_submission(checked, cwd=runs_dir, submission_id=None)
    return prepare.prepare(checked, planned, cwd=runs_dir)


def test_a_resumed_submission_decides_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = submission(tmp_path)
    assert excluding.for_chunk(ready, ready.chunks[0]) == excluding.Avoid()
    append_exclusions(tmp_path, [failed("n3"), failed("of-another-cluster")])
    monkeypatch.setattr(snapshot, "ask", lambda timeout_s: dict(recorded.texts("22.05.8")))
    assert excluding.for_chunk(ready, ready.chunks[0]).sbatch_args == ("--exclude=n3",)
    local = replace(ready, kind="local")
    assert excluding.for_chunk(local, ready.chunks[0]) == excluding.Avoid()
