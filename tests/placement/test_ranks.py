"""Rank order: one list from which every rank variable derives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_hpc.placement.ranks import assign_ranks

node_lists = st.lists(
    st.from_regex(r"[a-z]{1,3}[0-9]{1,3}", fullmatch=True), min_size=1, max_size=9, unique=True
)
device_counts = st.sampled_from([1, 2, 3, 4, 8])


@given(nodes=node_lists, devices_per_node=device_counts)
def test_ranks_and_places_are_in_one_to_one_correspondence(
    nodes: list[str], devices_per_node: int
) -> None:
    places = assign_ranks(nodes, devices_per_node)
    world_size = len(nodes) * devices_per_node
    assert [place.rank for place in places] == list(range(world_size))
    assert len({(place.node, place.local_rank) for place in places}) == world_size
    assert {place.local_rank for place in places} == set(range(devices_per_node))


@given(nodes=node_lists, devices_per_node=device_counts)
def test_node_ranks_follow_the_given_order(nodes: list[str], devices_per_node: int) -> None:
    for place in assign_ranks(nodes, devices_per_node):
        assert nodes[place.node_rank] == place.node


@given(nodes=node_lists, devices_per_node=device_counts, data=st.data())
def test_a_tensor_parallel_group_that_fits_a_node_stays_inside_one(
    nodes: list[str], devices_per_node: int, data: st.DataObject
) -> None:
    divisors = [tp for tp in range(1, devices_per_node + 1) if devices_per_node % tp == 0]
    tp = data.draw(st.sampled_from(divisors))
    places = assign_ranks(nodes, devices_per_node)
    for first in range(0, len(places), tp):  # tp is the innermost axis: neighbours in rank
        assert len({place.node for place in places[first : first + tp]}) == 1


def test_a_node_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="named twice"):
        assign_ranks(["n1", "n2", "n1"], 2)
