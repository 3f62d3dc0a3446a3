"""Submits runs: one run as a plain job, a sweep as one array for each resource shape and chunk.

Promise: a submission is made once. The record (`launch.submission`) says before each sbatch that it
is about to be called, and after it what it answered. Where an answer is missing, because sbatch
timed out or the submitter was killed, the job is looked up by its name, which holds the ask's own
key, before anything is asked again. `resume_submission` finishes what was interrupted; repeating
`submit` with the same id does the same.

Nothing here waits for a job. The cost is one sbatch a chunk, whatever the number of its tasks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from air_hpc.errors import BadInput, EnvironmentFailure, Problem
from air_hpc.launch import bulk, excluding, machine, prepare
from air_hpc.launch.excluding import Avoid
from air_hpc.launch.executor import AgentExecutor
from air_hpc.launch.prepare import Progress, Task
from air_hpc.launch.result import Result, result_of
from air_hpc.launch.submission import (
    Ask,
    AskState,
    Submission,
    held,
    load,
    save,
    submission_dir,
)
from air_hpc.rundir.events import Event, Kind, parse_ledger, read_ledger
from air_hpc.rundir.layout import SHARED_DIR, RunDir
from air_hpc.slurm import jobs, snapshot
from air_hpc.slurm.command import CommandFailure, CommandTimeout
from air_hpc.slurm.site import Snapshot

TRIES = 3
"""Calls of sbatch for one ask, each after a look-up that found nothing."""

SETTLE_S = 2.0
"""Between two look-ups of an unanswered ask: an accepted job may take a moment to show."""

_QUEUE_FULL = ("submitjob", "submit_job", "max_submit", "job limit", "maxsubmit", "queue is full")


def submit(
    tasks: Sequence[Task],
    *,
    submission_id: str | None = None,
    cwd: Path | None = None,
    progress: Progress | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Result:
    """Check, prepare and submit these runs.

    With the id of an interrupted submission of the same tasks, finishes that one. Raises BadInput
    with every problem found, and EnvironmentFailure with what to do next.
    """
    here = cwd or Path.cwd()
    if not tasks:
        raise BadInput.single("tasks", "", "there is nothing to submit")
    checked = _checked(tasks, here)
    if checked.tasks[0].spec.cluster.kind == "local":
        machine.require_torch(checked.tasks[0].spec.cluster)
    runs_dir = prepare.runs_dir_of(checked.tasks[0].spec, here)
    known = load(submission_dir(runs_dir, submission_id)) if submission_id else None
    if known is not None and known.fingerprint != prepare.fingerprint(checked.tasks):
        raise BadInput.single(
            "submission",
            known.id,
            "was made of other runs",
            hint="Repeat it with the same overrides, or leave its id out",
        )
    if known is not None and known.state != "preparing":
        with held(known.folder):
            return _finish(known, checked.warnings, sleep)
    if known is not None:
        with held(known.folder):
            prepare.discard(known)
    planned = prepare.plan_submission(checked, cwd=here, submission_id=submission_id)
    save(planned)
    with held(planned.folder):
        ready = prepare.prepare(checked, planned, cwd=here, progress=progress)
        return _finish(ready, checked.warnings, sleep)


def resume_submission(folder: Path, *, sleep: Callable[[float], None] = time.sleep) -> Result:
    """Finish the interrupted submission whose record lies in `folder`; once finished, its result.

    Raises BadInput where there is nothing to finish. What is left of one that never became ready is
    removed: nothing of it can have been submitted.
    """
    known = load(folder)
    if known is None:
        raise BadInput.single("submission", folder, "there is no such submission")
    with held(folder):
        if known.state == "preparing":
            prepare.discard(known)
            raise BadInput.single(
                "submission",
                known.id,
                "was interrupted before it was ready; nothing was submitted, and it is removed",
                hint="Repeat the command that made it",
            )
        return _finish(known, (), sleep)


def dry_run(tasks: Sequence[Task], *, cwd: Path | None = None) -> str:
    """The scripts that `submit` would write, and the problems it would warn of; touches nothing.

    Raises BadInput as `submit` does. Where Slurm does not answer, the site's limits are not
    checked, and the text says so.
    """
    here = cwd or Path.cwd()
    lines = []
    site = None
    try:
        site = _site(tasks, here, cached=False)
    except EnvironmentFailure as failure:
        lines.append(f"# not checked against the site's limits: {failure}")
    checked = prepare.check(tasks, cwd=here, snapshot=site)
    planned = prepare.plan_submission(checked, cwd=here, submission_id=None)
    lines += [f"# warning: {problem}" for problem in checked.warnings]
    first = checked.tasks[0]
    avoid = excluding.for_run(prepare.runs_dir_of(first.spec, here), first.spec, first.plan, site)
    lines += [f"# {problem}" for problem in avoid.problems]
    by_id = dict(zip(planned.run_ids, checked.tasks, strict=True))
    for number, part in enumerate(planned.chunks):
        asks = [ask for ask in planned.asks if ask.chunk == number]
        lines.append(f"# {part.script} ({len(part.runs)} run(s), {len(asks)} sbatch)")
        task = by_id[part.runs[0]]
        if task.spec.cluster.kind in prepare.BATCH_KINDS:
            lines.append(prepare.script_text(planned, number, task, cwd=here))
    return "\n".join(lines)


def _checked(tasks: Sequence[Task], cwd: Path) -> prepare.Checked:
    """The checks, with the site as remembered; what looks wrong by that is asked anew."""
    try:
        return prepare.check(tasks, cwd=cwd, snapshot=_site(tasks, cwd))
    except BadInput:
        return prepare.check(tasks, cwd=cwd, snapshot=_site(tasks, cwd, max_age_s=0))


def _site(
    tasks: Sequence[Task], cwd: Path, *, cached: bool = True, max_age_s: float = snapshot.MAX_AGE_S
) -> Snapshot | None:
    if not tasks or tasks[0].spec.cluster.kind != "slurm":
        return None
    spec = tasks[0].spec
    shared = prepare.runs_dir_of(spec, cwd) / SHARED_DIR
    cache = shared / "site.json" if cached and shared.is_dir() else None
    return snapshot.take(timeout_s=spec.cluster.submit_timeout_s, cache=cache, max_age_s=max_age_s)


def _finish(
    ready: Submission, warnings: tuple[Problem, ...], sleep: Callable[[float], None]
) -> Result:
    if ready.kind != "slurm":
        # Imports psutil and submitit's controller, which a submission to Slurm does without.
        from air_hpc.launch import local

        return local.start(ready, warnings)
    current = ready
    found = list(warnings)
    for index, ask in enumerate(ready.asks):
        if ask.state == AskState.ANSWERED:
            _record(current, ask)
            continue
        avoid = excluding.for_chunk(current, current.chunks[ask.chunk])
        found += [problem for problem in avoid.problems if problem not in found]
        try:
            current = _make_ask(current, index, avoid, sleep)
        except CommandFailure as failure:
            if not _queue_full(failure):
                raise
            if not any(a.job_id for a in current.asks):
                raise EnvironmentFailure(
                    f"the queue takes no more of your jobs now ({failure.stderr.strip()}); "
                    f"nothing of {current.id} is submitted yet",
                    tried=failure.tried,
                    next_step=f"once some have ended: {current.resume}",
                ) from None
            found.append(
                Problem(
                    "launch",
                    current.id,
                    f"the queue takes no more of your jobs now ({failure.stderr.strip()})",
                    hint=f"Submit the rest later: {current.resume}",
                    warning=True,
                )
            )
            break
        _record(current, current.asks[index])
    return result_of(current, tuple(found))


def _make_ask(
    current: Submission, index: int, avoid: Avoid, sleep: Callable[[float], None]
) -> Submission:
    """Make one ask so that it is made once; the record with its answer."""
    ask = current.asks[index]
    if ask.state == AskState.ASKED:
        found = _look_up(current, ask, sleep)
        if found is not None:
            return _answered(current, index, found, "found by its name")
    current = current.with_ask(index, state=AskState.ASKED)
    save(current)
    executor = AgentExecutor(
        Path(current.chunks[ask.chunk].script),
        timeout_s=current.timeout_s,
        sbatch_args=[*_sbatch_args(current, ask), *avoid.sbatch_args],
    )
    last: EnvironmentFailure | None = None
    for _ in range(TRIES):
        try:
            job_id, answer = executor.submit_script()
            return _answered(current, index, job_id, answer)
        except CommandFailure as failure:
            if not failure.transient:
                save(current.with_ask(index, state=AskState.REFUSED, answer=failure.stderr))
                if not _queue_full(failure):
                    _record_refusal(current, ask, failure.stderr)
                raise
            last = failure
        except CommandTimeout as failure:
            last = failure
        found = _look_up(current, ask, sleep)
        if found is not None:
            return _answered(current, index, found, "found by its name")
    raise EnvironmentFailure(
        f"sbatch gave no answer {TRIES} times for {ask.name}",
        tried=str(last),
        next_step=f"{current.resume} later: it looks the job up before it submits again",
    )


def _sbatch_args(current: Submission, ask: Ask) -> list[str]:
    """A later link of a chain differs from the script on the command line alone.

    afterany, not aftercorr: the next link must run also when the former failed, and it is for all
    elements of an array; a link whose run has finished exits at once.
    """
    if ask.link == 0:
        return []
    former = next(a for a in current.asks if a.chunk == ask.chunk and a.link == ask.link - 1)
    return [f"--job-name={ask.name}", f"--dependency=afterany:{former.job_id}"]


def _look_up(current: Submission, ask: Ask, sleep: Callable[[float], None]) -> str | None:
    """The job id of an ask without an answer: by its name, or from what its runs recorded."""
    for pause_s in (0.0, SETTLE_S):
        sleep(pause_s)
        for job in jobs.find_by_name(ask.name, timeout_s=current.timeout_s):
            return job.array_job_id or job.job_id
    if ask.link > 0:
        return None
    for run_id in current.chunks[ask.chunk].runs:
        for event in read_ledger(prepare.run_dir(current, run_id)).events:
            if event.kind == Kind.ATTEMPT_STARTED:
                job_id = event.facts.get("array_job_id") or event.facts.get("job_id")
                if job_id:
                    return str(job_id)
    return None


def _answered(current: Submission, index: int, job_id: str, answer: str) -> Submission:
    done = current.with_ask(index, state=AskState.ANSWERED, job_id=job_id, answer=answer)
    save(done)
    return done


def _record(current: Submission, ask: Ask) -> None:
    """Tell each run's ledger, unless it has been told (a retry comes here again)."""
    part = current.chunks[ask.chunk]
    for index, run_id in enumerate(part.runs):
        facts = {
            "job_id": ask.job_id,
            "array_task_id": index if part.array else None,
            "cluster": current.kind,
            "key": ask.name,
            "script": part.script,
            "submission": current.id,
            "link": ask.link,
        }
        _tell(prepare.run_dir(current, run_id), Event(time.time(), Kind.SUBMITTED, facts=facts))
    bulk.flush(Path(current.runs_dir))


def _tell(run: RunDir, event: Event) -> None:
    """Append to the run's ledger, in the file that only submission writes."""
    path = run.ledger_dir / "submit.jsonl"
    if path.exists():
        told, torn = parse_ledger(path.read_bytes(), "submit")
        if any((e.kind, e.facts) == (event.kind, event.facts) for e in told):
            return
        if torn:
            bulk.append(path, "")
    bulk.append(path, event.to_json())


def _record_refusal(current: Submission, ask: Ask, reason: str) -> None:
    for run_id in current.chunks[ask.chunk].runs:
        event = Event(time.time(), Kind.SUBMIT_FAILED, facts={"reason": reason, "key": ask.name})
        _tell(prepare.run_dir(current, run_id), event)


def _queue_full(failure: CommandFailure) -> bool:
    text = failure.stderr.lower()
    return any(sign in text for sign in _QUEUE_FULL)


def unfinished(runs_dir: Path) -> tuple[Submission, ...]:
    """Submissions below a runs folder that were interrupted or wait for room in the queue."""
    found = []
    for path in sorted((runs_dir / SHARED_DIR / "submissions").glob("*/submission.json")):
        known = load(path.parent)
        if known is not None and not known.complete:
            found.append(known)
    return tuple(found)
