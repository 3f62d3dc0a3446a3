"""The worker's pre-flight, on real gloo ranks: two nodes of two, and what it must leave alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from air_hpc.config.spec import RunSpec
from air_hpc.plan.types import Mesh, Plan
from air_hpc.probes import ranks
from air_hpc.probes.ranks import (
    DeviceUnfit,
    Here,
    LinkUnfit,
    RanksAsked,
    check_ranks,
    judge_rate,
    raise_if_unfit,
)
from air_hpc.probes.result import Check, worst
from air_hpc.rundir.fence import Token
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.spool import effective_samples
from air_hpc.session.session import Session
from tests.torch_ranks import join_world, run_ranks
from tests.train.runs import make_run, next_token, plan_for, small_spec

pytestmark = pytest.mark.torch
FREE = RanksAsked("fp32", None, None, 20.0)


def here_of(world: Any, local_world_size: int) -> Here:
    return Here(
        world.rank,
        world.world_size,
        local_world_size,
        f"n{world.rank // local_world_size}",
        world.device,
        world.control,
    )


def checked_rank(rank: int, rendezvous: str, size: int, asked: RanksAsked) -> Any:
    world = join_world(rank, rendezvous, Mesh(dp_replicate=size))
    before = torch.get_rng_state()
    groups = len(dist.distributed_c10d._world.pg_map)
    checks = check_ranks(here_of(world, 2), asked)
    same = torch.equal(before, torch.get_rng_state())
    return checks, same, len(dist.distributed_c10d._world.pg_map) - groups


def test_devices_and_links_are_tried_and_nothing_is_left_behind() -> None:
    for checks, same_random_state, groups_left in run_ranks(4, checked_rank, 4, FREE):
        assert [c.name for c in checks] == ["matmul", "all_reduce_node", "all_reduce_world"]
        assert all(check.ok is True and check.value > 0 for check in checks)
        assert checks[2].said.startswith("4 ranks, 1 MiB")
        assert same_random_state
        assert groups_left == 0


def test_a_link_slower_than_its_floor_is_told_with_both_values() -> None:
    asked = RanksAsked("fp32", None, 1e-9, 20.0)
    for checks, _, _ in run_ranks(2, checked_rank, 2, asked):
        assert [check.name for check in checks] == ["matmul", "all_reduce_node"]
        assert (checks[1].ok, checks[1].floor) == (False, 1e-9)
        with pytest.raises(LinkUnfit, match=r"1e-06 ms are allowed"):
            raise_if_unfit(checks)


def missing_rank(rank: int, rendezvous: str) -> Any:
    world = join_world(rank, rendezvous, Mesh(dp_replicate=2))
    began = time.monotonic()
    if rank == 1:
        dist.all_gather_object([None, None], 1.0, group=world.control)  # the matmul's part alone
    else:
        with pytest.raises(RuntimeError):
            check_ranks(here_of(world, 2), RanksAsked("fp32", None, None, 0.5))
    dist.barrier(group=world.control)
    return time.monotonic() - began


def test_a_rank_that_does_not_come_is_not_waited_for_beyond_the_deadline() -> None:
    waited, _ = run_ranks(2, missing_rank)
    assert 1.0 < waited < 30


def trained(
    rank: int, rendezvous: str, run: str, token: str, spec: RunSpec, plan: Plan, preflight: bool
) -> None:
    from air_hpc.train.loop import train

    world = join_world(rank, rendezvous, plan.mesh)
    if preflight:
        check_ranks(here_of(world, 2), FREE)
    session = Session.standalone(
        RunDir(Path(run)), rank=rank, world_size=2, token=Token.parse(token)
    )
    train(session, spec, plan, world, peak_flops_per_device=1e12)


def test_losses_are_bit_equal_with_and_without_it(tmp_path: Path) -> None:
    """With dropout: a number drawn from the random state would show."""
    spec = small_spec(4)
    plan = plan_for(spec, Mesh(dp_replicate=2))
    losses = []
    for preflight in (False, True):
        run = make_run(tmp_path / str(preflight))
        run_ranks(2, trained, str(run.path), next_token(run), spec, plan, preflight)
        samples = effective_samples(run)
        losses.append({step: sample.metrics["train/loss"] for step, sample in samples.items()})
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("rate", "fit"), [(0.69e12, False), (0.71e12, True), (2e12, True)])
def test_a_device_is_held_against_the_median_of_all(rate: float, fit: bool) -> None:
    rates = [rate, 1e12, 1e12, 1.05e12, 0.98e12]
    check = judge_rate(rate, rates, 0.7, "H100 on n3")
    assert check.ok is fit
    assert check.floor == pytest.approx(0.7 * 1e12)
    if not fit:
        with pytest.raises(DeviceUnfit, match=r"H100 on n3: 0\.69 TFLOP/s, the median of 5 is 1,"):
            raise_if_unfit([check])


def test_without_a_floor_no_device_is_too_slow() -> None:
    assert judge_rate(1.0, [1.0, 1e12, 1e12], None, "cpu").ok is True


def test_a_gpu_has_a_floor_where_none_is_set_and_a_cpu_has_none() -> None:
    assert ranks.GPU_MATMUL_RATIO < 0.95
    found = judge_rate(1.0, [1.0, 9.0, 9.0], ranks.GPU_MATMUL_RATIO, "gpu")
    assert found.ok is False


def test_a_nodes_word_is_its_worst_ranks() -> None:
    told = [
        Check("matmul", True, 3.0, unit="FLOP/s"),
        Check("matmul", True, 2.0, unit="FLOP/s"),
        Check("all_reduce_node", True, 0.1, unit="s"),
        Check("all_reduce_node", True, 0.4, unit="s"),
        Check("matmul", False, 2.5, unit="FLOP/s"),
    ]
    assert [(c.name, c.ok, c.value) for c in worst(told)] == [
        ("matmul", False, 2.5),
        ("all_reduce_node", True, 0.4),
    ]
    assert worst(told[:2])[0].value == 2.0
