"""The same run on fewer nodes: what an elastic restart inside the allocation may become.

Promises: every size trains on exactly the same global batches, in the same order, and no size needs
a micro-batch larger than the planned one. Fewer nodes are fewer data-parallel replicas (whole
copies of the weights first, then fewer shards of each); pp, cp, tp and ep stay, and accumulation
grows by as much as the ranks became fewer. A number of nodes over which the batch does not divide,
whose shards ep does not, or which leaves the pipeline's schedule a number of micro-batches that it
does not take, is no size.

All of it is a function of the frozen run and a number, so each worker derives the plan of its
generation from its world size, and nobody has to be told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from air_hpc.config.spec import RunSpec
from air_hpc.errors import BadInput, Problem
from air_hpc.plan.memory import memory_per_rank
from air_hpc.plan.mesh import shards_for_experts
from air_hpc.plan.schedule import takes
from air_hpc.plan.types import Mesh, Plan


def sizes(spec: RunSpec, plan: Plan) -> tuple[int, ...]:
    """The numbers of training nodes that a generation may have, largest first.

    The planned number alone for `same` and `spare`, every one that works from there down to
    `min_nodes` for `elastic`, none for `requeue` (no generation follows another in an attempt).
    """
    policy = spec.recovery.restart
    if policy == "requeue":
        return ()
    if policy != "elastic":
        return (plan.nodes,)
    fewest = spec.recovery.min_nodes or 1
    smaller = range(plan.nodes - 1, fewest - 1, -1)
    return (plan.nodes, *(n for n in smaller if plan_for(spec, plan, n) is not None))


def plan_for(spec: RunSpec, plan: Plan, nodes: int) -> Plan | None:
    """The plan on `nodes` nodes; None where the mesh or the batch does not divide over so many.

    The micro-batch is the planned one or, where a rank's share of the batch is no multiple of that,
    the largest smaller one that is. Where fewer shards would not fit into the device's memory (as
    estimated), each takes fewer sequences at a time. `lead_s` is the run's own: it was told to the
    scheduler. A predicted step time is of the planned size alone.
    """
    if nodes == plan.nodes:
        return plan
    ranks = nodes * plan.devices_per_node
    model_parallel = plan.mesh.pp * plan.mesh.cp * plan.mesh.tp
    if not 0 < nodes < plan.nodes or ranks % model_parallel:
        return None
    replicas = ranks // model_parallel
    batch = spec.train.global_batch_size
    if batch % replicas:
        return None
    found = _first_that_fits(spec, plan, replicas)
    if found is None:
        return None
    mesh, micro_batch_size = found
    return replace(
        plan,
        mesh=mesh,
        nodes=nodes,
        micro_batch_size=micro_batch_size,
        accumulation_steps=batch // replicas // micro_batch_size,
        memory_per_rank=memory_per_rank(spec, mesh, micro_batch_size),
        step_time_s=None,
    )


def plan_for_world(spec: RunSpec, plan: Plan, world_size: int) -> Plan:
    """The plan of a generation of `world_size` workers.

    Raises BadInput for a size that no generation of this run may have.
    """
    nodes, left_over = divmod(world_size, plan.devices_per_node)
    elastic = spec.recovery.restart == "elastic" and nodes >= (spec.recovery.min_nodes or 1)
    found = None
    if not left_over and (elastic or nodes == plan.nodes):
        found = plan_for(spec, plan, nodes)
    if found is None:
        allowed = (plan.nodes, *sizes(spec, plan))
        raise BadInput.single(
            "world_size",
            world_size,
            f"no generation of this run (recovery.restart={spec.recovery.restart}) has so many",
            allowed=", ".join(str(n * plan.devices_per_node) for n in dict.fromkeys(allowed)),
        )
    return found


def elastic_warning(spec: RunSpec, plan: Plan) -> list[Problem]:
    """A warning where `elastic` has no smaller size to go on with, and so is `same`."""
    if spec.recovery.restart != "elastic" or len(sizes(spec, plan)) > 1:
        return []
    fewest = spec.recovery.min_nodes or 1
    why = (
        f"train.global_batch_size ({spec.train.global_batch_size}) and the mesh divide over no"
        f" smaller number of nodes from {fewest} to {plan.nodes - 1}"
    )
    if fewest >= plan.nodes:
        why = f"the run has {plan.nodes} node(s) and may not have fewer than {fewest}"
    return [
        Problem(
            "recovery.restart",
            "elastic",
            f"{why}: a node that is lost ends in a requeue",
            hint=_batch_hint(spec, plan, fewest),
            warning=True,
        )
    ]


def _batch_hint(spec: RunSpec, plan: Plan, fewest: int) -> str:
    """The nearest batch above the present one that one node less divides as well."""
    ranks = (plan.nodes - 1) * plan.devices_per_node
    model_parallel = plan.mesh.pp * plan.mesh.cp * plan.mesh.tp
    if fewest >= plan.nodes or ranks % model_parallel:
        return ""
    both = (ranks // model_parallel) * plan.mesh.data_parallel_size
    return f"train.global_batch_size={-(-spec.train.global_batch_size // both) * both} would do"


def _first_that_fits(spec: RunSpec, plan: Plan, replicas: int) -> tuple[Mesh, int] | None:
    """Mesh and micro-batch: the widest that fits, or the one that needs least where none does."""
    memory_bytes = spec.accelerator.memory_bytes
    tried = list(_candidates(spec, plan, replicas))
    if not tried:
        return None
    needs = [memory_per_rank(spec, mesh, micro).total_bytes for mesh, micro in tried]
    for chosen, need in zip(tried, needs, strict=True):
        if memory_bytes is None or need <= memory_bytes:
            return chosen
    return tried[needs.index(min(needs))]


def _candidates(spec: RunSpec, plan: Plan, replicas: int) -> Iterator[tuple[Mesh, int]]:
    """In the order in which they are wanted: close to the planned sharding, then a wider one."""
    rank_batch = spec.train.global_batch_size // replicas
    cp, ep = plan.mesh.cp, plan.mesh.ep
    shards = [shards_for_experts(replicas, plan.mesh.dp_shard, cp, ep)]
    if plan.mesh.dp_shard > 1:
        shards.append(shards_for_experts(replicas, replicas, cp, ep))
    for shard in dict.fromkeys(shard for shard in shards if shard is not None):
        mesh = replace(plan.mesh, dp_replicate=replicas // shard, dp_shard=shard)
        for micro in range(min(rank_batch, plan.micro_batch_size), 0, -1):
            if rank_batch % micro == 0 and takes(spec.parallelism, rank_batch // micro):
                yield mesh, micro
