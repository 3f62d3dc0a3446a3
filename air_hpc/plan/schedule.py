"""What each rank of a pipeline does and when: every schedule of torch.distributed.pipelining.

A stage is a part of the model; a rank owns one or more. `actions_by_rank` lists in which order a
rank runs forward and backward passes, exactly as torch 2.13 orders them (a test compares the two).
`simulate` plays the lists against the passes' durations: an action begins when its rank is free
and what it needs has arrived, so the bubble follows from the durations and from no formula of
ideal stages. `most_held` says how many micro-batches' activations a rank keeps, which depends on
the order alone.

Kinds of action: F a forward pass, B a whole backward pass, I and W its two halves (the gradient of
the input, and of the weights), which zero-bubble schedules place apart. DualPipeV's overlapped pair
is F, then B: torch runs the two one after the other unless somebody registers a fused function.

Sources: GPipe (arXiv 1811.06965), 1F1B and its interleaving (2104.04473), looped BFS (2211.05953),
zero bubble and ZBV (2401.10241), DualPipe (2412.19437).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from air_hpc.config.spec import ParallelismSpec, PipelineSchedule
from air_hpc.errors import BadInput

SCHEDULES: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)
SINGLE_STAGE: tuple[PipelineSchedule, ...] = ("gpipe", "1f1b")
"""Schedules whose ranks own one stage."""
V_SHAPED: tuple[PipelineSchedule, ...] = ("zbv_zero_bubble", "dual_pipe_v")
"""Schedules whose ranks own two stages, going there and back: rank 0 has the first and the last."""
SPLIT_BACKWARD: tuple[PipelineSchedule, ...] = ("interleaved_zero_bubble", *V_SHAPED)
"""Schedules that run the two halves of a backward pass apart; torch refuses to compile them."""

ActionKind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: ActionKind
    stage: int
    micro_batch: int


Order = tuple[Action, ...]


def stages_per_rank(asked: ParallelismSpec | str) -> int:
    """How many stages a rank owns; `auto` is one for gpipe and 1f1b and two for the others.

    For the name of a schedule: what `auto` is.
    """
    if isinstance(asked, str):
        return 1 if asked in SINGLE_STAGE else 2
    if asked.pp == 1:
        return 1
    if asked.pp_stages_per_rank != "auto":
        return asked.pp_stages_per_rank
    return stages_per_rank(asked.pp_schedule)


def stage_owner(schedule: str, pp: int, stages_per_rank: int) -> tuple[int, ...]:
    """The pipeline rank that owns each stage: in a loop (stage mod pp), or there and back (V)."""
    loops = range(stages_per_rank)
    if schedule in V_SHAPED:
        return tuple(r if i % 2 == 0 else pp - 1 - r for i in loops for r in range(pp))
    return tuple(r for _ in loops for r in range(pp))


def micro_batches_that_work(
    schedule: PipelineSchedule, pp: int, stages_per_rank: int, near: int
) -> str | None:
    """What a schedule asks of the number of micro-batches, or None where `near` is right.

    The rules are those that torch 2.13 raises for: 1f1b needs one for each stage, DualPipeV too;
    the interleaved ones fill rounds of pp or more, each of the same size.
    """
    if schedule == "1f1b" and near < pp:
        return f"at least pp ({pp})"
    if schedule == "dual_pipe_v" and near < pp * stages_per_rank:
        return f"at least as many as stages ({pp * stages_per_rank})"
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble") and near % max(1, near // pp):
        return f"a multiple of pp ({pp}), or of the rounds it makes"
    return None


def takes(parallelism: ParallelismSpec, micro_batches: int) -> bool:
    """Whether the schedule of a run takes so many micro-batches; without a pipeline any."""
    pp, loops = parallelism.pp, stages_per_rank(parallelism)
    if pp == 1:
        return True
    return micro_batches_that_work(parallelism.pp_schedule, pp, loops, micro_batches) is None


def actions_by_rank(
    schedule: PipelineSchedule, pp: int, stages_per_rank: int, micro_batches: int
) -> tuple[Order, ...]:
    """What each pipeline rank runs in one step, in order.

    Raises BadInput for a number of stages or micro-batches that the schedule does not take.
    """
    needs = micro_batches_that_work(schedule, pp, stages_per_rank, micro_batches)
    if needs is not None:
        message = f"{schedule} does not take so many micro-batches"
        raise BadInput.single("micro_batches", micro_batches, message, allowed=needs)
    wanted = 1 if schedule in SINGLE_STAGE else 2 if schedule in V_SHAPED else stages_per_rank
    if stages_per_rank != wanted:
        message = f"{schedule} has another number of stages on a rank"
        raise BadInput.single("pp_stages_per_rank", stages_per_rank, message, allowed=str(wanted))
    return _ordered(schedule, pp, stages_per_rank, micro_batches)


@lru_cache(maxsize=256)
def _ordered(
    schedule: PipelineSchedule, pp: int, stages_per_rank: int, micro_batches: int
) -> tuple[Order, ...]:
    shape = _Shape(pp, stages_per_rank, micro_batches)
    return tuple(tuple(_ORDERS[schedule](shape, rank)) for rank in range(pp))


@dataclass(frozen=True)
class _Shape:
    pp: int
    loops: int
    micro_batches: int

    @property
    def per_round(self) -> int:
        """Micro-batches that pass one stage before the rank turns to its next."""
        return self.micro_batches // max(1, self.micro_batches // self.pp)


def _gpipe(shape: _Shape, rank: int) -> Iterator[Action]:
    for kind in ("F", "B"):
        yield from (Action(kind, rank, index) for index in range(shape.micro_batches))


def _one_f_one_b(shape: _Shape, rank: int) -> Iterator[Action]:
    ahead = min(shape.micro_batches, shape.pp - 1 - rank)
    yield from (Action("F", rank, index) for index in range(ahead))
    for index in range(ahead, shape.micro_batches):
        yield Action("F", rank, index)
        yield Action("B", rank, index - ahead)
    behind = range(shape.micro_batches - ahead, shape.micro_batches)
    yield from (Action("B", rank, index) for index in behind)


def _looped_bfs(shape: _Shape, rank: int) -> Iterator[Action]:
    own = [rank + loop * shape.pp for loop in range(shape.loops)]
    for stage in own:
        yield from (Action("F", stage, index) for index in range(shape.micro_batches))
    for stage in reversed(own):
        yield from (Action("B", stage, index) for index in reversed(range(shape.micro_batches)))


def _interleaved(shape: _Shape, rank: int) -> Iterator[Action]:
    total = shape.loops * shape.micro_batches
    ahead = _interleaved_ahead(shape, rank, hops=2)
    forward, backward = _looping(shape, rank)
    yield from (forward(index) for index in range(ahead))
    for index in range(ahead, total):
        yield forward(index)
        yield backward("B", index - ahead)
    yield from (backward("B", index) for index in range(total - ahead, total))


def _interleaved_zero_bubble(shape: _Shape, rank: int) -> Iterator[Action]:
    """ZB1P: a weight pass follows `rank` input passes behind."""
    total = shape.loops * shape.micro_batches
    ahead = _interleaved_ahead(shape, rank, hops=1)
    forward, backward = _looping(shape, rank)
    yield from (forward(index) for index in range(ahead))
    weights = 0
    for index in range(total):
        if ahead + index < total:
            yield forward(ahead + index)
        yield backward("I", index)
        if index >= rank:
            yield backward("W", weights)
            weights += 1
    yield from (backward("W", index) for index in range(weights, total))


def _interleaved_ahead(shape: _Shape, rank: int, hops: int) -> int:
    ahead = (shape.loops - 1) * shape.per_round + hops * (shape.pp - 1 - rank)
    return min(ahead, shape.loops * shape.micro_batches)


def _looping(
    shape: _Shape, rank: int
) -> tuple[Callable[[int], Action], Callable[[ActionKind, int], Action]]:
    """The n-th forward and the n-th backward action of a rank that loops over its stages.

    `per_round` micro-batches go through its first stage, then through its second, and so on; then
    the next round begins.
    """
    per_round, loops = shape.per_round, shape.loops

    def place(index: int) -> tuple[int, int]:
        loop = index // per_round % loops
        return loop, index // (per_round * loops) * per_round + index % per_round

    def forward(index: int) -> Action:
        loop, micro_batch = place(index)
        return Action("F", loop * shape.pp + rank, micro_batch)

    def backward(kind: ActionKind, index: int) -> Action:
        loop, micro_batch = place(index)
        return Action(kind, (loops - 1 - loop) * shape.pp + rank, micro_batch)

    return forward, backward


class _Counting:
    """Hands out the micro-batches of each stage and kind in order."""

    def __init__(self) -> None:
        self._next: dict[tuple[ActionKind, int], int] = {}
        self.actions: list[Action] = []
        self.waiting: list[Action] = []
        """Weight passes whose input pass is done, the oldest first."""

    def add(self, kind: ActionKind, stage: int) -> None:
        counter: ActionKind = "I" if kind == "B" else kind
        index = self._next.get((counter, stage), 0)
        self._next[counter, stage] = index + 1
        self.actions.append(Action(kind, stage, index))
        if kind == "I":
            self.waiting.append(Action("W", stage, index))

    def weight(self) -> None:
        if self.waiting:
            self.actions.append(self.waiting.pop(0))

    def count(self, kind: ActionKind, stage: int) -> int:
        return self._next.get((kind, stage), 0)


def _zbv(shape: _Shape, rank: int) -> Iterator[Action]:
    """Written for at least 2 · pp - 1 micro-batches; with fewer, the ones too many are left out."""
    pp, there, back = shape.pp, rank, 2 * shape.pp - 1 - rank
    enough = max(2 * pp - 1, shape.micro_batches)
    made = _Counting()

    def whole(stage: int) -> None:
        made.add("I", stage)
        made.actions.append(made.waiting.pop())

    for _ in range(2 * (pp - rank) - 1):
        made.add("F", there)
    for _ in range(rank):
        made.add("F", back)
        made.add("F", there)
    for _ in range(pp - rank):
        made.add("F", back)
        whole(back)
    while made.count("F", back) < made.count("F", there) or made.count("F", there) < enough:
        if made.count("F", there) < enough:
            made.add("F", there)
        whole(there)
        made.add("F", back)
        whole(back)
    for _ in range(rank):
        made.add("I", there)
        made.add("I", back)
    of_there = [action for action in made.waiting if action.stage == there]
    of_back = [action for action in made.waiting if action.stage == back]
    made.waiting = of_there
    for _ in range(pp - rank):
        made.add("I", there)
        made.weight()
    for action in (*made.actions, *of_back, *made.waiting):
        if action.micro_batch < shape.micro_batches:
            yield action


def _dual_pipe_v(shape: _Shape, rank: int) -> Iterator[Action]:
    pp, there, back = shape.pp, rank, 2 * shape.pp - 1 - rank
    after = pp - rank - 1
    made = _Counting()
    for _ in range(2 * after):
        made.add("F", there)
    for _ in range(rank + 1):
        made.add("F", there)
        made.add("F", back)
    for _ in range(after):
        made.add("I", back)
        made.weight()
        made.add("F", back)
    for _ in range(shape.micro_batches - 2 * pp + rank + 1):
        made.add("F", there)
        made.add("B", back)
        made.add("F", back)
        made.add("B", there)
    for _ in range(after):
        made.add("B", back)
        made.add("F", back)
        made.add("B", there)
    split_from = 2 * ((rank + 1) // 2) + (rank + 1) % 2
    for step in range(2 * (rank + 1)):
        made.add("I" if step >= split_from else "B", there if step % 2 else back)
    for _ in range(after):
        made.weight()
        made.add("I", there)
    for _ in range(rank + 1):
        made.weight()
    yield from made.actions


_ORDERS: dict[PipelineSchedule, Callable[[_Shape, int], Iterator[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved_1f1b": _interleaved,
    "looped_bfs": _looped_bfs,
    "interleaved_zero_bubble": _interleaved_zero_bubble,
    "zbv_zero_bubble": _zbv,
    "dual_pipe_v": _dual_pipe_v,
}
