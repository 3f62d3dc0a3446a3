"""What must hold when a run has ended: pure functions of what was found, each a list of violations.

Losses are bit-equal to the undisturbed run's as long as the world had its full size. From the step
that a smaller world resumed from, sums are taken in another order: there the losses may differ by
`ELASTIC_TOLERANCE` of their value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from _chaos.processes import left_of
from air_hpc.agent.channel import candidate_ports
from air_hpc.rundir.atomic import ASIDE_PREFIX
from air_hpc.rundir.commit import SAVING_NAME
from air_hpc.rundir.events import Event
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.state import RunStatus
from air_hpc.rundir.words import RunState

ELASTIC_TOLERANCE = 0.02
LOST = ("ended ", "waited ", "losses: ", "interrupted ")
"""How the violations of a run begin that did not finish, or not with the right numbers."""
LISTENING = "0A"
"""TCP_LISTEN in /proc/net/tcp, proc_net(5)."""


def state_problems(status: RunStatus) -> list[str]:
    """FINISHED and nothing else."""
    if status.state is RunState.FINISHED:
        return []
    return [f"ended {status.state}: {status.failure_class}: {status.evidence}"]


def exact_until(events: Iterable[Event]) -> int | None:
    """The last step before a world of another size trained; None where there was none."""
    sizes: list[tuple[int, int]] = []
    for event in events:
        if event.kind == "generation_started":
            world = int(event.facts.get("world_size") or 0)
            sizes.append((world, int(event.facts.get("resume_step") or 0)))
    full = max((world for world, _ in sizes), default=0)
    return min((step for world, step in sizes if world != full), default=None)


def loss_problems(
    found: Mapping[int, float], reference: Mapping[int, float], exact_to: int | None
) -> list[str]:
    """Every step once, each loss the undisturbed run's."""
    problems = []
    if missing := sorted(reference.keys() - found.keys()):
        problems.append(
            f"losses: {len(missing)} steps have no sample that counts, {missing[0]} first"
        )
    if extra := sorted(found.keys() - reference.keys()):
        problems.append(f"losses: {len(extra)} steps too many, {extra[0]} first")
    for step in sorted(found.keys() & reference.keys()):
        exact = exact_to is None or step <= exact_to
        limit = 0.0 if exact else ELASTIC_TOLERANCE * abs(reference[step])
        if not abs(found[step] - reference[step]) <= limit:
            problems.append(
                f"losses: step {step} has {found[step]!r}, undisturbed {reference[step]!r}"
            )
            break
    return problems


def time_problems(
    events: Sequence[Event],
    status: RunStatus,
    seen_s: tuple[float, float] | None,
    slack_s: float = 15.0,
) -> list[str]:
    """The categories of the ledger sum to the time from its first event to the run's end, and,
    where no clock was stepped, that is about what was seen from outside: `seen_s` are the seconds
    from the end of the submission, and from its beginning."""
    if not events or status.ended is None:
        return []
    spent, told = status.time.wall_s, max(0.0, status.ended - events[0].time)
    problems = []
    # A clock that stepped back stands still in the fold, so the sum may exceed the difference.
    if spent < told - 1e-3 or (seen_s is not None and abs(spent - told) > 1e-3):
        problems.append(f"the ledger's times sum to {spent:.3f} s, its events span {told:.3f} s")
    if seen_s is not None and not seen_s[0] - slack_s <= spent <= seen_s[1] + slack_s:
        problems.append(f"the ledger's times sum to {spent:.1f} s, the run took {seen_s[1]:.1f} s")
    for name in ("queued_s", "starting_s", "training_s", "lost_s", "stopping_s"):
        if getattr(status.time, name) < 0:
            problems.append(f"{name} is negative")
    return problems


def fence_problems(events: Sequence[Event]) -> list[str]:
    """No commit is recorded by a token older than one that had started before."""
    problems, newest = [], None
    for event in events:
        if event.kind == "generation_started" and event.token is not None:
            newest = event.token if newest is None else max(newest, event.token)
        if event.kind == "checkpoint_committed" and event.token and newest and event.token < newest:
            step = event.facts.get("step")
            problems.append(f"{event.token} committed step {step} after {newest} had started")
    return problems


def leftover_files(run: RunDir) -> list[str]:
    """Names that only an unfinished write has."""
    found = []
    for root in (run.path, run.shared_dir):
        for path in root.rglob("*"):
            if "code" in path.relative_to(root).parts[:2]:
                continue
            name = path.name
            if SAVING_NAME.fullmatch(name) or name.startswith((ASIDE_PREFIX, ".probe-")):
                found.append(f"left in the run directory: {path.relative_to(root.parent)}")
    return found


def leftover_processes(run: RunDir) -> list[str]:
    """Processes that still work for the run."""
    return [
        f"still runs: pid {p.pid} ({p.state}) {' '.join(p.command())[:120]}"
        for p in sorted(left_of(run.path), key=lambda p: p.pid)
    ]


def leftover_ports(run: RunDir, events: Sequence[Event]) -> list[str]:
    """Ports of the run's coordinators that are still listened on."""
    listening = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING:
                listening.add(int(fields[1].rpartition(":")[2], 16))
    found = []
    for event in events:
        if event.kind == "attempt_started":
            start = f"{event.facts.get('job_id')}.{event.facts.get('restart_count') or 0}"
            for port in candidate_ports(run.run_id, start):
                if port in listening:
                    found.append(f"port {port} of start {start} is still listened on")
    return found
