"""The Plan: what a RunSpec resolves to. Frozen beside it in run.yaml."""

from __future__ import annotations

from dataclasses import dataclass

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""From outermost to innermost: consecutive ranks differ in tp first."""


@dataclass(frozen=True)
class Mesh:
    """Resolved degrees. Their product is the world size; ep lies inside dp and cp."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        """The number of workers the mesh needs."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_parallel_size(self) -> int:
        """Over how many groups of ranks the global batch is divided."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard_size(self) -> int:
        """Over how many ranks FSDP cuts weights: dp_shard and cp, as one axis."""
        return self.dp_shard * self.cp


@dataclass(frozen=True)
class FlopsPerToken:
    """Model FLOP for one token, forward and backward, in both conventions (never recompute)."""

    causal: float
    palm: float


@dataclass(frozen=True)
class ModelCounts:
    """Parameters: all of them, those in matrix products (head in, embedding look-up out), and those
    that one token uses (with experts less than all; null in a plan from before there were any).
    """

    parameters: int
    matmul_parameters: int
    active_parameters: int | None = None


@dataclass(frozen=True)
class MemoryPerRank:
    """Bytes on a rank, by what holds them, each at its most; `pp_rank` is the pipeline rank.

    `activations_bytes` has the micro-batches in flight, `logits_bytes` the output of the head and
    the loss, `buffers_bytes` what communication and the dispatch of tokens to experts need beside
    them, `margin_bytes` what no tensor of the run has (the driver, kernels, fragmentation).
    `not_at_once_bytes` is how much of it all is never there at the same moment: the last activation
    is gone before the last gradient comes.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int = 0
    buffers_bytes: int = 0
    margin_bytes: int = 0
    not_at_once_bytes: int = 0
    pp_rank: int = 0

    @property
    def total_bytes(self) -> int:
        """The most that is held at one moment."""
        return self.tensor_bytes + self.margin_bytes

    @property
    def tensor_bytes(self) -> int:
        """The same without the margin: what a tracker of tensors sees."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.logits_bytes
            + self.buffers_bytes
            - self.not_at_once_bytes
        )


@dataclass(frozen=True)
class Plan:
    """Every `auto` of a RunSpec resolved, and what follows from it.

    `accumulation_steps` micro-batches of `micro_batch_size` sequences make a rank's part of the
    global batch. `lead_s` is how long ahead of the time limit the run is told to save.
    `step_time_s` is null: it is predicted only where it has been calibrated.
    """

    mesh: Mesh
    nodes: int
    devices_per_node: int
    micro_batch_size: int
    accumulation_steps: int
    tokens_per_step: int
    counts: ModelCounts
    flops_per_token: FlopsPerToken
    memory_per_rank: MemoryPerRank
    peak_flops_per_device: float | None
    lead_s: float
    threads_per_worker: int
    tracking_uri: str | None
    step_time_s: float | None = None

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self.mesh.world_size
