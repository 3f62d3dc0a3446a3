"""Rings on two levels: closed forms, and what is unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_hpc.hardware.accelerator import AcceleratorSpec
from air_hpc.hardware.network import Collective, Group, Links, collective_s, links_of, moved

DGX = Links(
    domain=8,
    scale_up_bytes_per_s=450e9,
    scale_up_latency_s=3.4e-6,
    scale_out_bytes_per_s=50e9,
    scale_out_latency_s=9.6e-6,
)
GB = 1e9


def test_a_group_inside_a_domain_moves_at_the_fast_links_rate() -> None:
    took = collective_s("all_gather", Group(8), 8 * GB, DGX)
    assert took == pytest.approx(7 * 3.4e-6 + 7 * GB / 450e9)


def test_a_group_over_whole_nodes_uses_every_devices_share_of_the_network() -> None:
    took = collective_s("reduce_scatter", Group(16), 16 * GB, DGX)
    assert took == pytest.approx(14 * 3.4e-6 + 9.6e-6 + 15 * GB / 400e9)


def test_a_group_with_one_rank_a_node_has_one_devices_share() -> None:
    took = collective_s("all_reduce", Group(4, stride=8), 4 * GB, DGX)
    assert took == pytest.approx(2 * 3 * 9.6e-6 + 2 * 3 * GB / 50e9)


def test_a_node_with_a_faster_network_than_its_links_is_bound_by_the_links() -> None:
    fast = replace(DGX, scale_out_bytes_per_s=100e9)
    took = collective_s("all_gather", Group(16), 16 * GB, fast)
    assert took is not None
    assert took > 15 * GB / 450e9


def test_an_all_to_all_uses_both_links_at_once() -> None:
    inside = collective_s("all_to_all", Group(8), GB, DGX)
    assert inside == pytest.approx(3.4e-6 + 7 / 8 * GB / 450e9)
    across = collective_s("all_to_all", Group(16), GB, DGX)
    assert across == pytest.approx(9.6e-6 + 8 / 16 * GB / 50e9)


def test_an_unknown_link_gives_no_time_unless_it_is_not_needed() -> None:
    alone = replace(DGX, scale_out_bytes_per_s=None)
    assert collective_s("all_gather", Group(8), GB, alone) is not None
    assert collective_s("all_gather", Group(16), GB, alone) is None
    assert collective_s("all_to_all", Group(16), GB, alone) is None
    assert collective_s("all_gather", Group(1), GB, Links(8, None, 0, None, 0)) == 0


def test_the_domain_is_the_accelerators_or_a_node() -> None:
    assert links_of(AcceleratorSpec("a", scale_up_devices=72), 4).domain == 72
    assert links_of(AcceleratorSpec("a"), 4).domain == 4


@given(
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p"]),
    st.integers(1, 512),
    st.sampled_from([1, 2, 8, 64]),
    st.floats(1, 1e12),
)
def test_no_group_is_faster_than_its_bytes_over_the_best_link(
    kind: Collective, size: int, stride: int, whole: float
) -> None:
    took = collective_s(kind, Group(size, stride), whole, DGX)
    assert took is not None
    assert took >= 0.999 * moved(kind, Group(size, stride), whole) / 450e9 / 2
    assert (took == 0) == (size == 1)
