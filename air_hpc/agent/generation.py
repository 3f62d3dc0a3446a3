"""One generation on its coordinator: what it starts from, who runs which ranks, how it ends.

Preparing one writes to the run directory in this order, so that a crash in between leaves a state
that the next start understands: the token is claimed, older writers' leftovers are swept, bad
checkpoints are marked, and the list of checkpoints that count from now on is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from air_hpc.agent.channel import Message
from air_hpc.agent.members import Member, problems_of
from air_hpc.agent.watching import HangWatch
from air_hpc.agent.workers import GenerationStart
from air_hpc.config.spec import RunSpec
from air_hpc.placement.ranks import RankPlace, assign_ranks
from air_hpc.plan.types import Plan
from air_hpc.recovery.evidence import WorkerEnd
from air_hpc.recovery.hang import Blame
from air_hpc.recovery.stragglers import Stragglers
from air_hpc.rundir.commit import find_candidates, inheritable
from air_hpc.rundir.fence import Token, record_inherited, require_newest
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.retention import sweep_leftovers
from air_hpc.rundir.state import RunStatus
from air_hpc.rundir.words import FailureClass


@dataclass(frozen=True)
class CannotStart:
    """Why a generation does not start; `unrecoverable` when no later try will either."""

    failure_class: FailureClass
    evidence: str
    unrecoverable: bool = False


@dataclass
class Generation:
    """The live generation. `ends` fills as workers leave; `starts` is what each node was told."""

    token: Token
    plan: Plan
    members: tuple[Member, ...]
    places: tuple[RankPlace, ...]
    resume_steps: tuple[int, ...]
    starts: Mapping[str, Message]
    hang: HangWatch
    stragglers: Stragglers
    hung: Blame | None = None
    """Who hung, once that is known."""
    ends: dict[int, WorkerEnd] = field(default_factory=dict)
    bad_steps: set[int] = field(default_factory=set)
    """Checkpoints that its workers found bad."""

    @property
    def master(self) -> str:
        """Where rank 0 is met."""
        start = self.starts[self.members[0].node]["start"]
        return f"{start['master_address']}:{start['master_port']}"

    def device_of(self, rank: int, devices: Sequence[Mapping[str, Any]]) -> str | None:
        """What drives a rank, of its node's `devices`."""
        local_rank = rank % self.plan.devices_per_node
        return str(devices[local_rank]["model"]) if local_rank < len(devices) else None

    def node_ended(self, node: str) -> bool:
        """Whether every worker of a node has ended."""
        return all(place.rank in self.ends for place in self.places if place.node == node)

    def never_started(self, lost: Container[str]) -> int:
        """How many workers have no end, though their node is not one of `lost`."""
        there = (place.rank for place in self.places if place.node not in lost)
        return sum(rank not in self.ends for rank in there)


def fix_checkpoints(
    run: RunDir,
    token: Token,
    status: RunStatus,
    condemn: Callable[[int, str], None],
) -> tuple[int, ...] | CannotStart:
    """What to resume from, newest first, inherited from now on. Raises Fenced."""
    require_newest(run, token)
    sweep_leftovers(run, token)
    found = find_candidates(run)
    for step, reason in found.rejected:
        condemn(step, reason)
    newest = found.usable[0].step if found.usable else -1
    unread = [reason for step, reason in found.unreadable if step > newest]
    if unread:
        # Nothing is written down yet: the next start may find it whole, and inherit it.
        return CannotStart(FailureClass.STORAGE, f"cannot read what to resume from: {unread[0]}")
    record_inherited(run, token, inheritable(found.usable))
    if not found.usable and status.committed_step is not None:
        return CannotStart(
            FailureClass.CHECKPOINT,
            f"a checkpoint of step {status.committed_step} was recorded and none can be used now: "
            "the run does not train from scratch in silence",
            unrecoverable=True,
        )
    return tuple(checkpoint.step for checkpoint in found.usable)


def misfits(members: Sequence[Member], plan: Plan, spec: RunSpec) -> CannotStart | None:
    """Why these nodes cannot train together, or None."""
    per_node = plan.devices_per_node
    found = problems_of(members, per_node, allow_mixed=spec.cluster.allow_mixed_devices)
    if len(members) * per_node != plan.world_size:
        found.append(
            f"{len(members)} nodes × {per_node} devices are not the plan's world of "
            f"{plan.world_size}"
        )
    return CannotStart(FailureClass.ENVIRONMENT, "; ".join(found)) if found else None


def lay_out(
    token: Token,
    members: Sequence[Member],
    plan: Plan,
    spec: RunSpec,
    resume_steps: tuple[int, ...],
    *,
    skipped_batches: tuple[tuple[int, int], ...] = (),
    preflight: bool = False,
) -> Generation:
    """Ranks, the meeting point and what each node is told. The port differs between generations:
    what the one before left may still hold its own."""
    places = assign_ranks([member.node for member in members], plan.devices_per_node)
    first = members[0]
    ranks: dict[str, list[int]] = {}
    for place in places:
        ranks.setdefault(place.node, []).append(place.rank)
    starts: dict[str, dict[str, Any]] = {}
    for node_rank, member in enumerate(members):
        start = GenerationStart(
            token=token,
            ranks=tuple(ranks[member.node]),
            world_size=plan.world_size,
            node_rank=node_rank,
            master_address=first.address,
            master_port=first.ports[(token.generation - 1) % len(first.ports)],
            resume_steps=resume_steps,
            stop_timeout_s=spec.recovery.stop_timeout_s,
            threads=plan.threads_per_worker,
            skipped_batches=skipped_batches,
            preflight=preflight,
        )
        starts[member.node] = {"type": "start", "start": start.to_json()}
    nodes = {place.rank: place.node for place in places}
    return Generation(
        token=token,
        plan=plan,
        members=tuple(members),
        places=tuple(places),
        resume_steps=resume_steps,
        starts=starts,
        hang=HangWatch(nodes),
        stragglers=Stragglers(spec.recovery.straggler, nodes),
    )
