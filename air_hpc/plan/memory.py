"""Bytes on the fullest rank: an estimate from shapes, without the allocator's own overhead.

With P parameters, S the number of ranks that share one copy (dp_shard · tp · pp) and c bytes an
element in compute precision (4 fp32, 2 bf16):

- weights: 4·P/S for the fp32 masters. dp_shard > 1 adds the gathered copies: embedding and
  head for the whole step, and two blocks at a time (one computes, the next is prefetched), or all
  of them without `reshard_after_forward`. An unsharded bf16 run adds the copy that autocast keeps
  of the matrices: 2 bytes each.
- gradients: 4·P/S, in fp32 and of all the rank's own parameters. dp_shard > 1 adds one block's
  before they are scattered: c bytes each, and 4 more in the buffer that is reduced.
- optimizer: AdamW 8·P/S (two fp32 moments), SGD 4·P/S with momentum and nothing without.
- activations, for T tokens of a micro-batch on the rank (micro_batch · sequence_length / cp), per
  block and token and without recompute: the inputs of both norms and both normed values (4·dim),
  q and the attention output (2·heads·head_dim), k and v, and four SwiGLU values (4·ffn_dim), all in
  compute precision, with flash attention (no score matrix is kept); then the logits once in compute
  precision and twice in fp32 (the loss's log-softmax and its gradient). Tensor parallelism is
  taken with sequence parallelism, so tp divides all of it.

`cpu_offload` keeps the sharded weights, gradients and optimizer state in host memory, so that only
the gathered copies and that one block's gradients count. Measured use is higher by the allocator's
fragmentation and the communication buffers; a plan is no promise that a run fits.
"""

from __future__ import annotations

from air_hpc.config.spec import RunSpec
from air_hpc.plan.flops import block_parameters, count_parameters
from air_hpc.plan.types import MemoryPerRank, Mesh

_COMPUTE_BYTES = {"fp32": 4, "bf16": 2}
_MASTER_BYTES = 4


def memory_per_rank(spec: RunSpec, mesh: Mesh, micro_batch_size: int) -> MemoryPerRank:
    """The estimate for a resolved mesh and micro-batch."""
    parameters = count_parameters(spec.model).parameters
    own = -(-parameters // (mesh.dp_shard * mesh.tp * mesh.pp))
    on_device = 0 if spec.parallelism.cpu_offload else own
    return MemoryPerRank(
        weights_bytes=_MASTER_BYTES * on_device + _working_copies(spec, mesh),
        gradients_bytes=4 * on_device + _whole_gradients(spec, mesh),
        optimizer_bytes=_optimizer_bytes_per_parameter(spec) * on_device,
        activations_bytes=_activations(spec, mesh, micro_batch_size),
    )


def memory_by_stage(spec: RunSpec, mesh: Mesh, micro_batch_size: int) -> tuple[MemoryPerRank, ...]:
    """The estimate for each pipeline rank, which has one stage or more."""
    return (memory_per_rank(spec, mesh, micro_batch_size),) * mesh.pp


def state_bytes(spec: RunSpec) -> int:
    """What a checkpoint holds of the whole model: fp32 weights and the optimizer's state."""
    parameters = count_parameters(spec.model).parameters
    return parameters * (_MASTER_BYTES + _optimizer_bytes_per_parameter(spec))


def _optimizer_bytes_per_parameter(spec: RunSpec) -> int:
    if spec.optimizer.name == "adamw":
        return 8
    return 4 if spec.optimizer.momentum > 0 else 0


def _working_copies(spec: RunSpec, mesh: Mesh) -> int:
    compute_bytes = _COMPUTE_BYTES[spec.train.precision]
    counts = count_parameters(spec.model)
    if mesh.dp_shard == 1:
        matrices = counts.matmul_parameters // (mesh.tp * mesh.pp)
        return compute_bytes * matrices if spec.train.precision == "bf16" else 0
    gathered = counts.parameters // mesh.pp
    if spec.parallelism.reshard_after_forward:
        block = _largest_block(spec)
        ends = counts.parameters - spec.model.layers * block
        gathered = min(gathered, 2 * block + ends)
    return compute_bytes * (gathered // mesh.tp)


def _largest_block(spec: RunSpec) -> int:
    model = spec.model
    return max(block_parameters(model, layer).total for layer in range(model.layers))


def _whole_gradients(spec: RunSpec, mesh: Mesh) -> int:
    if mesh.dp_shard == 1:
        return 0
    return (_COMPUTE_BYTES[spec.train.precision] + 4) * (_largest_block(spec) // mesh.tp)


def _activations(spec: RunSpec, mesh: Mesh, micro_batch_size: int) -> int:
    model = spec.model
    compute_bytes = _COMPUTE_BYTES[spec.train.precision]
    tokens = micro_batch_size * spec.data.sequence_length // mesh.cp
    kv_width = model.kv_heads * model.head_width
    widths = 4 * model.dim + 2 * model.heads * model.head_width + 2 * kv_width + 4 * model.ffn_dim
    blocks = -(-model.layers // mesh.pp)
    logits_bytes = model.vocab_size * (compute_bytes + 8)
    return tokens * (blocks * widths * compute_bytes + logits_bytes) // mesh.tp
