"""What would fit into a device's memory, by the plan's estimate: for a run that ran out of it.

The estimate has a margin for the allocator's fragmentation and the driver, and still a run may fail
although its plan fits. What has failed is then the better measure: a change counts as fitting
where its estimate lies at least MARGIN below both the device's memory and the estimate of the plan
that failed. Changes are tried from the cheapest to the dearest: smaller micro-batches (the same
numbers, more steps of accumulation), more sharding over the devices there are, both, recompute,
offload to the host, and more nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from air_hpc.config.spec import RunSpec
from air_hpc.plan.make import make_plan
from air_hpc.plan.types import Plan

MARGIN = 0.1
"""Part of the memory that an estimate must leave free to count as fitting."""
_MOST_NODES_FACTOR = 8


@dataclass(frozen=True)
class Fit:
    """What the estimate says. `overrides` is the change that fits, empty where none does.

    `device_bytes` is None where the device's memory is not known; `failed_bytes` is the estimate of
    the plan that ran out, `needed_bytes` that of the change.
    """

    device_bytes: int | None
    failed_bytes: int
    overrides: tuple[str, ...] = ()
    needed_bytes: int | None = None

    def sentence(self) -> str:
        """For people."""
        has = "" if self.device_bytes is None else f" of the {_gb(self.device_bytes)} it has"
        head = f"the plan put a rank at {_gb(self.failed_bytes)}{has}"
        if not self.overrides or self.needed_bytes is None:
            tried = "smaller micro-batch, sharding, recompute or offload"
            return f"{head}; by that estimate no {tried} fits"
        return f"{head}; {' '.join(self.overrides)} would take {_gb(self.needed_bytes)}"


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB"


def what_fits(spec: RunSpec, plan: Plan) -> Fit:
    """The cheapest change to `spec` that fits where `plan` did not."""
    device_bytes = spec.accelerator.memory_bytes
    failed_bytes = plan.memory_per_rank.total_bytes
    limit = failed_bytes if device_bytes is None else min(device_bytes, failed_bytes)
    for overrides, changed in _changes(spec, plan):
        tried, problems = make_plan(changed, local_cpu_count=1, to_run=False)
        if tried is None or any(not problem.warning for problem in problems):
            continue
        needed = tried.memory_per_rank.total_bytes
        if needed <= (1 - MARGIN) * limit:
            return Fit(device_bytes, failed_bytes, overrides, needed)
    return Fit(device_bytes, failed_bytes)


def _changes(spec: RunSpec, plan: Plan) -> Iterator[tuple[tuple[str, ...], RunSpec]]:
    """Changed specs with the overrides that make them, the cheapest first."""
    rank_batch = plan.micro_batch_size * plan.accumulation_steps
    smaller = [n for n in range(plan.micro_batch_size - 1, 0, -1) if rank_batch % n == 0]
    for size in smaller:
        yield _micro(spec, (), size)
    world = plan.mesh.data_parallel_size
    cp, ep = plan.mesh.cp, plan.mesh.ep
    wider = (n for n in range(plan.mesh.dp_shard + 1, world + 1) if world % n == 0)
    degrees = [n for n in wider if n * cp % ep == 0]
    for degree in degrees:
        parts = replace(spec.parallelism, dp_shard=degree, dp_replicate="auto")
        key = (f"parallelism.dp_shard={degree}", "parallelism.dp_replicate=auto")
        sharded = replace(spec, parallelism=parts)
        yield key, sharded
        for size in smaller:
            yield _micro(sharded, key, size)
    if spec.parallelism.recompute == "none":
        again = replace(spec, parallelism=replace(spec.parallelism, recompute="full"))
        yield ("parallelism.recompute=full",), again
        for size in smaller:
            yield _micro(again, ("parallelism.recompute=full",), size)
    if plan.mesh.shard_size > 1 and not spec.parallelism.cpu_offload:
        offloaded = replace(spec, parallelism=replace(spec.parallelism, cpu_offload=True))
        yield ("parallelism.cpu_offload=true",), offloaded
        for size in smaller:
            yield _micro(offloaded, ("parallelism.cpu_offload=true",), size)
    if spec.cluster.kind != "local":
        yield from _more_nodes(spec, plan)


def _more_nodes(spec: RunSpec, plan: Plan) -> Iterator[tuple[tuple[str, ...], RunSpec]]:
    factor = 2
    while factor <= _MOST_NODES_FACTOR:
        launch = replace(spec.launch, nodes=spec.launch.nodes * factor)
        parts = replace(spec.parallelism, dp_shard="auto", dp_replicate=1)
        train = replace(spec.train, micro_batch_size="auto")
        yield (
            (
                f"launch.nodes={launch.nodes}",
                "parallelism.dp_shard=auto",
                "parallelism.dp_replicate=1",
                "train.micro_batch_size=auto",
            ),
            replace(spec, launch=launch, parallelism=parts, train=train),
        )
        factor *= 2


def _micro(spec: RunSpec, overrides: tuple[str, ...], size: int) -> tuple[tuple[str, ...], RunSpec]:
    train = replace(spec.train, micro_batch_size=size)
    return (*overrides, f"train.micro_batch_size={size}"), replace(spec, train=train)
