import os
from pathlib import Path

import pytest

from air_hpc.errors import EnvironmentFailure
from air_hpc.slurm import jobs
from tests.slurm import recorded

VERSION = "22.05.8"


def shown(name: str) -> tuple[jobs.JobRecord, ...]:
    return jobs.parse_show_job(recorded.text(VERSION, name))


def test_a_running_job_with_a_deceptive_name() -> None:
    (job,) = shown("job-running")
    assert job.name == "odd name JobState=FAILED"
    assert job.comment == "a=b c"
    assert (job.state, job.restarts, job.preempt_time) == ("RUNNING", 0, None)
    assert job.nodes == ("n1", "n2")
    assert job.batch_host == "n1"
    assert job.time_limit_min == 60
    assert job.end_time is not None
    assert job.start_time is not None
    assert job.end_time - job.start_time == 3600
    assert job.requeue is True
    assert not job.ended


def test_a_preempted_job_in_its_grace_says_so() -> None:
    (job,) = shown("job-preempted")
    assert job.state == "RUNNING"
    assert job.preempt_time is not None


def test_a_requeued_job_has_one_more_restart() -> None:
    (job,) = shown("job-requeued")
    assert (job.state, job.restarts, job.preempt_time) == ("COMPLETING", 1, None)


def test_an_array_is_its_pending_remainder_and_its_elements() -> None:
    rest, element = shown("job-array")
    assert (rest.array_tasks, rest.array_task_id, rest.id) == ("1-3%2", None, "8")
    assert (element.job_id, element.id) == ("9", "8_0")


def test_squeue_lists_every_element_by_its_own_name() -> None:
    found = {job.id: job for job in jobs.parse_queue(recorded.text(VERSION, "squeue"))}
    assert {"8_0", "8_1", "8_2", "8_3", "7"} <= set(found)
    assert found["8_0"].state == "RUNNING"
    assert found["8_1"].reason == "Resources"
    assert found["7"].nodes == ("n1", "n2")
    assert found["6"].time_limit_min == 5 * 1440


def test_sacct_states_lose_their_remarks() -> None:
    found = {job.id: job for job in jobs.parse_accounting(recorded.text(VERSION, "sacct"))}
    assert found["7"].state == "CANCELLED"
    assert found["7"].name == "odd name JobState=FAILED"
    assert (found["6"].exit_code, found["6"].signal) == (127, 0)
    assert found["8_0"].job_id == "9"
    assert found["4"].nodes == ()


@pytest.mark.parametrize(
    "answer",
    [
        "1234\n",
        "1234;cluster\n",
        "*** maintenance on Monday ***\n\n1234\n",
        "sbatch: lua: set partition to gpu\n1234;eu\n",
        "Submitted batch job 1234\n",
        "2 partitions are down\n1234\n\n",
    ],
)
def test_the_job_id_is_found_past_banners_and_warnings(answer: str) -> None:
    assert jobs.job_id_of(answer) == "1234"


@pytest.mark.parametrize("answer", ["", "queued\n", "Submitted batch job\n"])
def test_an_answer_without_an_id_is_not_guessed(answer: str) -> None:
    with pytest.raises(EnvironmentFailure, match="no job id"):
        jobs.job_id_of(answer)


def test_a_sweep_of_thousands_is_asked_for_in_one_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux refuses an argument of 128 KiB: for a large sweep Slurm was said to be mute."""
    squeue = tmp_path / "squeue"
    squeue.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    jobs.queue([f"1234567_{n}" for n in range(20_000)] + ["8"])
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.endswith("--jobs 1234567,8")
    jobs.queue(["1234567_1", "1234567_2"])
    assert (tmp_path / "calls").read_text().endswith("--jobs 1234567_1,1234567_2\n")


def test_no_jobs_cost_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert jobs.queue([]) == {}
    assert jobs.accounting([]) == {}
    jobs.cancel([])
