"""What one rank does for one micro-batch in one part of the model: the work that time is made of.

A `Job` says everything that matters for time. `block_work` counts, for one block and one pass, the
FLOPs of its matrix products, those of attention, the bytes that memory-bound operations move and
the collectives that stand in the way. Recomputed work is counted apart. No rate is known here.

    FLOPs            two a weight and token forward, four backward; attention's two products over
                     what the mask leaves, and five products of that size in a flash backward pass
                     (arXiv 2205.14135, 2307.08691)
    memory-bound     bytes an element of each operation, counted below, once as eager kernels that
                     each read and write, once as torch.compile fuses them
    collectives      sequence-parallel tp: an all-gather before and a reduce-scatter after each half
                     of a block, both ways (arXiv 2205.05198); ulysses: all-to-all of q, k, v and
                     the result (2309.14509); ring: k and v around, beside attention (2310.01889);
                     experts: all-to-all there and back
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from air_hpc.config.spec import ModelSpec, ParallelismSpec, RunSpec
from air_hpc.hardware.network import Collective, Group
from air_hpc.plan.blocks import block_parts
from air_hpc.plan.flops import attended_tokens, block_parameters, embedding_parameters
from air_hpc.plan.stages import cut_layers
from air_hpc.plan.types import Mesh

COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp8": 2}


@dataclass(frozen=True)
class Job:
    """A model on a mesh, as far as its time goes.

    `fp8` runs the blocks' linear layers in fp8. Two things that published runs do and this engine
    does not: `fp8_gathers` gathers weights and tp's activations in fp8 too, and `overlapped_tp`
    runs tp's collectives in pieces beside the matrix products.
    """

    model: ModelSpec
    mesh: Mesh
    parallelism: ParallelismSpec
    sequence_length: int
    micro_batch_size: int
    micro_batches: int
    precision: str = "bf16"
    compile: bool = False
    optimizer_bytes: int = 28
    fp8: bool = False
    fp8_gathers: bool = False
    overlapped_tp: bool = False

    @property
    def element_bytes(self) -> int:
        """Of an activation."""
        return COMPUTE_BYTES[self.precision]

    @property
    def tokens(self) -> int:
        """Of a micro-batch on a rank, before tp cuts them."""
        return self.micro_batch_size * self.sequence_length // self.mesh.cp

    @property
    def gathers_again(self) -> bool:
        """Whether FSDP gathers a block's weights anew for its backward pass; in a pipeline they
        stay gathered for the step."""
        return self.parallelism.reshard_after_forward and self.mesh.pp == 1

    @property
    def tp_group(self) -> Group:
        """Neighbours."""
        return Group(self.mesh.tp)

    @property
    def cp_group(self) -> Group:
        """Outside tp."""
        return Group(self.mesh.cp, self.mesh.tp)

    @property
    def shard_group(self) -> Group:
        """Over which weights are sharded: dp_shard and cp."""
        return Group(self.mesh.dp_shard * self.mesh.cp, self.mesh.tp)

    @property
    def expert_group(self) -> Group:
        """Over which tokens go to their experts."""
        return Group(self.mesh.ep, self.mesh.tp)

    @property
    def expert_shard_group(self) -> Group:
        """Over which the weights of experts are sharded."""
        whole = self.mesh.dp_shard * self.mesh.cp
        return Group(whole // self.mesh.ep, self.mesh.tp * self.mesh.ep)

    @property
    def replica_group(self) -> Group:
        """Over which gradients are added up: dp_replicate."""
        inner = self.mesh.dp_shard * self.mesh.cp * self.mesh.tp
        return Group(self.mesh.dp_replicate, inner)

    @property
    def pipeline_group(self) -> Group:
        """Two neighbouring stages."""
        return Group(2 if self.mesh.pp > 1 else 1, self.mesh.world_size // self.mesh.pp)


def job_of(spec: RunSpec, mesh: Mesh, micro_batch_size: int) -> Job:
    """The job that a spec and its resolved mesh describe."""
    rank_batch = spec.train.global_batch_size // mesh.data_parallel_size
    return Job(
        model=spec.model,
        mesh=mesh,
        parallelism=spec.parallelism,
        sequence_length=spec.data.sequence_length,
        micro_batch_size=micro_batch_size,
        micro_batches=max(1, rank_batch // micro_batch_size),
        precision=spec.train.precision,
        fp8=spec.train.precision == "fp8",
        compile=spec.train.compile,
        optimizer_bytes=28 if spec.optimizer.name == "adamw" else 20,
    )


@dataclass(frozen=True)
class Transfer:
    """`count` collectives of one kind, each of `whole_bytes`. `name` is the dimension's."""

    name: str
    collective: Collective
    group: Group
    whole_bytes: float
    count: float = 1.0


@dataclass(frozen=True)
class Pass:
    """A forward or a backward pass: FLOPs, bytes and what it waits for. `linear_bytes` are those
    that the linear layers read and write: with few tokens they, not the FLOPs, take the time."""

    linear_flops: float = 0.0
    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    memory_bytes: float = 0.0
    transfers: tuple[Transfer, ...] = ()
    linear_bytes: float = 0.0


@dataclass(frozen=True)
class BlockWork:
    """A block's passes; `again` is what the backward pass computes a second time."""

    forward: Pass
    backward: Pass
    again: Pass
    weights: int = 0
    """Parameters of a tp rank that FSDP gathers for it, experts apart."""
    expert_weights: int = 0


class Kinds(NamedTuple):
    """How many blocks of each kind (has experts, window) a stage has, and whether it has ends."""

    blocks: tuple[tuple[bool, int | None, int], ...]
    first: bool
    last: bool


def kinds_of(model: ModelSpec, stages: Sequence[Sequence[int]]) -> tuple[Kinds, ...]:
    """The kinds of each stage's layers."""
    found = []
    for number, layers in enumerate(stages):
        counted = Counter((model.is_moe(layer), model.window(layer)) for layer in layers)
        blocks = tuple((moe, window, count) for (moe, window), count in counted.items())
        found.append(Kinds(blocks, number == 0, number == len(stages) - 1))
    return tuple(found)


@lru_cache(maxsize=512)
def cut_kinds(model: ModelSpec, sequence_length: int, stages: int) -> tuple[Kinds, ...]:
    """The same of a model that is cut into so many stages by FLOPs."""
    return kinds_of(model, cut_layers(model, sequence_length, stages))


def block_work(job: Job, moe: bool, window: int | None) -> BlockWork:
    """The work of one block of a kind on one rank for one micro-batch."""
    model, mesh, tokens = job.model, job.mesh, job.tokens
    layer = next(n for n in range(model.layers) if model.is_moe(n) == moe)
    parts = block_parts(model, layer)
    active = parts.matrices
    ffn = model.ffn_dim
    if moe and model.moe is not None:
        width = model.moe.expert_ffn_dim or model.ffn_dim
        ffn = width * (model.moe.active_experts + model.moe.shared_experts)
        active += parts.experts // model.moe.experts * model.moe.active_experts
        active += model.dim * model.moe.experts
    linear = 2.0 * active * tokens / mesh.tp
    seen = attended_tokens(job.sequence_length, window)
    attention = 4.0 * model.heads * model.head_width * seen * tokens / mesh.tp
    forward = _passing(job, linear, attention, ffn, moe=moe, backward=False)
    backward = _passing(job, 2 * linear, 2.5 * attention, ffn, moe=moe, backward=True)
    return BlockWork(
        forward,
        backward,
        _again(job, forward, layer),
        weights=parts.matrices // mesh.tp + parts.replicated,
        expert_weights=parts.experts // (mesh.tp * mesh.ep),
    )


def _passing(
    job: Job, linear: float, attention: float, ffn: int, *, moe: bool, backward: bool
) -> Pass:
    context = _context(job, backward=backward)
    transfers = (*_tensor(job), *context, *(_experts(job) if moe else ()))
    memory = _bytes(job, ffn, backward=backward)
    moved = _linear_bytes(job, linear / 2 if backward else linear, ffn)
    moved *= 2 if backward else 1
    return Pass(linear, 0.0, attention, memory, transfers, moved)


def _linear_bytes(job: Job, forward_flops: float, ffn: int) -> float:
    """Weights, inputs and outputs of a block's linear layers, once each; back, twice as much: each
    product becomes two of its size."""
    model, tp = job.model, job.mesh.tp
    weights = forward_flops / (2.0 * job.tokens)
    inside = (2 * model.heads + 2 * model.kv_heads) * model.head_width + 3 * ffn
    return job.element_bytes * (weights + job.tokens * (4 * model.dim + inside / tp))


def _again(job: Job, forward: Pass, layer: int) -> Pass:
    """What is computed a second time, by the policy (config.spec.ParallelismSpec).

    A whole block again has its collectives again, but for the last reduce-scatter, whose result
    nothing needs. By operation, attention and what came over the network is kept, so of the
    collectives only tp's gathers come again.
    """
    policy = job.parallelism.recompute
    if policy == "none":
        return Pass()
    if policy == "ops":
        weights = repeated_products(job.model, layer)
        linear = 2.0 * weights * job.tokens / job.mesh.tp
        gathers = [t for t in forward.transfers if t.name == "tp"]
        gathers = [t for t in gathers if t.collective == "all_gather"]
        moved = forward.linear_bytes * linear / forward.linear_flops
        return Pass(linear, 0.0, 0.0, forward.memory_bytes, tuple(gathers), moved)
    share = 1.0 if policy == "full" else 1 - job.parallelism.recompute_budget
    return Pass(
        share * forward.linear_flops,
        0.0,
        share * forward.attention_flops,
        share * forward.memory_bytes,
        tuple(_repeated(t, share) for t in forward.transfers),
        share * forward.linear_bytes,
    )


def repeated_products(model: ModelSpec, layer: int) -> int:
    """The weights of the matrix products that `recompute=ops` computes again in a block: every
    second one in the order that they run, and a mixture's grouped ones."""
    parts = block_parameters(model, layer)
    q, kv = (
        model.dim * model.heads * model.head_width,
        model.dim * model.kv_heads * model.head_width,
    )
    products = [q, kv, kv, q]
    moe = model.moe
    if moe is not None and model.is_moe(layer):
        products.append(parts.router)
        products += 3 * [parts.shared_experts // 3] if moe.shared_experts else []
    else:
        products += 3 * [parts.feed_forward // 3]
    return sum(products[1::2]) + parts.active_experts


def _repeated(transfer: Transfer, share: float) -> Transfer:
    last = transfer.name == "tp" and transfer.collective == "reduce_scatter"
    return replace(transfer, count=share * (transfer.count - last))


def _tensor(job: Job) -> tuple[Transfer, ...]:
    if job.mesh.tp == 1:
        return ()
    whole = float(job.tokens * job.model.dim * job.element_bytes)
    gathered = whole / 2 if job.fp8_gathers else whole
    return (
        Transfer("tp", "all_gather", job.tp_group, gathered, 2),
        Transfer("tp", "reduce_scatter", job.tp_group, whole, 2),
    )


def _context(job: Job, *, backward: bool) -> tuple[Transfer, ...]:
    """As `plan.communication` has it: ulysses repeats keys and values until the ranks divide them,
    the ring's backward pass takes their gradients along, in float32."""
    cp, tp = job.mesh.cp, job.mesh.tp
    if cp == 1:
        return ()
    model = job.model
    head = float(job.tokens * model.head_width * job.element_bytes)
    q, kv = model.heads // tp, model.kv_heads // tp
    if job.parallelism.cp_method == "ring":
        passed = Transfer("cp", "p2p", job.cp_group, 2 * kv * head, cp - 1)
        gradients = Transfer("cp", "p2p", job.cp_group, 2 * kv * head * 4 / job.element_bytes, cp)
        return (passed, gradients) if backward else (passed,)
    there = (q + 2 * math.lcm(kv, cp)) * head
    return tuple(Transfer("cp", "all_to_all", job.cp_group, size) for size in (there, q * head))


def _experts(job: Job) -> tuple[Transfer, ...]:
    moe = job.model.moe
    if job.mesh.ep == 1 or moe is None:
        return ()
    whole = float(job.tokens * moe.active_experts * job.model.dim * job.element_bytes)
    return (Transfer("ep", "all_to_all", job.expert_group, whole, 2),)


def _bytes(job: Job, ffn: int, *, backward: bool) -> float:
    """Bytes that the memory-bound operations of one block move, for one micro-batch on one rank.

    Counted for elements of two bytes. Eager, an operation reads its inputs and writes its result:
    a norm goes through float32 (20 forward, 24 back), a rotation too (20, 20), the gate and its
    product (10, 18), the sums of the residual stream (6 each) and of the gradients of an input that
    several matrices read (6 each). Fused, each value is read and written once: norm with residual
    (8, 10), rotation (4, 4), gate (6, 10).
    """
    model, head = job.model, job.model.head_width
    turned = (model.heads + model.kv_heads) * head
    norms = 4 if model.post_norms else 2
    dim = model.dim
    per_token: float
    if job.compile:
        norm, turn, gate = (10, 4, 10) if backward else (8, 4, 6)
        per_token = norm * norms * dim + turn * turned + gate * ffn
    else:
        norm, turn, gate = (24, 20, 18) if backward else (20, 20, 10)
        per_token = (norm * norms + 12) * dim + turn * turned + gate * ffn
    if model.qk_norm:
        per_token += norm * turned
    if backward:
        per_token += 3 * 6 * dim
    if job.fp8:
        per_token += _cast_bytes(job, ffn, backward=backward)
    scale = job.element_bytes / 2
    return scale * per_token * job.tokens / job.mesh.tp


def _cast_bytes(job: Job, ffn: int, *, backward: bool) -> float:
    """A tensor in bf16 is read for its largest value and again to cast it (5 bytes); backward it
    is needed in two layouts (8), and what went forward is cast anew (3)."""
    model = job.model
    q, kv = model.heads * model.head_width, model.kv_heads * model.head_width
    into = 5 * model.dim + q + ffn
    out = q + 2 * kv + 2 * ffn + 2 * model.dim
    return 8 * out + 3 * into if backward else 5 * into


LOGIT_BYTES = {False: (14, 14), True: (6, 6)}
"""Bytes a logit, forward and backward: cast to float32 and log-softmax, eager or fused."""


def head_work(job: Job) -> BlockWork:
    """The final norm, the output head and the loss."""
    model, mesh = job.model, job.mesh
    flops = 2.0 * embedding_parameters(model) * job.tokens / mesh.tp
    forward_bytes, backward_bytes = LOGIT_BYTES[job.compile]
    logits = job.tokens * model.vocab_size / (mesh.tp if job.parallelism.loss_parallel else 1)
    tensor = _tensor(job)[:1]
    tensor = tuple(Transfer(t.name, t.collective, t.group, t.whole_bytes) for t in tensor)
    return BlockWork(
        Pass(0.0, flops, 0.0, forward_bytes * logits, tensor),
        Pass(0.0, 2 * flops, 0.0, backward_bytes * logits, tensor),
        Pass(),
        weights=embedding_parameters(model) // mesh.tp,
    )


def embedding_work(job: Job) -> BlockWork:
    """The embedding: rows are read and, backward, added up in float32."""
    moved = float(job.tokens * job.model.dim * job.element_bytes)
    tensor = _tensor(job)[1:]
    tensor = tuple(Transfer(t.name, t.collective, t.group, t.whole_bytes) for t in tensor)
    return BlockWork(
        Pass(memory_bytes=2 * moved / job.mesh.tp, transfers=tensor),
        Pass(memory_bytes=4 * moved / job.mesh.tp, transfers=tensor),
        Pass(),
        weights=embedding_parameters(job.model) // job.mesh.tp,
    )
