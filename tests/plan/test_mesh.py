from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_hpc.config.spec import LaunchSpec, ParallelismSpec, RunSpec
from air_hpc.plan.mesh import largest_divisor, nearest_divisors, resolve_mesh


def spec_of(nodes: int, devices: int, **degrees: object) -> RunSpec:
    return RunSpec(
        launch=LaunchSpec(nodes=nodes, devices_per_node=devices),
        parallelism=ParallelismSpec(**degrees),  # type: ignore[arg-type]
    )


DEGREE = st.sampled_from([1, 2, 3, 4, 8])


@given(
    st.integers(1, 64),
    st.integers(1, 16),
    st.one_of(DEGREE, st.just("auto")),
    st.one_of(DEGREE, st.just("auto")),
    DEGREE,
    DEGREE,
    DEGREE,
)
def test_a_mesh_multiplies_to_the_world_or_says_both_numbers(
    nodes: int, devices: int, replicate: object, shard: object, pp: int, cp: int, tp: int
) -> None:
    spec = spec_of(nodes, devices, dp_replicate=replicate, dp_shard=shard, pp=pp, cp=cp, tp=tp)
    mesh, problems = resolve_mesh(spec)
    if mesh is not None:
        assert problems == []
        assert mesh.world_size == nodes * devices
        assert (mesh.pp, mesh.cp, mesh.tp) == (pp, cp, tp)
        assert replicate in ("auto", mesh.dp_replicate)
        assert shard in ("auto", mesh.dp_shard)
        return
    (problem,) = problems
    fixed = [d for d in (replicate, shard, pp, cp, tp) if isinstance(d, int)]
    assert f"to {math.prod(fixed)}," in problem.message
    assert f"the world is {nodes * devices} " in problem.message


def test_two_automatic_degrees_shard_inside_a_node() -> None:
    mesh, _ = resolve_mesh(spec_of(4, 8, dp_replicate="auto", dp_shard="auto"))
    assert mesh is not None
    assert (mesh.dp_replicate, mesh.dp_shard) == (4, 8)
    mesh, _ = resolve_mesh(spec_of(4, 8, dp_replicate="auto", dp_shard="auto", tp=2))
    assert mesh is not None
    assert (mesh.dp_replicate, mesh.dp_shard, mesh.tp) == (4, 4, 2)


def test_the_nearest_that_work_do_work() -> None:
    spec = spec_of(2, 4, dp_replicate=1, dp_shard=4)
    _, (problem,) = resolve_mesh(spec)
    assert "parallelism.dp_shard=8" in problem.hint
    assert "parallelism.dp_replicate=2" in problem.hint
    assert "launch.nodes=1" in problem.hint
    for change in ({"dp_shard": 8}, {"dp_replicate": 2}):
        fixed = dataclasses.replace(
            spec, parallelism=dataclasses.replace(spec.parallelism, **change)
        )
        assert resolve_mesh(fixed)[0] is not None


def test_experts_lie_inside_the_data_parallel_ranks() -> None:
    _, problems = resolve_mesh(spec_of(2, 4, dp_shard="auto", dp_replicate=1, ep=3))
    assert [p.key for p in problems] == ["parallelism.ep"]


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_divisors_near_a_number(number: int, wanted: int) -> None:
    largest = largest_divisor(number, wanted)
    assert number % largest == 0
    assert largest <= wanted
    named = [int(text) for text in nearest_divisors(number, wanted).split(" or ")]
    assert named
    assert all(number % divisor == 0 for divisor in named)


@pytest.mark.parametrize("number", [10**18 + 9, 2**62])
def test_a_huge_number_is_answered_at_once(number: int) -> None:
    assert nearest_divisors(number, 3)
    assert nearest_divisors(number, number - 1)
    assert largest_divisor(number, 8)
