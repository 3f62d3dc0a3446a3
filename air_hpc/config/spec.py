"""RunSpec: everything a user decides about one run, typed and frozen.

A RunSpec is composed from `conf/` by Hydra, checked field by field (`config.build`), and written
into run.yaml together with its Plan. Each dataclass is one config group or one section of a
config; its attribute names are the config keys. Quantities are bytes, seconds and tokens; the one
exception is Slurm's own minutes (`launch.time_limit_min`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from air_hpc.config.fields import (
    Auto,
    above,
    at_least,
    between,
    errno_names,
    lines,
    named_entries,
    named_lines,
    one_line,
    regular_expression,
    signal_names,
)
from air_hpc.hardware.accelerator import AcceleratorSpec

SCHEMA_VERSION = 1
"""Of run.yaml. A reader keeps keys that it does not know and refuses a newer version."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency scaling of rotary embeddings (arXiv 2407.21783, reference code)."""

    factor: float = at_least(1, 8.0)
    low_freq_factor: float = above(0, 1.0)
    high_freq_factor: float = above(0, 4.0)
    original_context_tokens: int = at_least(1, 8192)


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts in place of a block's feed-forward: each token goes to the
    `active_experts` of `experts` that its router scores highest, and to all `shared_experts`.

    No token is dropped. `expert_ffn_dim` is the hidden width of one expert (null: model.ffn_dim);
    the shared ones are one feed-forward of `shared_experts` times that. The first
    `dense_layers` blocks keep their dense feed-forward. `score` turns router logits into weights;
    `normalize` makes the chosen weights sum to one. `balance` keeps experts equally busy: `loss`
    adds the sequence-wise balance loss (DeepSeek-V3, arXiv 2412.19437, eq. 17-20) times
    `balance_loss_weight`; `bias` moves a bias of the choice by `balance_bias_rate` a step
    (arXiv 2408.15664); `none` leaves them alone.
    """

    experts: int = at_least(2, 8)
    active_experts: int = at_least(1, 2)
    shared_experts: int = at_least(0, 0)
    expert_ffn_dim: int | None = at_least(1, None)
    dense_layers: int = at_least(0, 0)
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    balance: Literal["loss", "bias", "none"] = "loss"
    balance_loss_weight: float = at_least(0, 0.01)
    balance_bias_rate: float = at_least(0, 0.001)


@dataclass(frozen=True)
class ModelSpec:
    """A decoder. `dim` is the model width, `ffn_dim` the hidden width of its gated feed-forward.

    `head_dim` null is dim / heads. `qk_norm` normalises each head's query and key (Qwen3).
    `post_norms` normalises each branch once more before it joins the residual stream,
    `scale_embedding` multiplies it by sqrt(dim), `attention_softcap` and `logit_softcap` bound
    scores and logits to ±c by c · tanh(x / c), and with `sliding_window` a position attends to the
    last so many tokens only, but for each `global_every`-th layer (null: in every layer) (all
    Gemma 2, arXiv 2408.00118). `attention_scale` multiplies the scores (null: head_dim^-0.5).
    """

    name: str = one_line("tiny")
    dim: int = at_least(1, 128)
    layers: int = at_least(1, 4)
    heads: int = at_least(1, 4)
    kv_heads: int = at_least(1, 2)
    ffn_dim: int = at_least(1, 384)
    vocab_size: int = at_least(2, 256)
    rope_theta: float = above(0, 10000.0)
    rope_scaling: RopeScaling | None = None
    norm_eps: float = above(0, 1e-5)
    dropout: float = between(0, 1, 0.0, high_open=True)
    tied_head: bool = False
    init_std: float = above(0, 0.02)
    head_dim: int | None = at_least(1, None)
    activation: Literal["silu", "gelu"] = "silu"
    qk_norm: bool = False
    post_norms: bool = False
    scale_embedding: bool = False
    attention_scale: float | None = above(0, None)
    attention_softcap: float | None = above(0, None)
    logit_softcap: float | None = above(0, None)
    sliding_window: int | None = at_least(1, None)
    global_every: int | None = at_least(1, None)
    moe: MoeSpec | None = None

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    def window(self, layer: int) -> int | None:
        """How many tokens, its own included, a position of `layer` (from 0) sees; None: all."""
        if self.global_every is not None and (layer + 1) % self.global_every == 0:
            return None
        return self.sliding_window

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` (from 0) has experts."""
        return self.moe is not None and layer >= self.moe.dense_layers


PipelineSchedule = Literal[
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv_zero_bubble",
    "dual_pipe_v",
]


@dataclass(frozen=True)
class ParallelismSpec:
    """Degrees of the mesh pp × dp_replicate × dp_shard × cp × tp, ep inside dp_shard and cp.

    `auto` for one or both data-parallel degrees fills the world. `pp_schedule` names a schedule of
    torch.distributed.pipelining; `pp_stages_per_rank` auto is one for gpipe and 1f1b, two for the
    others. `cp_method`: `ulysses` exchanges heads for tokens around attention (arXiv 2309.14509),
    `ring` passes keys and values on (arXiv 2310.01889), with causal load balanced. `loss_parallel`
    keeps the logits cut over the vocabulary. `prefetch` is how many blocks ahead FSDP gathers.
    `recompute` is what the backward pass computes again: nothing, each block (`full`), all but the
    dear operations (`ops`: every second matrix product and attention is kept), or as much as
    `recompute_budget` (0: all of a block, 1: nothing) asks of torch.compile's partitioner.
    """

    name: str = one_line("ddp")
    pp: int = at_least(1, 1)
    dp_replicate: int | Auto = at_least(1, "auto")
    dp_shard: int | Auto = at_least(1, 1)
    cp: int = at_least(1, 1)
    tp: int = at_least(1, 1)
    ep: int = at_least(1, 1)
    reshard_after_forward: bool = True
    prefetch: int = between(0, 16, 1)
    cpu_offload: bool = False
    pp_schedule: PipelineSchedule = "1f1b"
    pp_stages_per_rank: int | Auto = at_least(1, "auto")
    cp_method: Literal["ulysses", "ring"] = "ulysses"
    loss_parallel: bool = True
    recompute: Literal["none", "full", "ops", "budget"] = "none"
    recompute_budget: float = between(0, 1, 0.5)


@dataclass(frozen=True)
class EngineSpec:
    """What trains. `native` is this project's own loop."""

    name: Literal["native"] = "native"


@dataclass(frozen=True)
class ContainerSpec:
    """How the command is put into a container; `none` runs it on the host."""

    kind: Literal["none", "apptainer", "pyxis"] = "none"
    image: str | None = one_line(None)
    mounts: tuple[str, ...] = lines()


@dataclass(frozen=True)
class ClusterSpec:
    """Where runs go and what the site needs around the command.

    `kind`: `local` is this machine, `slurm` submits, `allocation` runs inside the present salloc.
    `template` names a file of sbatch_templates. `export` is sbatch's `--export` policy.
    `grace_s` is what the site leaves between SIGTERM and SIGKILL (GraceTime + KillWait).
    `submit_timeout_s` bounds each scheduler command.
    """

    name: str = one_line("local")
    kind: Literal["local", "slurm", "allocation"] = "local"
    template: str = one_line("default")
    modules: tuple[str, ...] = lines()
    venv: str | None = one_line(None)
    conda_env: str | None = one_line(None)
    container: ContainerSpec = field(default_factory=ContainerSpec)
    env: Mapping[str, str] = named_lines()
    setup: tuple[str, ...] = lines()
    python: str | None = one_line(None)
    export: str = one_line("NONE")
    srun_args: tuple[str, ...] = lines()
    grace_s: float = at_least(0, 30.0)
    submit_timeout_s: float = above(0, 60.0)
    allow_mixed_devices: bool = False
    network_interface: str | None = one_line(None)
    node_local_dir: str = one_line("/tmp")


@dataclass(frozen=True)
class LaunchSpec:
    """What is asked of the scheduler. Null leaves the site's default in force.

    `sbatch` passes any other sbatch option through, checked: `{licenses: "a:1"}`, a true value for
    a flag. `lead_s`: how long ahead of the limit a run is told to save (auto: from the plan).
    `chain_length`: how many dependent jobs `continuation=chain` submits ahead.
    """

    nodes: int = between(1, 100_000, 1)
    devices_per_node: int = between(1, 1024, 1)
    cpus_per_device: int | None = at_least(1, None)
    partition: str | None = one_line(None)
    account: str | None = one_line(None)
    qos: str | None = one_line(None)
    time_limit_min: int | None = at_least(1, None)
    lead_s: float | Auto = at_least(0, "auto")
    constraint: str | None = one_line(None)
    reservation: str | None = one_line(None)
    exclusive: bool = False
    mem: str | None = one_line(None)
    gpus: Literal["gpus_per_node", "gres", "none"] | Auto = "auto"
    gres_type: str | None = one_line(None)
    mail_type: str | None = one_line(None)
    mail_user: str | None = one_line(None)
    dependency: str | None = one_line(None)
    comment: str | None = one_line(None)
    job_name: str | None = one_line(None)
    array_parallelism: int | None = at_least(1, None)
    continuation: Literal["requeue", "chain", "resubmit", "none"] = "requeue"
    chain_length: int = at_least(1, 3)
    starter: Literal["exec", "fork"] = "exec"
    start_timeout_s: float = above(0, 300.0)
    share_group: str | None = one_line(None)
    sbatch: Mapping[str, str | int | float | bool | None] = named_lines()


@dataclass(frozen=True)
class DataSpec:
    """What is trained on. `python_stdlib`: the bytes of the standard library's own sources."""

    name: str = one_line("python_stdlib")
    source: Literal["python_stdlib"] = "python_stdlib"
    sequence_length: int = at_least(2, 128)
    cache_dir: str | None = one_line(None)


@dataclass(frozen=True)
class OptimizerSpec:
    """AdamW (arXiv 1711.05101); weight decay only on matrices."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = above(0, 1e-3)
    beta1: float = between(0, 1, 0.9, high_open=True)
    beta2: float = between(0, 1, 0.95, high_open=True)
    eps: float = above(0, 1e-8)
    weight_decay: float = at_least(0, 0.1)
    momentum: float = between(0, 1, 0.9, high_open=True)
    grad_clip: float | None = above(0, 1.0)


@dataclass(frozen=True)
class ScheduleSpec:
    """Learning rate over steps: warm-up, then cosine, warm-up-stable-decay or constant."""

    name: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = at_least(0, 20)
    min_lr_ratio: float = between(0, 1, 0.1)
    decay_ratio: float = between(0, 1, 0.2)


@dataclass(frozen=True)
class GuardSpec:
    """What is done about a loss that went wrong.

    `nonfinite` (NaN, Inf in loss or gradient) and `spike` (the loss lies more than `spike_mads`
    median absolute deviations above the median of the last `window` steps) each name an action:
    `log` it, `skip` the batch (the step counts, the weights stay), `rollback` to the last good
    checkpoint and step over the data since, or `stop`. `max_skips` and `max_rollbacks` bound them
    over the whole run.
    """

    nonfinite: Literal["log", "skip", "rollback", "stop"] = "rollback"
    spike: Literal["log", "skip", "rollback", "stop"] = "log"
    spike_mads: float = above(0, 20.0)
    window: int = at_least(8, 64)
    max_skips: int = at_least(0, 20)
    max_rollbacks: int = at_least(0, 2)


@dataclass(frozen=True)
class TrainSpec:
    """The training itself; `micro_batch_size` counts sequences of one rank in one forward."""

    steps: int = at_least(1, 200)
    global_batch_size: int = at_least(1, 16)
    micro_batch_size: int | Auto = at_least(1, "auto")
    seed: int = at_least(0, 0)
    precision: Literal["fp32", "bf16", "fp8"] = "fp32"
    deterministic: bool = True
    compile: bool = False
    log_interval_steps: int = at_least(1, 1)
    collective_timeout_s: float = above(0, 600.0)
    threads_per_worker: int | Auto = at_least(1, "auto")
    guard: GuardSpec = field(default_factory=GuardSpec)


@dataclass(frozen=True)
class CheckpointSpec:
    """When and how state is saved.

    Retention keeps the last `keep_last`, for ever each step that `keep_every_steps` divides, and
    always the newest verified one. With `interval_steps` auto a save comes when Young and Daly's
    formula says so, from what saves are measured to take and `failures_per_node_day` (how often one
    node of the site fails in a day; null: not known), in `min_interval_s` to `max_interval_s`.
    """

    interval_steps: int | Auto = at_least(1, 100)
    failures_per_node_day: float | None = at_least(0, None)
    min_interval_s: float = above(0, 60.0)
    max_interval_s: float = above(0, 3600.0)
    keep_last: int = at_least(1, 2)
    keep_every_steps: int | None = at_least(1, None)
    asynchronous: bool = True


@dataclass(frozen=True)
class HangSpec:
    """How long a phase of a worker may last without a sign of progress before it counts as a hang.

    The limit of a phase is `factor` times the longest that this run has seen it take in good
    health, and never less than its floor here (seconds). The first step of a generation builds
    communicators and kernels: its floor is the larger of `step_s` and `first_step_s`.
    """

    factor: float = at_least(1, 5.0)
    start_s: float = above(0, 300.0)
    init_s: float = above(0, 600.0)
    preflight_s: float = above(0, 60.0)
    compile_s: float = above(0, 3600.0)
    data_s: float = above(0, 1800.0)
    load_s: float = above(0, 1800.0)
    first_step_s: float = above(0, 900.0)
    step_s: float = above(0, 300.0)
    save_s: float = above(0, 1800.0)
    eval_s: float = above(0, 1800.0)
    finish_s: float = above(0, 600.0)


@dataclass(frozen=True)
class StragglerSpec:
    """When a rank counts as slow: its compute time, without waiting for others, lies `threshold`
    above the median of all ranks over `window_s`. `exclude`: use it as evidence against its node.
    """

    threshold: float = above(0, 0.1)
    window_s: float = above(0, 60.0)
    exclude: bool = False


@dataclass(frozen=True)
class PreflightSpec:
    """What a node must show before the first generation, and after a failure of a device.

    A floor of null is not held against anybody. `timeout_s` bounds all checks of a node together,
    `check_timeout_s` each of them: a driver or a file system that hangs is found by it.
    """

    enabled: bool = True
    timeout_s: float = above(0, 10.0)
    check_timeout_s: float = above(0, 5.0)
    min_disk_bytes: int = at_least(0, 1024**3)
    max_clock_skew_s: float | None = above(0, 5.0)
    max_used_device_memory_bytes: int | None = at_least(0, 2 * 1024**3)
    max_ecc_uncorrected: int | None = at_least(0, 0)
    """Uncorrected memory errors of a device since its driver was loaded."""
    min_matmul_ratio: float | None = above(0, None)
    """Of the median of all devices of the run; null: 0.7 for GPUs, none for CPUs, whose cores are
    shared with others."""
    max_all_reduce_s: float | None = above(0, None)
    """Of a small all-reduce (1 MiB on CPUs, 64 MiB on GPUs), inside a node and over all."""


@dataclass(frozen=True)
class ExclusionSpec:
    """How nodes that failed are avoided by all runs of the user.

    An exclusion ends after `expiry_h` hours; at most `max_nodes` stand at a time, and never so
    many that the run cannot start.
    """

    enabled: bool = True
    expiry_h: float = above(0, 24.0)
    max_nodes: int = at_least(0, 8)


RuleClass = Literal[
    "preempted",
    "time_limit",
    "requeued",
    "cancelled",
    "node_lost",
    "not_arrived",
    "user_error",
    "checkpoint",
    "storage",
    "network",
    "host_memory",
    "device_memory",
    "device",
    "data",
    "diverged",
    "hang",
    "environment",
    "unknown",
]
"""The failure classes that a rule may name: those of `rundir.words` that a failure can have."""

OWN_PRIORITY = 100
"""The priority of a rule that names none: before every shipped one."""


@dataclass(frozen=True)
class FailureRule:
    """One line of the table that turns the evidence of a failed worker into a failure class.

    All conditions that are given must hold; a list holds when any of its entries does.
    `exit_code` and `signal` (SIGABRT) are how the process ended; `exception` a type as a traceback
    prints it (`torch.OutOfMemoryError`, `TypeError`), or a class it derives from; `errno` a system
    error by name (ENOSPC); `pattern` a regular expression that is searched for in the text of the
    error and in the last lines of the worker's log; `origin` whose code raised it: the user's, this
    platform's, or that of libraries alone; `oom_killed` whether the kernel killed a process of the
    job's memory group for lack of memory; `xid` an NVIDIA Xid that the node saw meanwhile;
    `slurm_state` and `slurm_reason` what Slurm says of the job.

    Rules are tried by `priority`, the largest first, then by name; the first that holds decides.
    `action` null does what its class does; `restart` tries again within the budget, `exclude` also
    keeps the node out, `stop` does not try again. `hint` tells the user what to do.
    """

    failure_class: RuleClass
    exit_code: tuple[int, ...] = ()
    signal: tuple[str, ...] = signal_names()
    exception: tuple[str, ...] = lines()
    errno: tuple[str, ...] = errno_names()
    pattern: str | None = regular_expression(None)
    origin: Literal["user", "platform", "library"] | None = None
    oom_killed: bool | None = None
    xid: tuple[int, ...] = ()
    slurm_state: tuple[str, ...] = lines()
    slurm_reason: tuple[str, ...] = lines()
    priority: int = OWN_PRIORITY
    action: Literal["restart", "exclude", "stop"] | None = None
    hint: str = one_line("")

    def problem(self) -> tuple[str, str] | None:
        """(what is wrong with the rule as a whole, what is allowed); None when it is right."""
        given = [getattr(self, name) for name in CONDITIONS]
        if all(value is None or value == () for value in given):
            conditions = ", ".join(CONDITIONS)
            return "a rule without a condition would take every failure", f"any of {conditions}"
        return None


CONDITIONS = (
    "exit_code",
    "signal",
    "exception",
    "errno",
    "pattern",
    "origin",
    "oom_killed",
    "xid",
    "slurm_state",
    "slurm_reason",
)
"""The keys of a FailureRule that something must hold for."""


@dataclass(frozen=True)
class RecoverySpec:
    """What happens after a failure: restarts inside the allocation, budgets, deadlines.

    `restart` says what a generation may become after a failure, without leaving the allocation:
    `same` needs the full number of nodes, `spare` takes from the `spare_nodes` that were asked for
    beside them, `elastic` goes on with fewer data-parallel replicas down to `min_nodes` (null: 1),
    `requeue` always leaves. `max_failures` counts ends that the infrastructure caused,
    `max_unknown` those that nobody could name, `max_no_progress` those in a row without a newer
    committed step.
    """

    restart: Literal["same", "spare", "elastic", "requeue"] = "same"
    spare_nodes: int = between(0, 10_000, 0)
    min_nodes: int | None = at_least(1, None)
    max_failures: int = at_least(0, 10)
    max_unknown: int = at_least(0, 5)
    max_no_progress: int = at_least(1, 3)
    heartbeat_interval_s: float = above(0, 0.5)
    heartbeat_timeout_s: float = above(0, 5.0)
    lease_s: float = above(0, 15.0)
    stop_timeout_s: float = above(0, 120.0)
    hang: HangSpec = field(default_factory=HangSpec)
    straggler: StragglerSpec = field(default_factory=StragglerSpec)
    preflight: PreflightSpec = field(default_factory=PreflightSpec)
    exclusion: ExclusionSpec = field(default_factory=ExclusionSpec)
    rules: Mapping[str, FailureRule | None] = named_entries()
    """By name. Null switches one off. Where each is from: conf/recovery/rules."""


@dataclass(frozen=True)
class TrackingSpec:
    """Where metrics go. A null `uri` keeps the spool alone, for `python -m air_hpc sync`;
    `auto` is a SQLite file in the runs folder on `cluster=local` and null on a cluster."""

    name: str = one_line("mlflow")
    uri: str | Auto | None = one_line("auto")
    experiment: str = one_line("air_hpc")
    interval_s: float = above(0, 2.0)


@dataclass(frozen=True)
class CodeSpec:
    """What is copied at submit. `repository`: the git work tree of the working directory."""

    snapshot: Literal["repository", "none"] = "repository"
    max_bytes: int = at_least(0, 256 * 1024 * 1024)


@dataclass(frozen=True)
class RunSpec:
    """One run as the user composed it. `name` is a label; the run's id is fixed at submit."""

    name: str | None = one_line(None)
    runs_dir: str = one_line("runs")
    model: ModelSpec = field(default_factory=ModelSpec)
    parallelism: ParallelismSpec = field(default_factory=ParallelismSpec)
    engine: EngineSpec = field(default_factory=EngineSpec)
    accelerator: AcceleratorSpec = field(default_factory=lambda: AcceleratorSpec(name="cpu"))
    cluster: ClusterSpec = field(default_factory=ClusterSpec)
    launch: LaunchSpec = field(default_factory=LaunchSpec)
    data: DataSpec = field(default_factory=DataSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    train: TrainSpec = field(default_factory=TrainSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    recovery: RecoverySpec = field(default_factory=RecoverySpec)
    tracking: TrackingSpec = field(default_factory=TrackingSpec)
    code: CodeSpec = field(default_factory=CodeSpec)

    @property
    def allocated_nodes(self) -> int:
        """The nodes that an allocation of this run has: those that train, and its hot spares."""
        spares = self.recovery.spare_nodes if self.recovery.restart == "spare" else 0
        return self.launch.nodes + spares

    @property
    def outlives_nodes(self) -> bool:
        """Whether the job goes on when one of its nodes is lost (Slurm's --no-kill)."""
        return self.recovery.restart != "requeue" and self.allocated_nodes > 1
