"""Resolves the degrees of a mesh against the world, or says by how much they miss it."""

from __future__ import annotations

import math

from air_hpc.config.spec import ParallelismSpec, RunSpec
from air_hpc.errors import Problem
from air_hpc.plan.types import Mesh

_SEARCH = 10_000


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` that is not above `at_most` (at least 1)."""
    return next(d for d in range(min(number, at_most), 0, -1) if number % d == 0)


def nearest_divisors(number: int, wanted: int) -> str:
    """The divisors of `number` on either side of `wanted`, as text; looks a bounded way around."""
    start = min(wanted, number)
    below = (d for d in range(start, max(0, start - _SEARCH), -1) if number % d == 0)
    above = (d for d in range(wanted + 1, min(number, wanted + _SEARCH) + 1) if number % d == 0)
    near = [next(below, None), next(above, None)]
    return " or ".join(str(d) for d in near if d is not None) or "1"


def resolve_mesh(spec: RunSpec) -> tuple[Mesh | None, list[Problem]]:
    """The mesh with every `auto` filled so that it multiplies to nodes · devices_per_node.

    Where both data-parallel degrees are `auto`, weights are sharded inside a node and replicated
    across nodes (HSDP): the widest sharding that a node holds and ep divides, or where no such is,
    the narrowest beyond a node.
    """
    asked = spec.parallelism
    world = spec.launch.nodes * spec.launch.devices_per_node
    fixed = asked.pp * asked.cp * asked.tp * _fixed_data_parallel(asked)
    both_given = isinstance(asked.dp_replicate, int) and isinstance(asked.dp_shard, int)
    if world % fixed or (both_given and world != fixed):
        return None, [_does_not_multiply(spec, fixed, world, exact=both_given)]
    replicate, shard = _filled(asked, world // fixed, spec.launch.devices_per_node)
    mesh = Mesh(asked.pp, replicate, shard, asked.cp, asked.tp, asked.ep)
    problems = _expert_problems(spec, mesh)
    return (None if problems else mesh), problems


def _filled(asked: ParallelismSpec, rest: int, devices_per_node: int) -> tuple[int, int]:
    """dp_replicate and dp_shard, those that are `auto` taking the `rest` of the world."""
    replicate, shard = asked.dp_replicate, asked.dp_shard
    if isinstance(shard, int):
        return (replicate if isinstance(replicate, int) else rest), shard
    if isinstance(replicate, int):
        return replicate, rest
    in_node = max(1, devices_per_node // (asked.cp * asked.tp))
    shard = shards_for_experts(rest, in_node, asked.cp, asked.ep) or largest_divisor(rest, in_node)
    return rest // shard, shard


def shards_for_experts(replicas: int, wanted: int, cp: int, ep: int) -> int | None:
    """A divisor of `replicas` that with cp holds whole groups of ep ranks: the largest up to
    `wanted`, or the smallest above it; None where there is none."""
    fitting = [d for d in divisors(replicas) if d * cp % ep == 0]
    below = [d for d in fitting if d <= wanted]
    return below[-1] if below else fitting[0] if fitting else None


def divisors(number: int) -> list[int]:
    """All divisors of a number, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _fixed_data_parallel(asked: ParallelismSpec) -> int:
    degrees = (asked.dp_replicate, asked.dp_shard)
    product = 1
    for degree in degrees:
        product *= degree if isinstance(degree, int) else 1
    return product


def _does_not_multiply(spec: RunSpec, product: int, world: int, *, exact: bool) -> Problem:
    asked, launch = spec.parallelism, spec.launch
    degrees = (
        f"pp {asked.pp} × dp_replicate {asked.dp_replicate} × dp_shard {asked.dp_shard}"
        f" × cp {asked.cp} × tp {asked.tp}"
    )
    message = f"the mesh ({degrees}) multiplies to {product}"
    if not exact:
        message = f"the fixed degrees of the mesh ({degrees}) multiply to {product}"
    message += (
        f", the world is {world} (launch.nodes {launch.nodes}"
        f" × launch.devices_per_node {launch.devices_per_node})"
    )
    allowed = f"a product of {world}" if exact else f"a divisor of {world}"
    return Problem("parallelism", spec.parallelism.name, message, allowed, _way_out(spec, world))


def _way_out(spec: RunSpec, world: int) -> str:
    asked, launch = spec.parallelism, spec.launch
    model_parallel = asked.pp * asked.cp * asked.tp
    ways: list[str] = []
    if world % model_parallel == 0:
        rest = world // model_parallel
        replicate, shard = asked.dp_replicate, asked.dp_shard
        if isinstance(replicate, int) and rest % replicate == 0:
            ways.append(f"parallelism.dp_shard={rest // replicate}")
        if isinstance(shard, int) and rest % shard == 0:
            ways.append(f"parallelism.dp_replicate={rest // shard}")
    else:
        for axis in ("tp", "cp", "pp"):
            degree = getattr(asked, axis)
            others = model_parallel // degree
            if degree > 1 and world % others == 0:
                near = nearest_divisors(world // others, degree)
                ways.append(f"parallelism.{axis}={near}")
    product = model_parallel * _fixed_data_parallel(asked)
    nodes = -(-product // launch.devices_per_node)
    if nodes * launch.devices_per_node == product and nodes != launch.nodes:
        ways.append(f"launch.nodes={nodes}")
    return "Nearest that work: " + ", ".join(dict.fromkeys(ways)) if ways else ""


def _expert_problems(spec: RunSpec, mesh: Mesh) -> list[Problem]:
    room = mesh.shard_size
    if room % mesh.ep == 0:
        return []
    message = (
        f"ep ({mesh.ep}) does not divide dp_shard × cp ({mesh.dp_shard} × {mesh.cp} = {room}),"
        " the ranks that it lies inside"
    )
    ways = [f"parallelism.ep={nearest_divisors(room, mesh.ep)}"]
    wider = shards_for_experts(mesh.data_parallel_size, mesh.dp_shard, mesh.cp, mesh.ep)
    if wider is not None:
        replicate = mesh.data_parallel_size // wider
        ways.append(f"parallelism.dp_shard={wider} parallelism.dp_replicate={replicate}")
    hint = "Nearest that work: " + ", ".join(ways)
    return [Problem("parallelism.ep", str(mesh.ep), message, f"a divisor of {room}", hint)]
