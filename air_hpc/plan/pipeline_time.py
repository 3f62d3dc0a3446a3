"""How long a pipeline takes for one step, and what a rank holds meanwhile, by simulation.

Each rank's actions (`plan.schedule`) are played in order: one begins when its rank is free and what
it needs has arrived from the neighbouring stage, `transfer_s` after it was computed there (nothing
between stages of one rank). Sends cost the sender no time: they run beside the next action. So
what the simulation leaves out is contention for links and the host's own delays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from air_hpc.config.spec import PipelineSchedule
from air_hpc.plan.schedule import Order, actions_by_rank, stage_owner

_PLAYED_ROUNDS = 4
"""From how many rounds the time of a further one is taken: with transfers they may take turns."""


@dataclass(frozen=True)
class StageTime:
    """Seconds that one micro-batch takes in one stage; a whole backward pass is the two halves."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float


@dataclass(frozen=True)
class PipelineTime:
    """One step: from its first action to its last, and how long each rank computes."""

    makespan_s: float
    busy_s: tuple[float, ...]

    @property
    def bubble_ratio(self) -> float:
        """The idle part of all ranks' time: waiting for others, and for slower stages."""
        if not self.makespan_s:
            return 0.0
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.makespan_s)


def pipeline_time(
    schedule: PipelineSchedule,
    pp: int,
    stages_per_rank: int,
    micro_batches: int,
    times: Sequence[StageTime],
    transfer_s: float = 0.0,
) -> PipelineTime:
    """The time of a step with these passes (one `StageTime` for each stage).

    Many micro-batches are not all played: once the pipeline is full each round takes as long as the
    ones before (within 1 %), so the rest follows from two shorter runs. Raises BadInput as
    `actions_by_rank`.
    """
    actions = actions_by_rank  # checks the arguments, before anything is shortened
    round_size = pp
    if schedule.startswith("interleaved"):
        round_size = micro_batches // max(1, micro_batches // pp)
    spare = (micro_batches - 4 * pp * stages_per_rank) // round_size - _PLAYED_ROUNDS
    if spare < 1:
        orders = actions(schedule, pp, stages_per_rank, micro_batches)
        return simulate(schedule, orders, times, transfer_s)
    most = micro_batches - spare * round_size
    first, second = (
        simulate(schedule, actions(schedule, pp, stages_per_rank, n), times, transfer_s)
        for n in (most - _PLAYED_ROUNDS * round_size, most)
    )

    def grown(one: float, other: float) -> float:
        return other + spare * (other - one) / _PLAYED_ROUNDS

    busy = tuple(grown(a, b) for a, b in zip(first.busy_s, second.busy_s, strict=True))
    return PipelineTime(grown(first.makespan_s, second.makespan_s), busy)


def simulate(
    schedule: PipelineSchedule,
    orders: Sequence[Order],
    times: Sequence[StageTime],
    transfer_s: float = 0.0,
) -> PipelineTime:
    """Play `orders` (of one step, by rank). Raises ValueError where they wait for each other."""
    pp, stages = len(orders), len(times)
    owner = stage_owner(schedule, pp, stages // pp)
    free_s = [0.0] * pp
    busy_s = [0.0] * pp
    at = [0] * pp
    done: dict[tuple[bool, int, int], float] = {}
    waiting: dict[tuple[bool, int, int], int] = {}
    ready = list(range(pp))
    while ready:
        rank = ready.pop()
        order = orders[rank]
        while at[rank] < len(order):
            kind, stage, micro_batch = order[at[rank]]
            time = times[stage]
            arrived_s = 0.0
            if kind == "F":
                took_s, needs, peer = time.forward_s, (True, stage - 1, micro_batch), stage - 1
            else:
                took_s, needs, peer = (
                    time.backward_input_s,
                    (False, stage + 1, micro_batch),
                    stage + 1,
                )
                if kind == "B":
                    took_s += time.backward_weight_s
                elif kind == "W":
                    took_s, peer = time.backward_weight_s, stages
            if 0 <= peer < stages:
                if needs not in done:
                    waiting[needs] = rank
                    break
                arrived_s = done[needs] + (transfer_s if owner[peer] != rank else 0.0)
            free_s[rank] = max(free_s[rank], arrived_s) + took_s
            busy_s[rank] += took_s
            at[rank] += 1
            if kind != "W":
                finished = (kind == "F", stage, micro_batch)
                done[finished] = free_s[rank]
                woken = waiting.pop(finished, None)
                if woken is not None and woken != rank:
                    ready.append(woken)
    stuck = [rank for rank in range(pp) if at[rank] < len(orders[rank])]
    if stuck:
        raise ValueError(f"ranks {stuck} of {schedule} wait for each other")
    return PipelineTime(max(free_s), tuple(busy_s))


def most_held(order: Order, bytes_of_stage: Mapping[int, float]) -> dict[int, int]:
    """How many micro-batches of each of its stages a rank holds when that takes most bytes.

    Activations are held from a forward pass to the end of the whole backward pass; what the first
    half of one frees is left out.
    """
    held = dict.fromkeys(bytes_of_stage, 0)
    most, total, greatest = dict(held), 0.0, -1.0
    for kind, stage, _ in order:
        if kind == "F":
            held[stage] += 1
            total += bytes_of_stage[stage]
            if total > greatest:
                greatest, most = total, dict(held)
        elif kind in ("B", "W"):
            held[stage] -= 1
            total -= bytes_of_stage[stage]
    return most


def in_flight(
    schedule: PipelineSchedule,
    pp: int,
    stages_per_rank: int,
    micro_batches: int,
    bytes_of_stage: Sequence[float] | None = None,
) -> tuple[dict[int, int], ...]:
    """For each pipeline rank, the micro-batches of each of its stages that it holds at most.

    `bytes_of_stage` weighs the stages (equal where None). A full pipeline holds no more however
    many micro-batches follow, but for gpipe and looped BFS, which hold all.
    """
    stages = pp * stages_per_rank
    weights = [1.0] * stages if bytes_of_stage is None else bytes_of_stage
    if schedule in ("gpipe", "looped_bfs"):
        owner = stage_owner(schedule, pp, stages_per_rank)
        return tuple(
            {s: micro_batches for s in range(stages) if owner[s] == rank} for rank in range(pp)
        )
    round_size = pp
    if schedule.startswith("interleaved"):
        round_size = micro_batches // max(1, micro_batches // pp)
    rounds_left_out = max(0, (micro_batches - 3 * stages) // round_size)
    few = micro_batches - rounds_left_out * round_size
    orders = actions_by_rank(schedule, pp, stages_per_rank, few)
    return tuple(most_held(order, _weights(order, weights)) for order in orders)


def _weights(order: Order, weights: Sequence[float]) -> dict[int, float]:
    return {stage: weights[stage] for stage in sorted({action.stage for action in order})}
