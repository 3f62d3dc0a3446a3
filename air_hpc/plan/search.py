"""parallelism=auto: every way to lay a run over its devices, the fastest that fits first.

Promises: the keys that the user gave stay as they are; what is chosen is valid, fits into the
device's memory by the plan's estimate, and no candidate that was tried and fits is predicted to be
more than 1 % faster. The winner comes with the next two and with what the same keys would have been
without a search. Pure; 16,384 devices take about a second on one core.

How it works:

    meshes       pp, cp, tp, ep over divisors that the model's shapes allow; tp inside a domain of
                 fast links; dp_shard over the divisors of the rest, dp_replicate what is left
    micro-batch  divisors of a rank's part of the batch, as far as `AUTO_MICRO_BATCH_MAX`
    schedule     1f1b, interleaved 1f1b, and the zero-bubble ones where nothing is compiled
    recompute    none, ops, full: the first of them that fits, since each is faster than the next
    sharding     weights dropped after the forward pass or kept, the faster one that fits

They are looked at best first: a layout waits under a bound (the work that no layout saves, with its
bubble) until its time is worth predicting, and under its time until its memory is worth estimating.
What is left when the best have been found is slower. Those are timed again with their pipeline
simulated, which the bound and the first prediction take as ideal. A device without figures has no
times: then the order is less idle and repeated compute first (bubble and recompute), then fewer
bytes over the links.

What may go wrong: it is as good as the two estimates. gpipe and looped_bfs hold every micro-batch
and are never faster than 1f1b, so they are not tried.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import fields, replace
from heapq import heapify, heappop, heappush
from typing import Final, Literal, NamedTuple

from air_hpc.config.spec import ParallelismSpec, PipelineSchedule, RunSpec
from air_hpc.errors import BadInput, Problem
from air_hpc.hardware.network import links_of
from air_hpc.plan.candidate import Candidate, Found, by_time, order
from air_hpc.plan.communication import traffic
from air_hpc.plan.degrees import context_degree, pipeline_degree, tensor_degree
from air_hpc.plan.flops import count_parameters, model_flops
from air_hpc.plan.limits import AUTO_MICRO_BATCH_MAX
from air_hpc.plan.memory import memory_per_rank
from air_hpc.plan.mesh import resolve_mesh
from air_hpc.plan.rates import Rates, rates_of
from air_hpc.plan.schedule import SINGLE_STAGE, micro_batches_that_work, stages_per_rank
from air_hpc.plan.step_time import StepTime, ideal_bubble, job_time
from air_hpc.plan.types import Mesh
from air_hpc.plan.work import Job, job_of

AUTO: Final = "auto"
"""The name of conf/parallelism/auto.yaml, which asks for the search."""
FINALISTS = 6
Recompute = Literal["none", "full", "ops", "budget"]
_REPEATED: dict[Recompute, float] = {"none": 0.0, "ops": 1 / 6, "budget": 1 / 6, "full": 1 / 3}
"""Of a step's matrix products: what a policy computes again."""
_CP_MOST = 16
"""As many ranks as Llama 3 cut its longest sequences over (arXiv 2407.21783, table 4)."""
_CUTS = (tensor_degree, context_degree)
_LOOPED: tuple[tuple[PipelineSchedule, int], ...] = (
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
)
_SPLIT: tuple[tuple[PipelineSchedule, int], ...] = (
    ("interleaved_zero_bubble", 2),
    ("zbv_zero_bubble", 2),
)


def given_keys(spec: RunSpec, overrides: Collection[str] = ()) -> frozenset[str]:
    """The keys that the search must leave alone: those on the command line, and those whose value
    is not parallelism=auto's own (from a user's file)."""
    plain = ParallelismSpec(name=AUTO, dp_shard=AUTO, dp_replicate=AUTO)
    own = {
        f"parallelism.{field.name}"
        for field in fields(ParallelismSpec)
        if getattr(spec.parallelism, field.name) != getattr(plain, field.name)
    }
    if spec.train.micro_batch_size != "auto":
        own.add("train.micro_batch_size")
    said = {word.lstrip("+~").partition("=")[0] for word in overrides}
    return frozenset(own | said) - {"parallelism.name"}


def resolve_auto(
    spec: RunSpec, overrides: Collection[str] = (), *, measured_flops_per_s: float | None = None
) -> tuple[RunSpec, Found | None, list[Problem]]:
    """A spec with parallelism=auto decided; any other as it is.

    A problem, naming what is the least that would be needed, where nothing fits or nothing is
    valid.
    """
    if spec.parallelism.name != AUTO:
        return spec, None, []
    found = search(spec, given_keys(spec, overrides), measured_flops_per_s=measured_flops_per_s)
    if found.best is None:
        return spec, found, [_nothing(spec, found)]
    return decided(spec, found.best), found, []


def decided(spec: RunSpec, candidate: Candidate) -> RunSpec:
    """The spec that a candidate is."""
    return _with(spec, candidate.parallelism, candidate.micro_batch_size)


def _with(spec: RunSpec, parallelism: ParallelismSpec, micro_batch_size: int) -> RunSpec:
    train = replace(spec.train, micro_batch_size=micro_batch_size)
    return replace(spec, parallelism=parallelism, train=train)


def search(
    spec: RunSpec, given: frozenset[str] = frozenset(), *, measured_flops_per_s: float | None = None
) -> Found:
    """Every layout of a spec, the keys of `given` as they are."""
    return _Search(spec, given, measured_flops_per_s).run()


class _Layout(NamedTuple):
    """A mesh, a micro-batch and a schedule; `variants` of recompute and sharding, the one that
    computes least first."""

    mesh: Mesh
    micro_batch_size: int
    micro_batches: int
    schedule: PipelineSchedule
    loops: int
    bubble: float
    variants: tuple[tuple[Recompute, bool], ...]


class _Entry(NamedTuple):
    """A layout in the order of what is known of it: a bound, then its key as a candidate."""

    key: tuple[float, ...]
    number: int
    layout: _Layout
    variant: int
    candidate: Candidate | None


class _Search:
    def __init__(self, spec: RunSpec, given: frozenset[str], measured: float | None) -> None:
        self.spec, self.given = spec, given
        made = rates_of(
            spec.accelerator,
            spec.launch.devices_per_node,
            spec.train.precision,
            measured_flops_per_s=measured,
        )
        self.rates = made if isinstance(made, Rates) else None
        self.began_with_rates = self.rates is not None
        self.reason = "" if isinstance(made, Rates) else made.reason
        self.limit = spec.accelerator.memory_bytes
        self.parameters = count_parameters(spec.model).parameters
        self.tried = self.too_big = 0
        self.least: int | None = None
        self._known: dict[tuple[int, PipelineSchedule, int, Recompute], bool] = {}

    def run(self) -> Found:
        ranked = self._best_first()
        if self.rates is None and self.began_with_rates:  # a link that some layout needs is unknown
            self.tried, self.too_big, self.least = 0, 0, None
            ranked = self._best_first()
        if self.rates is not None:
            ranked = by_time([self._timed_exactly(one) for one in ranked])
        return Found(
            ranked=tuple(ranked[:3]),
            asked=self._asked(),
            tried=self.tried,
            too_big=self.too_big,
            least_bytes=self.least,
            by_time=self.rates is not None,
            reason=self.reason,
        )

    def _best_first(self) -> list[Candidate]:
        """The best that fit. Of each layout the variant that computes least comes first, and its
        successor only where it does not fit, so memory is asked about few of them."""
        layouts = [layout for mesh in self._meshes() for layout in self._layouts(mesh)]
        self.tried += sum(len(layout.variants) for layout in layouts)
        floor_s = self._floor_s()
        heap = [
            _Entry((floor_s * (1 + layout.bubble),), number, layout, 0, None)
            for number, layout in enumerate(layouts)
        ]
        heapify(heap)
        found: list[Candidate] = []
        while heap and len(found) < FINALISTS:
            entry = heappop(heap)
            if entry.candidate is None:
                timed = self.rates is not None
                candidate = self._timed(entry.layout, entry.variant)
                if timed and self.rates is None:
                    return []
                heappush(heap, entry._replace(key=order(candidate), candidate=candidate))
                continue
            sized = self._sized(entry.candidate)
            if sized is not None:
                found.append(sized)
            elif entry.variant + 1 < len(entry.layout.variants):
                following = entry.variant + 1
                heappush(heap, entry._replace(variant=following, candidate=None))
        return found

    def _meshes(self) -> Iterator[Mesh]:
        """Valid meshes, those of fewer parts first."""
        spec, asked = self.spec, self.spec.parallelism
        world = spec.launch.nodes * spec.launch.devices_per_node
        domain = links_of(spec.accelerator, spec.launch.devices_per_node).domain
        found = []
        for tp in self._degrees("tp", asked.tp, world, self._tp_most(domain)):
            for pp in self._degrees("pp", asked.pp, world // tp, spec.model.layers):
                for cp in self._degrees("cp", asked.cp, world // (tp * pp), _CP_MOST):
                    if self._suits(cp, tp):
                        rest = world // (tp * pp * cp)
                        found += list(self._data_parallel(pp, cp, tp, rest, domain))
        return iter(sorted(found, key=lambda m: (m.pp * m.cp * m.tp, m.pp, m.cp)))

    def _degrees(self, axis: str, asked: int, whole: int, most: int) -> list[int]:
        if f"parallelism.{axis}" in self.given:
            return [asked] if whole % asked == 0 else []
        return [n for n in range(1, min(whole, most) + 1) if whole % n == 0]

    def _tp_most(self, domain: int) -> int:
        return min(domain, self.spec.launch.devices_per_node, self.spec.model.kv_heads)

    def _suits(self, cp: int, tp: int) -> bool:
        """Whether the model can be cut so: by the checks that hold for what a user writes."""
        cut = replace(self.spec.parallelism, cp=cp, tp=tp)
        spec = replace(self.spec, parallelism=cut)
        return not any(True for check in _CUTS for _ in check(spec))

    def _data_parallel(self, pp: int, cp: int, tp: int, rest: int, domain: int) -> Iterator[Mesh]:
        asked, batch = self.spec.parallelism, self.spec.train.global_batch_size
        if batch % rest:
            return
        for shard in self._shards(rest, cp * tp, domain):
            replicate = rest // shard
            fixed = asked.dp_replicate
            given = "parallelism.dp_replicate" in self.given and isinstance(fixed, int)
            if given and fixed != replicate:
                continue
            for ep in self._expert_degrees(shard * cp):
                yield Mesh(pp, replicate, shard, cp, tp, ep)

    def _shards(self, rest: int, inner: int, domain: int) -> list[int]:
        asked = self.spec.parallelism.dp_shard
        if isinstance(asked, int) and "parallelism.dp_shard" in self.given:
            return [asked] if rest % asked == 0 else []
        inside = max(1, domain // inner)
        wanted = {1, rest}
        while inside <= rest:
            wanted.add(inside)
            inside *= 2
        return sorted(n for n in wanted if rest % n == 0)

    def _expert_degrees(self, room: int) -> list[int]:
        moe, asked = self.spec.model.moe, self.spec.parallelism.ep
        if "parallelism.ep" in self.given or moe is None:
            return [asked] if room % asked == 0 else []
        return [n for n in range(1, moe.experts + 1) if moe.experts % n == 0 and room % n == 0]

    def _layouts(self, mesh: Mesh) -> Iterator[_Layout]:
        if self._state_bytes(mesh) > (self.limit or math.inf):
            self.tried += 1
            self._too_big(int(self._state_bytes(mesh)))
            return
        rank_batch = self.spec.train.global_batch_size // mesh.data_parallel_size
        variants = tuple(
            (policy, reshard) for policy in self._policies() for reshard in self._reshards(mesh)
        )
        for micro in self._micro_batches(rank_batch):
            count = rank_batch // micro
            for schedule, loops in self._schedules(mesh, count):
                bubble = ideal_bubble(schedule, mesh.pp, loops, count) if mesh.pp > 1 else 0.0
                possible = tuple(
                    variant
                    for variant in variants
                    if self._runs(mesh.pp, schedule, loops, variant[0])
                )
                if possible:
                    yield _Layout(mesh, micro, count, schedule, loops, bubble, possible)

    def _state_bytes(self, mesh: Mesh) -> float:
        """Weights, gradients and the optimizer's state alone."""
        experts = mesh.shard_size * mesh.tp * mesh.pp
        each = 16 if self.spec.optimizer.name == "adamw" else 8
        if self.spec.parallelism.cpu_offload:
            each = 0
        return each * self.parameters / experts

    def _micro_batches(self, rank_batch: int) -> list[int]:
        asked = self.spec.train.micro_batch_size
        if isinstance(asked, int):
            return [asked] if rank_batch % asked == 0 else []
        most = min(rank_batch, AUTO_MICRO_BATCH_MAX)
        return [n for n in range(most, 0, -1) if rank_batch % n == 0]

    def _schedules(self, mesh: Mesh, count: int) -> list[tuple[PipelineSchedule, int]]:
        asked = self.spec.parallelism
        if mesh.pp == 1:
            return [(asked.pp_schedule, 1)]
        choices = list(_LOOPED)
        if not self.spec.train.compile:
            choices += _SPLIT
        if "parallelism.pp_schedule" in self.given:
            loops = {n for name, n in choices if name == asked.pp_schedule}
            loops |= {stages_per_rank(replace(asked, pp=mesh.pp))} if not loops else set()
            choices = [(asked.pp_schedule, n) for n in sorted(loops)]
        if asked.pp_stages_per_rank != "auto" and ("parallelism.pp_stages_per_rank" in self.given):
            choices = [(name, n) for name, n in choices if n == asked.pp_stages_per_rank]
        return [
            (name, loops)
            for name, loops in choices
            if self._runs(mesh.pp, name, loops, "none")
            and micro_batches_that_work(name, mesh.pp, loops, count) is None
        ]

    def _runs(self, pp: int, schedule: PipelineSchedule, loops: int, policy: Recompute) -> bool:
        """Whether a schedule takes so many stages, and the policy."""
        key = (pp, schedule, loops, policy)
        if key not in self._known:
            parts = replace(
                self.spec.parallelism,
                pp=pp,
                pp_schedule=schedule,
                pp_stages_per_rank=loops,
                recompute=policy,
            )
            spec = replace(self.spec, parallelism=parts)
            self._known[key] = not any(True for _ in pipeline_degree(spec))
        return self._known[key]

    def _policies(self) -> list[Recompute]:
        asked = self.spec.parallelism.recompute
        if "parallelism.recompute" in self.given:
            return [asked]
        return ["none", "ops", "full"]

    def _reshards(self, mesh: Mesh) -> list[bool]:
        asked = self.spec.parallelism.reshard_after_forward
        if "parallelism.reshard_after_forward" in self.given or mesh.shard_size == 1:
            return [asked]
        return [True] if mesh.pp > 1 else [False, True]

    def _parts(
        self, mesh: Mesh, schedule: PipelineSchedule, loops: int, policy: Recompute, reshard: bool
    ) -> ParallelismSpec:
        return replace(
            self.spec.parallelism,
            pp=mesh.pp,
            dp_replicate=mesh.dp_replicate,
            dp_shard=mesh.dp_shard,
            cp=mesh.cp,
            tp=mesh.tp,
            ep=mesh.ep,
            pp_schedule=schedule,
            pp_stages_per_rank="auto" if schedule in SINGLE_STAGE or mesh.pp == 1 else loops,
            recompute=policy,
            reshard_after_forward=reshard,
        )

    def _timed(self, layout: _Layout, variant: int) -> Candidate:
        mesh, micro = layout.mesh, layout.micro_batch_size
        policy, reshard = layout.variants[variant]
        parts = self._parts(mesh, layout.schedule, layout.loops, policy, reshard)
        spec = _with(self.spec, parts, micro)
        step = self._time(job_of(spec, mesh, micro), exact=False)
        idle = (mesh.pp - 1) / (layout.loops * layout.micro_batches) + _REPEATED[policy]
        if step is not None:
            return Candidate(parts, mesh, micro, 0, step, step.total_s, idle)
        sent = sum(item.sent_bytes for item in traffic(spec, mesh, micro))
        return Candidate(parts, mesh, micro, 0, None, None, idle, sent)

    def _sized(self, one: Candidate) -> Candidate | None:
        """With its memory; None where that is too much."""
        spec = decided(self.spec, one)
        memory = memory_per_rank(spec, one.mesh, one.micro_batch_size).total_bytes
        if self.limit is not None and memory > self.limit:
            self._too_big(memory)
            return None
        return replace(one, memory_bytes=memory)

    def _time(self, job: Job, *, exact: bool) -> StepTime | None:
        if self.rates is None:
            return None
        made = job_time(job, self.rates, exact=exact)
        if isinstance(made, StepTime):
            return made
        self.reason, self.rates = made.reason, None
        return None

    def _timed_exactly(self, one: Candidate) -> Candidate:
        if one.mesh.pp == 1:
            return one
        job = job_of(decided(self.spec, one), one.mesh, one.micro_batch_size)
        step = self._time(job, exact=True)
        return replace(one, step=step, step_s=None if step is None else step.total_s)

    def _floor_s(self) -> float:
        """What the matrix products take of a step at the least, on any mesh."""
        if self.rates is None:
            return 0.0
        spec = self.spec
        weights = model_flops(spec.model, spec.data.sequence_length).matmul
        tokens = spec.train.global_batch_size * spec.data.sequence_length
        world = spec.launch.nodes * spec.launch.devices_per_node
        fastest = max(self.rates.linear_flops_per_s, self.rates.matmul_flops_per_s)
        return tokens / world * weights / fastest

    def _too_big(self, memory: int) -> None:
        self.too_big += 1
        self.least = memory if self.least is None else min(self.least, memory)

    def _asked(self) -> Candidate | None:
        """What the user's keys come to when nothing is searched for."""
        mesh, _ = resolve_mesh(self.spec)
        if mesh is None or self.spec.train.global_batch_size % mesh.data_parallel_size:
            return None
        rank_batch = self.spec.train.global_batch_size // mesh.data_parallel_size
        for micro in self._micro_batches(rank_batch):
            count, parts = rank_batch // micro, self.spec.parallelism
            loops = stages_per_rank(replace(parts, pp=mesh.pp))
            schedule = parts.pp_schedule
            if mesh.pp > 1 and micro_batches_that_work(schedule, mesh.pp, loops, count):
                continue
            try:
                memory = memory_per_rank(self.spec, mesh, micro).total_bytes
                step = self._time(job_of(self.spec, mesh, micro), exact=True)
            except BadInput:
                return None
            if micro == 1 or self.limit is None or memory <= self.limit:
                idle = (mesh.pp - 1) / (loops * count) + _REPEATED[parts.recompute]
                step_s = None if step is None else step.total_s
                return Candidate(parts, mesh, micro, memory, step, step_s, idle)
        return None


def _nothing(spec: RunSpec, found: Found) -> Problem:
    if not found.tried:
        message = (
            f"no mesh of {spec.launch.nodes * spec.launch.devices_per_node} devices is valid"
            f" with the keys that are given and train.global_batch_size"
            f" {spec.train.global_batch_size}"
        )
        hint = "Give fewer keys, or a batch that more degrees divide"
        return Problem("parallelism", AUTO, message, hint=hint)
    least, has = found.least_bytes or 0, spec.accelerator.memory_bytes or 0
    message = (
        f"none of {found.tried} layouts fits: the smallest needs {least / 1e9:.0f} GB a rank,"
        f" accelerator={spec.accelerator.name} has {has / 1e9:.0f} GB"
    )
    return Problem("parallelism", AUTO, message, hint="Raise launch.nodes, or shorten the sequence")
