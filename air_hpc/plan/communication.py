"""Bytes that one rank moves in one step: by mesh axis, collective and how far they go.

Convention: `tensor_bytes` is the payload of one call as the collective's whole tensor (gathered, to
be scattered, to be reduced, sent), on this rank, which is what a counter of tensors finds.
`sent_bytes` is what this rank then sends in a ring: (n - 1)/n of the tensor for an all-gather, a
reduce-scatter or an all-to-all, twice that for an all-reduce, the tensor itself for a send
(Thakur et al., doi 10.1177/1094342005051521).

What is counted, with X = tokens · dim · c (tokens of a micro-batch on the rank, c bytes an element
in compute precision):

- tp, with sequence parallelism: a block gathers X before attention and before its feed-forward and
  reduce-scatters X after each; the backward pass does the same mirrored. So do the embedding (a
  reduce-scatter) and the head (a gather). Gradients of norms and routers are summed.
  `loss_parallel` reduces three numbers a token; without it the logits are gathered.
- dp_shard (over dp_shard × cp): each FSDP unit (a block, the ends) is gathered in compute precision
  and its gradient reduce-scattered in float32: for each micro-batch, blocks once more in the
  backward pass with `reshard_after_forward`; in a pipeline once a step. Experts go over the ranks
  that ep leaves.
- dp_replicate: an all-reduce of the float32 gradients a rank keeps, once a step.
- cp: Ulysses sends q, k, v and the output through all-to-alls, forward and backward; ring passes
  keys and values on cp - 1 times, and in the backward pass their float32 gradients cp times.
- ep: each token's hidden state to its experts and back, forward and backward; as even as routing.
- pp: activations to the next stage, their gradients back; a tied head's gradient once a step.

`full` recompute repeats a block's forward collectives, but for the last reduce-scatter, whose
result nothing needs (torch's checkpoint stops early); `ops` repeats the gathers alone. Left out are
reductions of single numbers: of the loss and the gradient norm.

How far: ranks lie tp innermost, then cp, dp_shard, dp_replicate, pp (`plan.types.MESH_AXES`), so a
group's members follow one another at the product of the degrees inside.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from air_hpc.config.spec import RunSpec
from air_hpc.plan.blocks import Parameters
from air_hpc.plan.flops import embedding_parameters
from air_hpc.plan.layout import (
    COMPUTE_BYTES,
    Stage,
    micro_batches,
    own,
    stages_by_rank,
    tokens_of,
    whole_block,
    whole_ends,
    whole_stage,
    wrapper,
)
from air_hpc.plan.types import Mesh

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
Axis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"]
Phase = Literal["forward", "backward", "step"]
Level = Literal["node", "network"]

_SENT = {
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "all_reduce": 2,
}


@dataclass(frozen=True)
class Traffic:
    """Like calls of one collective in one step of one rank.

    `phase` says what they run beside: `forward` or `backward` of each micro-batch, or the end of
    the `step`. `ranks` is the size of the group, `ranks_per_node` how many of it share a node.
    """

    axis: Axis
    what: str
    collective: Collective
    phase: Phase
    calls: int
    tensor_bytes: int
    ranks: int
    ranks_per_node: int

    @property
    def payload_bytes(self) -> int:
        """Of all calls, as tensors."""
        return self.calls * self.tensor_bytes

    @property
    def sent_bytes(self) -> float:
        """What this rank sends in a ring."""
        if self.collective == "send":
            return float(self.payload_bytes)
        return _SENT[self.collective] * self.payload_bytes * (self.ranks - 1) / self.ranks

    @property
    def level(self) -> Level:
        """`node` where the whole group lies on one node."""
        return "node" if self.ranks_per_node >= self.ranks else "network"


@dataclass(frozen=True)
class _Place:
    """What the parts below ask for again and again."""

    spec: RunSpec
    mesh: Mesh
    stages: tuple[Stage, ...]
    tokens: int
    micro_batches: int

    @property
    def c(self) -> int:
        return COMPUTE_BYTES[self.spec.train.precision]

    @property
    def layers(self) -> int:
        return sum(len(stage.layers) for stage in self.stages)

    def group(self, axis: Axis) -> tuple[int, int]:
        """The size of an axis' group, and how many of it share a node."""
        mesh = self.mesh
        sizes = {
            "tp": (mesh.tp, 1),
            "cp": (mesh.cp, mesh.tp),
            "ep": (mesh.ep, mesh.tp),
            "dp_shard": (mesh.shard_size, mesh.tp),
            "dp_replicate": (mesh.dp_replicate, mesh.tp * mesh.shard_size),
            "pp": (mesh.pp, mesh.tp * mesh.shard_size * mesh.dp_replicate),
        }
        size, stride = sizes[axis]
        return size, _in_node(self.spec, size, stride)


def _in_node(spec: RunSpec, size: int, stride: int) -> int:
    return max(1, min(size, spec.launch.devices_per_node // stride))


def traffic(
    spec: RunSpec, mesh: Mesh, micro_batch_size: int, pp_rank: int = 0
) -> tuple[Traffic, ...]:
    """What a rank of pipeline rank `pp_rank` moves in one step."""
    place = _Place(
        spec,
        mesh,
        stages_by_rank(spec, mesh)[pp_rank],
        tokens_of(spec, mesh, micro_batch_size),
        micro_batches(spec, mesh, micro_batch_size),
    )
    parts = (_tensor(place), _context(place), _experts(place), _data(place), _pipeline(place))
    return tuple(item for part in parts for item in part if item.calls and item.tensor_bytes)


def _tensor(place: _Place) -> Iterator[Traffic]:
    ranks, near = place.group("tp")
    if ranks == 1:
        return
    model, n, layers = place.spec.model, place.micro_batches, place.layers
    x = place.tokens * model.dim * place.c

    def item(
        what: str, collective: Collective, phase: Phase, calls: int, tensor_bytes: int
    ) -> Traffic:
        return Traffic("tp", what, collective, phase, calls * n, tensor_bytes, ranks, near)

    yield item("blocks", "all_gather", "forward", 2 * layers, x)
    yield item("blocks", "reduce_scatter", "forward", 2 * layers, x)
    yield item("blocks", "all_gather", "backward", 2 * layers, x)
    yield item("blocks", "reduce_scatter", "backward", 2 * layers, x)
    recompute = place.spec.parallelism.recompute
    if recompute != "none":
        yield item("blocks again", "all_gather", "backward", 2 * layers, x)
    if recompute == "full":
        yield item("blocks again", "reduce_scatter", "backward", layers, x)
    yield from _replicated(place, ranks, near)
    if any(stage.first for stage in place.stages):
        yield item("embedding", "reduce_scatter", "forward", 1, x)
        yield item("embedding", "all_gather", "backward", 1, x)
    if any(stage.last for stage in place.stages):
        yield item("head", "all_gather", "forward", 1, x)
        yield item("head", "reduce_scatter", "backward", 1, x)
        if place.spec.parallelism.loss_parallel:
            yield item("loss", "all_reduce", "forward", 3, 4 * place.tokens)
        else:
            logits = place.tokens * model.vocab_size * place.c
            yield item("logits", "all_gather", "forward", 1, logits)


def _replicated(place: _Place, ranks: int, near: int) -> Iterator[Traffic]:
    """Gradients of norms and routers, one term on each rank: summed once for all micro-batches of a
    pipeline, then in float32, else for each."""
    model, n = place.spec.model, place.micro_batches
    norms = (4 if model.post_norms else 2) * place.layers
    norms += sum(stage.last for stage in place.stages)
    routers = sum(model.is_moe(layer) for stage in place.stages for layer in stage.layers)
    experts = 0 if model.moe is None else model.moe.experts
    once = place.mesh.pp > 1
    size = model.dim * (4 if once and n > 1 else place.c)
    for what, count, width in (("norms", norms, 1), ("routers", routers, experts)):
        calls = count if once else count * n
        yield Traffic("tp", what, "all_reduce", "backward", calls, size * width, ranks, near)


def _context(place: _Place) -> Iterator[Traffic]:
    ranks, near = place.group("cp")
    if ranks == 1:
        return
    model, mesh = place.spec.model, place.mesh
    recompute = place.spec.parallelism.recompute
    layers = place.layers * place.micro_batches
    token = place.tokens * model.head_width * place.c
    q, kv_heads = token * model.heads // mesh.tp, model.kv_heads // mesh.tp
    kv = 2 * token * kv_heads

    def item(what: str, phase: Phase, calls: int, size: int) -> Traffic:
        ulysses = place.spec.parallelism.cp_method == "ulysses"
        collective: Collective = "all_to_all" if ulysses else "send"
        return Traffic("cp", what, collective, phase, calls, size, ranks, near)

    if place.spec.parallelism.cp_method == "ulysses":
        # Keys and values are repeated until the ranks divide them (`parallel.ulysses`).
        qkv = q + 2 * token * math.lcm(kv_heads, ranks)
        again = 2 if recompute == "full" else 1
        for what, size in (("q, k, v", qkv), ("out", q)):
            yield item(what, "forward", layers, size)
            yield item(what, "backward", again * layers, size)
        return
    hops = layers * (ranks - 1)
    yield item("k, v", "forward", hops, kv)
    yield item("k, v", "backward", hops * (2 if recompute == "full" else 1), kv)
    yield item("dk, dv", "backward", layers * ranks, kv // place.c * 4)


def _experts(place: _Place) -> Iterator[Traffic]:
    ranks, near = place.group("ep")
    model = place.spec.model
    if ranks == 1 or model.moe is None:
        return
    layers = sum(model.is_moe(layer) for stage in place.stages for layer in stage.layers)
    sent = place.tokens * model.moe.active_experts * model.dim * place.c
    calls = 2 * layers * place.micro_batches
    again = 1 if place.spec.parallelism.recompute == "full" else 0
    yield Traffic("ep", "tokens", "all_to_all", "forward", calls, sent, ranks, near)
    yield Traffic("ep", "tokens", "all_to_all", "backward", (1 + again) * calls, sent, ranks, near)


def _data(place: _Place) -> Iterator[Traffic]:
    mesh, kind = place.mesh, wrapper(place.spec, place.mesh)
    model = place.spec.model
    if kind == "ddp":
        total = sum(whole_stage(model, stage, mesh).total for stage in place.stages)
        size, near = place.group("dp_replicate")
        yield Traffic(
            "dp_replicate", "gradients", "all_reduce", "backward", 1, 4 * total, size, near
        )
    if kind != "fsdp":
        return
    for stage in place.stages:
        blocks = Counter(whole_block(model, layer, mesh) for layer in stage.layers)
        for block, count in blocks.items():
            yield from _unit(place, block, count, "blocks")
        yield from _unit(place, whole_ends(model, stage, mesh), 1, "ends", root=True)


def _unit(
    place: _Place, unit: Parameters, units: int, what: str, *, root: bool = False
) -> Iterator[Traffic]:
    """So many equal units of FSDP; the experts of one are a unit of their own."""
    mesh, options = place.mesh, place.spec.parallelism
    size, near = place.group("dp_shard")
    dense = unit.matrices + unit.replicated
    expert_size = max(1, mesh.shard_size // mesh.ep)
    expert_near = _in_node(place.spec, expert_size, mesh.tp * mesh.ep)
    phase: Phase = "forward" if mesh.pp == 1 else "step"
    back: Phase = "backward" if mesh.pp == 1 else "step"
    calls = units * (place.micro_batches if mesh.pp == 1 else 1)
    again = options.reshard_after_forward and not root and mesh.pp == 1
    for count, ranks, on_node in ((dense, size, near), (unit.experts, expert_size, expert_near)):
        if ranks == 1:
            continue
        gathered = place.c * count
        yield Traffic("dp_shard", what, "all_gather", phase, calls, gathered, ranks, on_node)
        if again:
            yield Traffic("dp_shard", what, "all_gather", back, calls, gathered, ranks, on_node)
        yield Traffic("dp_shard", what, "reduce_scatter", back, calls, 4 * count, ranks, on_node)
    if mesh.dp_replicate > 1:
        size, near = place.group("dp_replicate")
        kept = 4 * own(unit, mesh)
        yield Traffic("dp_replicate", what, "all_reduce", "backward", units, kept, size, near)


def _pipeline(place: _Place) -> Iterator[Traffic]:
    mesh, model = place.mesh, place.spec.model
    if mesh.pp == 1:
        return
    _, near = place.group("pp")
    mine = {stage.number for stage in place.stages}
    x = place.tokens // mesh.tp * model.dim * place.c
    n = place.micro_batches
    onward = sum(not stage.last and stage.number + 1 not in mine for stage in place.stages)
    back = sum(not stage.first and stage.number - 1 not in mine for stage in place.stages)
    yield Traffic("pp", "activations", "send", "forward", n * onward, x, 2, min(2, near))
    yield Traffic("pp", "their gradients", "send", "backward", n * back, x, 2, min(2, near))
    ends = [stage for stage in place.stages if stage.first or stage.last]
    if model.tied_head and ends and not (ends[0].first and ends[-1].last):
        embedding = -(-embedding_parameters(model) // (mesh.tp * mesh.shard_size))
        yield Traffic("pp", "tied head", "all_reduce", "step", 1, 4 * embedding, 2, min(2, near))
