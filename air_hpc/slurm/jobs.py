"""Jobs: what Slurm says about them, and the few things this project asks of it.

Every query takes all jobs at once. The sources are squeue (what the controller still holds), sacct
(where the site has accounting) and `scontrol show job` for one job in full; the parsers are pure.
A job is named as Slurm names it for commands: `123`, or `123_4` for an element of an array.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from air_hpc.errors import EnvironmentFailure
from air_hpc.slurm import command, hostlist
from air_hpc.slurm.command import CommandFailure
from air_hpc.slurm.records import integer, minutes, split_record, text_or_none, timestamp

SEPARATOR = "\x1f"
"""Between fields we ask for: it cannot occur in a job's name that this project accepts."""

_QUEUE_FORMAT = SEPARATOR.join(
    ("%i", "%A", "%F", "%K", "%T", "%r", "%N", "%S", "%e", "%l", "%j", "%P", "%V", "%D")
)
_SACCT_FIELDS = (
    "JobID,JobIDRaw,State,Reason,NodeList,Start,End,Timelimit,JobName,Partition,Submit,NNodes,"
    "ExitCode"
)
_FREE_TEXT = (
    ("JobName", r" UserId=\S+\(\d+\) GroupId="),
    ("Comment", r" StdErr=| WorkDir=| Power="),
)

_NAMED_ONE_BY_ONE = 1000

ENDED_STATES = frozenset(
    {
        "COMPLETED",
        "FAILED",
        "CANCELLED",
        "TIMEOUT",
        "NODE_FAIL",
        "BOOT_FAIL",
        "DEADLINE",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
    }
)
"""Job states of the squeue manual page in which Slurm runs nothing for the job any more."""


@dataclass(frozen=True)
class JobRecord:
    """One job or array element. Times are seconds since the epoch; None: not known or not yet.

    `restarts` counts requeues (only `scontrol show job` knows it); `preempt_time` is set once Slurm
    has asked the job to make room. `exit_code` is the batch script's, `signal` what ended it.
    """

    job_id: str
    state: str
    array_job_id: str | None = None
    array_task_id: int | None = None
    reason: str | None = None
    nodes: tuple[str, ...] = ()
    node_count: int | None = None
    restarts: int | None = None
    submit_time: float | None = None
    start_time: float | None = None
    end_time: float | None = None
    preempt_time: float | None = None
    time_limit_min: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    name: str = ""
    partition: str | None = None
    batch_host: str | None = None
    requeue: bool | None = None
    comment: str | None = None
    array_tasks: str | None = None
    """Of an array's pending remainder: its indices as Slurm prints them (`2-9%4`)."""

    @property
    def id(self) -> str:
        """How commands name it: `123_4` for an array element, else the job id."""
        if self.array_job_id is not None and self.array_task_id is not None:
            return f"{self.array_job_id}_{self.array_task_id}"
        return self.job_id

    @property
    def ended(self) -> bool:
        """Whether Slurm runs nothing for it any more."""
        return self.state in ENDED_STATES


def show_job(
    job_id: str,
    *,
    timeout_s: float = command.DEFAULT_TIMEOUT_S,
    environ: Mapping[str, str] | None = None,
) -> JobRecord | None:
    """One job in full, or None when the controller does not know it (any more)."""
    try:
        text = command.read(
            ["scontrol", "-o", "show", "job", job_id], timeout_s=timeout_s, environ=environ
        )
    except CommandFailure as failure:
        if "invalid job id" in failure.stderr.lower():
            return None
        raise
    records = parse_show_job(text)
    named = [record for record in records if job_id in (record.id, record.job_id)]
    return next(iter(named or records), None)


def parse_show_job(text: str) -> tuple[JobRecord, ...]:
    """`scontrol -o show job`, one record a line; a line that is no job is skipped."""
    records = []
    for line in text.splitlines():
        if line.startswith("JobId="):
            records.append(_from_show(split_record(line, _FREE_TEXT)))
    return tuple(records)


def _from_show(record: Mapping[str, str]) -> JobRecord:
    task = record.get("ArrayTaskId")
    single = task is not None and task.isdecimal()
    code, _, signal = record.get("ExitCode", "").partition(":")
    return JobRecord(
        job_id=record["JobId"],
        array_job_id=record.get("ArrayJobId"),
        array_task_id=int(task) if task is not None and single else None,
        array_tasks=None if single else task,
        state=record.get("JobState", "UNKNOWN"),
        reason=text_or_none(record.get("Reason")),
        nodes=hostlist.expand(record.get("NodeList", "")),
        node_count=integer(record.get("NumNodes")),
        restarts=integer(record.get("Restarts")),
        submit_time=timestamp(record.get("SubmitTime")),
        start_time=timestamp(record.get("StartTime")),
        end_time=timestamp(record.get("EndTime")),
        preempt_time=timestamp(record.get("PreemptTime")),
        time_limit_min=minutes(record.get("TimeLimit")),
        exit_code=integer(code),
        signal=integer(signal),
        name=record.get("JobName", ""),
        partition=text_or_none(record.get("Partition")),
        batch_host=text_or_none(record.get("BatchHost")),
        requeue={"0": False, "1": True}.get(record.get("Requeue", "")),
        # Slurm puts a space of its own after a comment.
        comment=text_or_none(record.get("Comment", "").removesuffix(" ")),
    )


def queue(
    job_ids: Iterable[str], *, timeout_s: float = command.DEFAULT_TIMEOUT_S
) -> dict[str, JobRecord]:
    """What the controller holds of these jobs, array elements one by one, by `JobRecord.id`.

    Jobs it has forgotten (MinJobAge after their end) are absent. One squeue call, none for no job.
    """
    wanted = sorted(set(job_ids))
    if not wanted:
        return {}
    return _by_id(_squeue(["--jobs", _listed(wanted)], timeout_s))


def _listed(job_ids: Sequence[str]) -> str:
    """The jobs as one argument; of very many elements their arrays, whole.

    Linux takes no argument above 128 KiB (execve(2)): some 10,000 elements by name.
    """
    if len(job_ids) > _NAMED_ONE_BY_ONE:
        job_ids = sorted({job_id.partition("_")[0] for job_id in job_ids})
    return ",".join(job_ids)


def _squeue(selection: Sequence[str], timeout_s: float) -> str:
    argv = ["squeue", "--noheader", "--array", "--states=all", f"--format={_QUEUE_FORMAT}"]
    try:
        return command.read([*argv, *selection], timeout_s=timeout_s)
    except CommandFailure as failure:
        # squeue fails for one unknown job and is silent for several.
        if "invalid job id" in failure.stderr.lower():
            return ""
        raise


def parse_queue(text: str) -> tuple[JobRecord, ...]:
    """squeue's answer in our format; lines of another form (banners) are skipped."""
    records = []
    for line in text.split("\n"):
        parts = line.split(SEPARATOR)
        if len(parts) != 14:
            continue
        _, job, array, task, state, reason, nodes, start, end, limit, name, partition, submit, n = (
            parts
        )
        element = task.isdecimal()
        records.append(
            JobRecord(
                job_id=job,
                array_job_id=array if element else None,
                array_task_id=int(task) if element else None,
                state=state,
                reason=text_or_none(reason),
                nodes=hostlist.expand(nodes),
                node_count=integer(n),
                submit_time=timestamp(submit),
                start_time=timestamp(start),
                end_time=timestamp(end),
                time_limit_min=minutes(limit),
                name=name,
                partition=text_or_none(partition),
            )
        )
    return tuple(records)


def accounting(
    job_ids: Iterable[str], *, timeout_s: float = command.DEFAULT_TIMEOUT_S
) -> dict[str, JobRecord] | None:
    """What accounting keeps of these jobs (their latest start), or None where a site has none."""
    wanted = sorted(set(job_ids))
    if not wanted:
        return {}
    text = _sacct(["--jobs", _listed(wanted)], timeout_s)
    return None if text is None else _by_id_accounting(text)


def _sacct(selection: Sequence[str], timeout_s: float) -> str | None:
    argv = [
        "sacct", "--noheader", "--allocations", "--parsable2",
        f"--delimiter={SEPARATOR}", f"--format={_SACCT_FIELDS}",
    ]  # fmt: skip
    try:
        return command.read([*argv, *selection], timeout_s=timeout_s)
    except CommandFailure as failure:
        if "accounting storage is disabled" in failure.stderr.lower():
            return None
        raise


def parse_accounting(text: str) -> tuple[JobRecord, ...]:
    """sacct's answer in our format."""
    records = []
    for line in text.split("\n"):
        parts = line.split(SEPARATOR)
        if len(parts) != 13:
            continue
        shown, raw, state, reason, nodes, start, end, limit, name, partition, submit, n, code = (
            parts
        )
        array, _, task = shown.partition("_")
        status, _, signal = code.partition(":")
        records.append(
            JobRecord(
                job_id=raw,
                array_job_id=array if task.isdecimal() else None,
                array_task_id=int(task) if task.isdecimal() else None,
                # "CANCELLED by 1000" and "COMPLETED+" are the state and a remark.
                state=state.split(" ")[0].rstrip("+"),
                reason=text_or_none(reason),
                nodes=() if nodes == "None assigned" else hostlist.expand(nodes),
                node_count=integer(n),
                submit_time=timestamp(submit),
                start_time=timestamp(start),
                end_time=timestamp(end),
                time_limit_min=minutes(limit),
                exit_code=integer(status),
                signal=integer(signal),
                name=name,
                partition=text_or_none(partition),
            )
        )
    return tuple(records)


def find_by_name(
    name: str, *, since_days: int = 7, timeout_s: float = command.DEFAULT_TIMEOUT_S
) -> tuple[JobRecord, ...]:
    """The user's jobs of exactly this name: from squeue, and from sacct where there is one.

    The name must hold no comma: both commands would take it for several names.
    This is how a submission that got no answer learns whether it was made.
    """
    found = {
        record.id: record
        for record in parse_queue(_squeue([f"--user={os.getuid()}", f"--name={name}"], timeout_s))
        if record.name == name
    }
    if not found:
        past = _sacct([f"--name={name}", f"--starttime=now-{since_days}days"], timeout_s)
        for record in parse_accounting(past or ""):
            if record.name == name:
                found[record.id] = record
    return tuple(found.values())


def cancel(
    job_ids: Iterable[str],
    *,
    signal: str | None = None,
    timeout_s: float = command.DEFAULT_TIMEOUT_S,
) -> None:
    """scancel these jobs, in one call; those that have ended already are no error."""
    wanted = sorted(set(job_ids))
    if not wanted:
        return
    option = [f"--signal={signal}"] if signal else []
    command.run_once(["scancel", "--quiet", *option, *wanted], timeout_s=timeout_s)


def requeue(
    job_id: str,
    *,
    timeout_s: float = command.DEFAULT_TIMEOUT_S,
    environ: Mapping[str, str] | None = None,
) -> None:
    """`scontrol requeue`: for an array element give `ARRAYJOB_TASK`, always.

    One element of an array has the array's own job id, and requeueing by that asks for all of it.
    """
    command.run_once(["scontrol", "requeue", job_id], timeout_s=timeout_s, environ=environ)


def job_id_of(sbatch_answer: str) -> str:
    """The job id in what `sbatch --parsable` printed: the last line that is an id.

    Sites print banners before it and warnings around it; a federation adds `;cluster`. Raises
    EnvironmentFailure where no line is one.
    """
    for line in reversed(sbatch_answer.splitlines()):
        job_id = line.strip().partition(";")[0]
        if job_id.isdecimal():
            return job_id
        told = re.match(r"Submitted batch job (\d+)", line)
        if told:
            return told[1]
    raise EnvironmentFailure(
        f"sbatch printed no job id: {sbatch_answer.strip()[:200]!r}",
        tried="sbatch --parsable",
        next_step="look for the job by its name with squeue before submitting again",
    )


def _by_id(text: str) -> dict[str, JobRecord]:
    return {record.id: record for record in parse_queue(text)}


def _by_id_accounting(text: str) -> dict[str, JobRecord]:
    return {record.id: record for record in parse_accounting(text)}
