"""The cut is the best there is, and says how ends and ties are weighed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_hpc.config.compose import Composer
from air_hpc.config.spec import ModelSpec, MoeSpec
from air_hpc.errors import BadInput
from air_hpc.plan.stages import cut, cut_layers

SHARED = Composer()


def every_cut(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for ends in itertools.combinations_with_replacement(range(1, layers + 1), stages - 1):
        whole = (*ends, layers)
        starts = (0, *ends)
        if all(b > a for a, b in zip(starts[:-1], ends, strict=True)):
            yield whole


def largest(costs: list[float], head: float, ends: tuple[int, ...]) -> float:
    starts = (0, *ends[:-1])
    sums = [sum(costs[a:b]) for a, b in zip(starts, ends, strict=True)]
    sums[-1] += head
    return max(sums)


@given(
    st.lists(st.integers(1, 9).map(float), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(0, 20).map(float),
    st.tuples(st.integers(0, 9).map(float), st.integers(0, 9).map(float)),
)
def test_no_cut_has_a_smaller_largest_stage_and_ties_go_by_size(
    costs: list[float], stages: int, head: float, end_sizes: tuple[float, float]
) -> None:
    stages = min(stages, len(costs))
    sizes = [1.0] * len(costs)
    found = cut(costs, sizes, stages, head_cost=head, end_sizes=end_sizes)

    def rank(ends: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        lengths = [float(b - a) for a, b in zip((0, *ends[:-1]), ends, strict=True)]
        lengths[0] += end_sizes[0]
        lengths[-1] += end_sizes[1]
        return largest(costs, head, ends), sum(n * n for n in lengths), ends

    assert found == min(every_cut(len(costs), stages), key=rank)


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([256, 32_000]))
def test_all_layers_once_each_in_order(layers: int, stages: int, vocabulary: int) -> None:
    model = ModelSpec(layers=layers, vocab_size=vocabulary)
    if stages > layers:
        with pytest.raises(BadInput, match="stages"):
            cut_layers(model, 128, stages)
        return
    parts = cut_layers(model, 128, stages)
    assert len(parts) == stages
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert all(parts[:-1]), "only the last, with the head, may have none"


def lengths(model: ModelSpec, sequence_length: int, stages: int) -> list[int]:
    return [len(part) for part in cut_layers(model, sequence_length, stages)]


def test_the_head_counts_by_its_flops_and_the_embedding_by_its_memory() -> None:
    """Llama 8B: the head is 2.1 blocks' FLOPs, and so large that the embedding weighs as much."""
    model = SHARED.compose(["model=llama_8b"]).model
    assert lengths(model, 8192, 4) == [8, 9, 9, 6]
    assert lengths(model, 8192, 2) == [17, 15]
    large = SHARED.compose(["model=llama_405b"]).model
    assert sum(lengths(large, 8192, 16)) == 126
    assert lengths(large, 8192, 16)[0] < 8


def test_a_head_heavier_than_the_layers_stands_alone() -> None:
    assert lengths(ModelSpec(vocab_size=2_000_000), 128, 2) == [4, 0]


def test_layers_count_by_what_they_attend_to_and_by_their_experts() -> None:
    local = ModelSpec(layers=8, dim=64, ffn_dim=64, sliding_window=64, global_every=4)
    assert lengths(local, 65_536, 2) == [4, 4]
    first_dense = ModelSpec(layers=8, moe=MoeSpec(experts=8, active_experts=4, dense_layers=4))
    assert lengths(first_dense, 128, 2)[0] > 4
