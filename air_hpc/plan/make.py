"""Makes the Plan of a RunSpec: every `auto` resolved, every figure that follows, every problem.

Arithmetic only, no I/O beyond asking how many processors this machine has. The step time is null
where a figure of the device is missing.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from air_hpc.config.spec import RunSpec
from air_hpc.errors import Problem
from air_hpc.plan.flops import count_parameters, flops_per_token
from air_hpc.plan.limits import AUTO_MICRO_BATCH_MAX
from air_hpc.plan.memory import memory_per_rank, state_bytes
from air_hpc.plan.mesh import nearest_divisors, resolve_mesh
from air_hpc.plan.resize import elastic_warning
from air_hpc.plan.schedule import micro_batches_that_work, stages_per_rank, takes
from air_hpc.plan.step_time import StepTime, step_time
from air_hpc.plan.types import Mesh, Plan
from air_hpc.plan.validity import check_spec, depends_on

_MOST_TRIED = 4096
"""Micro-batch sizes that are looked at."""
_LEAD_BASE_S = 60.0
_SAVE_BYTES_PER_S_PER_NODE = 1e9

_MESH_KEYS = ("parallelism", "launch.nodes", "launch.devices_per_node")
_BATCH_KEYS = (*_MESH_KEYS, "train.global_batch_size", "train.micro_batch_size")


def make_plan(
    spec: RunSpec,
    *,
    local_cpu_count: int | None = None,
    unsure: Collection[str] = (),
    to_run: bool = True,
    measured_flops_per_s: float | None = None,
) -> tuple[Plan | None, list[Problem]]:
    """The Plan, or None where a problem stands in its way; and all problems, warnings among them.

    `local_cpu_count`: processors of this machine (asked for when None), which only
    `cluster.kind=local` needs. `unsure`: keys that already have a problem and so hold a default;
    nothing is said about what depends on them. `to_run`: whether the run is meant to start here
    with this version; if not, what only stops that is a warning. `measured_flops_per_s`: the
    probe's best matmul of the device, for the step time.
    """
    problems = check_spec(spec, unsure, to_run=to_run)
    mesh, mesh_problems = resolve_mesh(spec)
    if not depends_on(_MESH_KEYS, unsure):
        problems += mesh_problems
    micro_batch_size = 1
    if mesh is not None:
        micro_batch_size, batch_problems = _micro_batch(spec, mesh)
        if not depends_on(_BATCH_KEYS, unsure):
            problems += batch_problems
    if mesh is None or unsure or any(not problem.warning for problem in problems):
        return None, problems
    plan = _plan(spec, mesh, micro_batch_size, local_cpu_count)
    made = step_time(spec, mesh, micro_batch_size, measured_flops_per_s=measured_flops_per_s)
    if isinstance(made, StepTime):
        plan = replace(plan, step_time_s=made.total_s)
    return plan, problems + _memory_warning(spec, plan) + elastic_warning(spec, plan)


def _plan(spec: RunSpec, mesh: Mesh, micro_batch_size: int, local_cpu_count: int | None) -> Plan:
    rank_batch = spec.train.global_batch_size // mesh.data_parallel_size
    return Plan(
        mesh=mesh,
        nodes=spec.launch.nodes,
        devices_per_node=spec.launch.devices_per_node,
        micro_batch_size=micro_batch_size,
        accumulation_steps=rank_batch // micro_batch_size,
        tokens_per_step=spec.train.global_batch_size * spec.data.sequence_length,
        counts=count_parameters(spec.model),
        flops_per_token=flops_per_token(spec.model, spec.data.sequence_length),
        memory_per_rank=memory_per_rank(spec, mesh, micro_batch_size),
        peak_flops_per_device=spec.accelerator.peak(spec.train.precision),
        lead_s=lead_s(spec),
        threads_per_worker=threads_per_worker(spec, local_cpu_count),
        tracking_uri=tracking_uri(spec),
    )


def _micro_batch(spec: RunSpec, mesh: Mesh) -> tuple[int, list[Problem]]:
    total, size = spec.train.global_batch_size, mesh.data_parallel_size
    if total % size:
        low = total - total % size
        near = " or ".join(str(batch) for batch in (low, low + size) if batch)
        message = f"the batch ({total}) does not divide over {size} data-parallel ranks"
        allowed = f"a multiple of {size}"
        hint = f"Nearest that work: {near}"
        return 1, [Problem("train.global_batch_size", str(total), message, allowed, hint)]
    rank_batch = total // size
    asked = spec.train.micro_batch_size
    tried = (n for n in range(1, min(rank_batch, _MOST_TRIED) + 1) if rank_batch % n == 0)
    working = [n for n in tried if takes(spec.parallelism, rank_batch // n)]
    if asked == "auto":
        if not working:
            return 1, [_no_number_works(spec, mesh, rank_batch)]
        return _largest_that_fits(spec, mesh, working), []
    if rank_batch % asked:
        message = (
            f"micro-batches of {asked} do not make up a rank's {rank_batch} sequences"
            f" (train.global_batch_size {total} over {size} data-parallel ranks)"
        )
        hint = f"Nearest that work: {nearest_divisors(rank_batch, asked)}"
        allowed = f"auto or a divisor of {rank_batch}"
        return 1, [Problem("train.micro_batch_size", str(asked), message, allowed, hint)]
    if not takes(spec.parallelism, rank_batch // asked):
        return 1, [_schedule_refuses(spec, mesh, rank_batch, asked, working)]
    return asked, []


def _no_number_works(spec: RunSpec, mesh: Mesh, rank_batch: int) -> Problem:
    """No micro-batch gives the pipeline's schedule a number of them that it takes."""
    degrees = spec.parallelism
    step = mesh.pp * stages_per_rank(degrees)
    batch = -(-rank_batch // step) * step * mesh.data_parallel_size
    message = (
        f"a rank's {rank_batch} sequences do not make a number of micro-batches that"
        f" pp_schedule={degrees.pp_schedule} takes with pp {mesh.pp}"
    )
    needs = micro_batches_that_work(
        degrees.pp_schedule, mesh.pp, stages_per_rank(degrees), rank_batch
    )
    hint = f"Nearest that works: train.global_batch_size={batch}"
    total = str(spec.train.global_batch_size)
    return Problem("train.global_batch_size", total, message, f"micro-batches {needs}", hint)


def _schedule_refuses(
    spec: RunSpec, mesh: Mesh, rank_batch: int, asked: int, working: list[int]
) -> Problem:
    if not working:
        return _no_number_works(spec, mesh, rank_batch)
    degrees, count = spec.parallelism, rank_batch // asked
    needs = micro_batches_that_work(degrees.pp_schedule, mesh.pp, stages_per_rank(degrees), count)
    message = (
        f"micro-batches of {asked} make {count} of a rank's {rank_batch} sequences, which"
        f" pp_schedule={degrees.pp_schedule} does not take with pp {mesh.pp}"
    )
    near = sorted(working, key=lambda n: (abs(n - asked), n))[:2]
    hint = "Nearest that work: " + " or ".join(str(n) for n in sorted(near))
    return Problem("train.micro_batch_size", str(asked), message, f"micro-batches {needs}", hint)


def _largest_that_fits(spec: RunSpec, mesh: Mesh, working: list[int]) -> int:
    """The largest micro-batch of those that work, up to AUTO_MICRO_BATCH_MAX where one is."""
    memory_bytes = spec.accelerator.memory_bytes
    sizes = [n for n in working if n <= AUTO_MICRO_BATCH_MAX] or working[:1]
    for size in reversed(sizes):
        if memory_bytes is None or memory_per_rank(spec, mesh, size).total_bytes <= memory_bytes:
            return size
    return sizes[0]


def _memory_warning(spec: RunSpec, plan: Plan) -> list[Problem]:
    """A warning where the estimate is above the device's memory: an estimate stops nobody."""
    memory_bytes, need_bytes = spec.accelerator.memory_bytes, plan.memory_per_rank.total_bytes
    if memory_bytes is None or need_bytes <= memory_bytes:
        return []
    where = f" of pipeline rank {plan.memory_per_rank.pp_rank}" if plan.mesh.pp > 1 else ""
    message = (
        f"a rank{where} needs about {need_bytes / 1e9:.0f} GB,"
        f" accelerator={spec.accelerator.name} has {memory_bytes / 1e9:.0f} GB"
    )
    hint = "Shard over more devices (parallelism=fsdp, launch.nodes) or lower micro_batch_size"
    return [Problem("parallelism", spec.parallelism.name, message, hint=hint, warning=True)]


def lead_s(spec: RunSpec) -> float:
    """How long ahead of the time limit the run is told to save, in seconds.

    `auto` is 60 s to agree and to finish the step, what the site takes between its signals
    (`cluster.grace_s`), and the time to write the state at 1 GB/s a node; but never more than half
    of the limit, so that a short run still trains.
    """
    if spec.launch.lead_s != "auto":
        return spec.launch.lead_s
    write_s = state_bytes(spec) / (_SAVE_BYTES_PER_S_PER_NODE * spec.launch.nodes)
    lead = _LEAD_BASE_S + spec.cluster.grace_s + write_s
    if spec.launch.time_limit_min is not None:
        lead = min(lead, 30.0 * spec.launch.time_limit_min)
    return lead


def threads_per_worker(spec: RunSpec, local_cpu_count: int | None = None) -> int:
    """Threads of one worker: as asked, else its processors, else its share of this machine."""
    if spec.train.threads_per_worker != "auto":
        return spec.train.threads_per_worker
    if spec.launch.cpus_per_device is not None:
        return spec.launch.cpus_per_device
    if spec.cluster.kind != "local":
        return 1
    cores = local_cpu_count if local_cpu_count is not None else len(os.sched_getaffinity(0))
    return max(1, cores // spec.launch.devices_per_node)


def tracking_uri(spec: RunSpec) -> str | None:
    """Where metrics are shipped; None keeps the spool alone.

    `auto` is a SQLite file in the runs folder on this machine. On a cluster it is None: many jobs
    would write that one file over NFS, where SQLite's locks do not hold.
    """
    uri = spec.tracking.uri
    if uri != "auto":
        return uri
    if spec.cluster.kind != "local":
        return None
    runs_dir = Path(spec.runs_dir).expanduser().absolute()
    return f"sqlite:///{runs_dir / 'mlflow.db'}"
