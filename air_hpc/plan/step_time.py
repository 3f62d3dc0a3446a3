"""How long one step takes, from what each rank computes, moves and waits for.

    step = the pipeline of all micro-batches (or their sum, without one)
         + what gradients and weights take that no computation hides
         + the optimizer

One micro-batch through one block is the sum of its matrix products, its attention and its
memory-bound operations at the rates that are reached (`plan.rates`), plus the collectives in its
way: tp's and ulysses' stand in it whole, a ring's only as far as they outlast the attention beside
them. FSDP gathers the next block while one computes, so of its collectives counts what outlasts the
computing, the first gather and the last scatter, which have nothing to hide behind. Gradients that
are added up over replicas count as far as they outlast the last backward pass. The pipeline is
simulated with these times (`plan.pipeline_time`), so that its bubble is the schedule's own.

What may go wrong: kernels are not launched late, links are not shared with others, no rank is
slower than the rest, data is there in time. docs/planner.md shows how far published runs are from
it. Unknown is an answer: a device without a figure has no step time, and neither has an optimizer
that runs on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from air_hpc.config.spec import RunSpec
from air_hpc.errors import BadInput
from air_hpc.hardware.network import Group, Links, collective_s
from air_hpc.plan.pipeline_time import StageTime, pipeline_time
from air_hpc.plan.rates import Constants, Rates, Unknown, rates_of
from air_hpc.plan.schedule import stage_owner, stages_per_rank
from air_hpc.plan.types import FlopsPerToken, Mesh
from air_hpc.plan.work import (
    BlockWork,
    Job,
    Kinds,
    Pass,
    block_work,
    cut_kinds,
    embedding_work,
    head_work,
    job_of,
    kinds_of,
)

_NORM_BYTES = 4
"""The gradient's norm reads each gradient once."""


class _MissingLink(Exception):
    """A collective needs a link whose rate is not known."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of the busiest rank, by what takes them; collectives as far as they are
    exposed. `bubble_s` holds the pipeline's waiting and its transfers."""

    matmul_s: float
    attention_s: float
    memory_bound_s: float
    recompute_s: float
    tp_s: float
    cp_s: float
    ep_s: float
    fsdp_s: float
    dp_s: float
    bubble_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        """The step."""
        return float(sum(getattr(self, part.name) for part in fields(self)))


class _Parts(NamedTuple):
    """Seconds of a pass, by what takes them."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    again: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    fsdp: float = 0.0

    def plus(self, other: _Parts, times: float = 1.0) -> _Parts:
        return _Parts(*(a + times * b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class _Stage:
    """One micro-batch in one stage, and what its weights cost once a step."""

    forward: _Parts
    backward: _Parts
    weight_gradients_s: float
    once_s: float
    weights: float
    """Parameters that this rank owns after sharding."""
    replicated_bytes: float
    """Of float32 gradients that go over the replicas."""
    gather_s: float = 0.0
    scatter_s: float = 0.0
    """Of all its weights."""


def step_time(
    spec: RunSpec,
    mesh: Mesh,
    micro_batch_size: int,
    *,
    measured_flops_per_s: float | None = None,
    constants: Constants | None = None,
) -> StepTime | Unknown:
    """The step of a spec on its resolved mesh, or why it is not known."""
    rates = rates_of(
        spec.accelerator,
        spec.launch.devices_per_node,
        spec.train.precision,
        measured_flops_per_s=measured_flops_per_s,
        constants=constants,
    )
    if isinstance(rates, Unknown):
        return rates
    if spec.parallelism.cpu_offload:
        return Unknown("cpu_offload runs the optimizer on the host, whose rate is not known")
    try:
        return job_time(job_of(spec, mesh, micro_batch_size), rates)
    except BadInput as error:  # a schedule that does not take this: said by plan.validity
        return Unknown(str(error))


def job_time(
    job: Job, rates: Rates, *, stages: Sequence[Sequence[int]] | None = None, exact: bool = True
) -> StepTime | Unknown:
    """The step of a job. `stages` are the layers of each stage (None: cut by FLOPs).

    Without `exact` a pipeline's bubble is the ideal schedule's share, which costs no simulation:
    for a search, whose best are then timed exactly.
    """
    loops = stages_per_rank(job.parallelism) if job.mesh.pp > 1 else 1
    count = job.mesh.pp * loops
    if stages is None:
        kinds = cut_kinds(job.model, job.sequence_length, count)
    else:
        kinds = kinds_of(job.model, stages)
    timer = _Timer(job, rates)
    try:
        timed = [timer.stage(kind) for kind in kinds]
        return _whole(job, timer, timed, loops, exact=exact)
    except _MissingLink as missing:
        return Unknown(str(missing))


def mfu(
    step_s: float, flops: FlopsPerToken, tokens: float, ranks: int, peak: float | None
) -> FlopsPerToken | None:
    """Model FLOPs utilization in both conventions, None without a peak."""
    if peak is None:
        return None
    per_flop = tokens / step_s / ranks / peak
    return FlopsPerToken(causal=flops.causal * per_flop, palm=flops.palm * per_flop)


class _Timer:
    """Turns work into seconds; a kind of block is timed once."""

    def __init__(self, job: Job, rates: Rates) -> None:
        self.job, self.rates = job, rates
        self._blocks: dict[tuple[bool, int | None], _Block] = {}
        self._stages: dict[Kinds, _Stage] = {}

    def stage(self, kinds: Kinds) -> _Stage:
        if kinds not in self._stages:
            self._stages[kinds] = self._time_stage(kinds)
        return self._stages[kinds]

    def _time_stage(self, kinds: Kinds) -> _Stage:
        blocks: list[tuple[_Block, int]] = []
        for moe, window, count in kinds.blocks:
            if (moe, window) not in self._blocks:
                self._blocks[moe, window] = self._block(block_work(self.job, moe, window))
            blocks.append((self._blocks[moe, window], count))
        ends = [embedding_work(self.job)] if kinds.first else []
        ends += [head_work(self.job)] if kinds.last else []
        root = [(self._block(work), 1) for work in ends]
        return self._joined(blocks, root)

    def _joined(self, blocks: list[tuple[_Block, int]], root: list[tuple[_Block, int]]) -> _Stage:
        job = self.job
        forward, backward = _Parts(), _Parts()
        weights = replicated = weight_s = 0.0
        hidden = _Hidden()
        for block, count in (*blocks, *root):
            forward = forward.plus(block.forward, count)
            backward = backward.plus(block.backward, count)
            weight_s += count * block.weight_s
            weights += count * block.owned
            replicated += count * block.replicated_bytes
        for block, count in blocks:
            hidden.add(block, count, again=job.gathers_again)
        # The root's weights are gathered before the first block and scattered after the last.
        edge = sum(b.gather_s + b.scatter_s for b, _ in root)
        edge += max((b.gather_s + b.scatter_s for b, _ in blocks), default=0.0)
        if job.mesh.pp == 1:
            forward = forward._replace(fsdp=hidden.forward_s + edge)
            backward = backward._replace(fsdp=hidden.backward_s)
            return _Stage(forward, backward, weight_s, 0.0, weights, replicated)
        once = edge + hidden.forward_s + hidden.backward_s
        whole = [(b, count) for b, count in (*blocks, *root)]
        gather = sum(count * b.gather_s for b, count in whole)
        scatter = sum(count * b.scatter_s for b, count in whole)
        return _Stage(forward, backward, weight_s, once, weights, replicated, gather, scatter)

    def _block(self, work: BlockWork) -> _Block:
        forward, backward = self.seconds(work.forward), self.seconds(work.backward)
        again = self.seconds(work.again)
        weight_s = (backward.matmul) / 2
        backward = backward._replace(again=sum(again))
        gather_s, scatter_s, copied_s = self._sharding(work)
        forward = forward._replace(memory=forward.memory + copied_s[0])
        backward = backward._replace(memory=backward.memory + copied_s[1])
        job = self.job
        owned = work.weights / job.shard_group.size
        owned += work.expert_weights / job.expert_shard_group.size
        replicated = 4.0 * owned if job.mesh.dp_replicate > 1 else 0.0
        return _Block(forward, backward, weight_s, gather_s, scatter_s, owned, replicated)

    def seconds(self, work: Pass) -> _Parts:
        """The seconds of a pass, what hides behind other work left out."""
        rates = self.rates
        linear = max(
            work.linear_flops / rates.linear_flops_per_s,
            work.linear_bytes / rates.memory_bytes_per_s,
        )
        attention = work.attention_flops / rates.attention_flops_per_s
        waits = {"tp": 0.0, "cp": 0.0, "ep": 0.0}
        memory = work.memory_bytes
        for transfer in work.transfers:
            each = self.collective(transfer.collective, transfer.group, transfer.whole_bytes)
            took = transfer.count * each
            if transfer.name == "tp" and not self.job.overlapped_tp:
                memory += 2 * transfer.count * transfer.whole_bytes
            waits[transfer.name] += took
        if self.job.parallelism.cp_method == "ring":
            waits["cp"] = max(0.0, waits["cp"] - attention)
        return _Parts(
            matmul=linear + work.matmul_flops / rates.matmul_flops_per_s,
            attention=attention,
            memory=memory / rates.memory_bytes_per_s,
            tp=waits["tp"],
            cp=waits["cp"],
            ep=waits["ep"],
        )

    def collective(self, kind: str, group: Group, whole_bytes: float) -> float:
        took = collective_s(
            kind,  # type: ignore[arg-type]
            group,
            whole_bytes,
            self.rates.links,
            share=self.rates.link_share,
        )
        if took is None:
            raise _MissingLink(_missing_link(group, self.rates.links))
        return took

    def _sharding(self, work: BlockWork) -> tuple[float, float, tuple[float, float]]:
        """Gather and scatter of a block's weights, and what the copies in and out of their buffers
        take of memory: (forward, backward)."""
        job, element = self.job, self.job.element_bytes
        gathered_bytes = element / 2 if job.fp8_gathers else element
        gather = scatter = 0.0
        copied = 0.0
        for weights, group in (
            (work.weights, job.shard_group),
            (work.expert_weights, job.expert_shard_group),
        ):
            if group.size == 1 or not weights:
                continue
            gather += self.collective("all_gather", group, weights * gathered_bytes)
            scatter += self.collective("reduce_scatter", group, weights * 4.0)
            copied += weights
        memory = self.rates.memory_bytes_per_s
        if job.mesh.pp > 1:  # once a step: beside what it moves, its copies are nothing
            return gather, scatter, (0.0, 0.0)
        out = 2 * gathered_bytes * copied / memory
        back = (element + 4) * copied / memory + (out if job.gathers_again else 0.0)
        return gather, scatter, (out, back)


@dataclass(frozen=True)
class _Block:
    """A kind of block, timed."""

    forward: _Parts
    backward: _Parts
    weight_s: float
    gather_s: float
    scatter_s: float
    owned: float
    replicated_bytes: float


@dataclass
class _Hidden:
    """What FSDP's collectives outlast the computing that they run beside."""

    forward_s: float = 0.0
    backward_s: float = 0.0

    def add(self, block: _Block, count: int, *, again: bool) -> None:
        gathered = block.gather_s if again else 0.0
        self.forward_s += count * max(0.0, block.gather_s - sum(block.forward))
        self.backward_s += count * max(0.0, gathered + block.scatter_s - sum(block.backward))


def _whole(job: Job, timer: _Timer, stages: list[_Stage], loops: int, *, exact: bool) -> StepTime:
    pp = job.mesh.pp
    schedule = job.parallelism.pp_schedule
    owner = stage_owner(schedule, pp, loops) if pp > 1 else (0,)
    ranks = [[s for s, rank in zip(stages, owner, strict=True) if rank == r] for r in range(pp)]
    sums = [_rank_sum(own) for own in ranks]
    busiest = max(range(pp), key=lambda r: sum(sums[r]))
    busy = _Parts().plus(sums[busiest], job.micro_batches)
    bubble = _bubble_s(job, timer, stages, sum(busy), loops, exact=exact) if pp > 1 else 0.0
    once = max(_once_s(job, own) for own in ranks)
    owned = max(sum(stage.weights for stage in own) for own in ranks)
    optimizer_bytes = (job.optimizer_bytes + _NORM_BYTES) * owned
    return StepTime(
        matmul_s=busy.matmul,
        attention_s=busy.attention,
        memory_bound_s=busy.memory,
        recompute_s=busy.again,
        tp_s=busy.tp,
        cp_s=busy.cp,
        ep_s=busy.ep,
        fsdp_s=busy.fsdp + once,
        dp_s=_replicas_s(job, timer, ranks[busiest]),
        bubble_s=bubble,
        optimizer_s=optimizer_bytes / timer.rates.memory_bytes_per_s,
    )


def _rank_sum(own: list[_Stage]) -> _Parts:
    total = _Parts()
    for stage in own:
        total = total.plus(stage.forward).plus(stage.backward)
    return total


def _once_s(job: Job, own: list[_Stage]) -> float:
    """What FSDP's collectives cost a pipeline's rank once a step.

    A rank with several stages gathers the next and reduces the last one's gradients while it runs
    a round of micro-batches through another, so only the first gather and the last reduction, of
    one stage, are exposed, and of the others what outlasts a round.
    """
    if len(own) == 1 or job.mesh.pp == 1:
        return sum(stage.once_s for stage in own)
    a_round = min(job.mesh.pp, job.micro_batches)
    exposed = own[0].gather_s + own[0].scatter_s
    for stage in own[1:]:
        exposed += max(0.0, stage.gather_s - a_round * sum(stage.forward))
        exposed += max(0.0, stage.scatter_s - a_round * sum(stage.backward))
    return exposed


def _replicas_s(job: Job, timer: _Timer, own: list[_Stage]) -> float:
    """What adding gradients over the replicas outlasts the last backward pass beside it."""
    if job.mesh.dp_replicate == 1:
        return 0.0
    whole = sum(stage.replicated_bytes for stage in own)
    took = timer.collective("all_reduce", job.replica_group, whole)
    blocks = max(1, job.model.layers // job.mesh.pp)
    last = took / blocks  # the last block's have nothing left to hide behind
    beside = sum(sum(stage.backward) for stage in own)
    return last + max(0.0, took - last - beside)


def _bubble_s(
    job: Job, timer: _Timer, stages: list[_Stage], busy_s: float, loops: int, *, exact: bool
) -> float:
    pp, schedule = job.mesh.pp, job.parallelism.pp_schedule
    whole = float(job.tokens * job.model.dim * job.element_bytes) / job.mesh.tp
    transfer = timer.collective("p2p", job.pipeline_group, whole)
    if not exact:
        return busy_s * ideal_bubble(schedule, pp, loops, job.micro_batches) + 2 * (pp - 1) * (
            transfer
        )
    times = [
        StageTime(sum(s.forward), sum(s.backward) - s.weight_gradients_s, s.weight_gradients_s)
        for s in stages
    ]
    played = pipeline_time(schedule, pp, loops, job.micro_batches, times, transfer)
    return max(0.0, played.makespan_s - busy_s)


def ideal_bubble(schedule: str, pp: int, loops: int, micro_batches: int) -> float:
    """Idle over busy time of equal stages whose backward pass takes twice the forward pass.

    (p-1)/(v·m) (arXiv 2104.04473); with the weights' half of the backward pass put into the gaps a
    third of it (ZB-H1, 2401.10241), and about none for ZBV.
    """
    ratio = (pp - 1) / (loops * micro_batches)
    if schedule == "interleaved_zero_bubble":
        return ratio / 3
    return 0.0 if schedule == "zbv_zero_bubble" else ratio


def _missing_link(group: Group, links: Links) -> str:
    key = "scale_up_bytes_per_s"
    if group.level(links.domain) == "scale_out" and links.scale_out_bytes_per_s is None:
        key = "scale_out_bytes_per_s"
    return f"the accelerator has no {key}"
