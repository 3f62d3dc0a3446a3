"""Invariant 6: whatever the ranks, accumulation and resumes, the same sequence is consumed once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from air_hpc.data.batches import batch_of_step
from air_hpc.data.order import SampleOrder, permute, rank_indices


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**62), st.integers(0, 5))
def test_an_epoch_is_a_permutation(samples: int, seed: int, epoch: int) -> None:
    sent = permute(np.arange(samples), samples, seed, epoch)
    assert sorted(sent) == list(range(samples))


@st.composite
def divisions(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """A global batch, and a (ranks, accumulation) that divides it for each part of a run."""
    batch = draw(st.sampled_from([4, 6, 8, 12, 24, 48]))
    divisors = [d for d in range(1, batch + 1) if batch % d == 0]
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        ranks = draw(st.sampled_from(divisors))
        accumulation = draw(st.sampled_from([a for a in divisors if (batch // ranks) % a == 0]))
        parts.append((ranks, accumulation))
    return batch, parts


@settings(max_examples=80, deadline=None)
@given(divisions(), st.integers(5, 200), st.integers(0, 1000), st.data())
def test_any_division_and_any_resumes_consume_the_same_sequence_once(
    division: tuple[int, list[tuple[int, int]]], samples: int, seed: int, data: st.DataObject
) -> None:
    batch, parts = division
    order = SampleOrder(samples, seed)
    step, consumed = 0, []
    for ranks, accumulation in parts:
        for _ in range(data.draw(st.integers(1, 6))):
            for rank in range(ranks):
                indices = rank_indices(step, batch, rank, ranks, accumulation)
                assert indices.shape == (accumulation, batch // ranks // accumulation)
                consumed.append(order.samples_at(indices).ravel())
            step += 1
    whole = order.samples_at(np.arange(step * batch))
    assert np.array_equal(np.concatenate(consumed), whole)
    for epoch in range(len(whole) // samples):
        assert sorted(whole[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


def test_epochs_and_seeds_differ() -> None:
    base = permute(np.arange(1000), 1000, 0, 0)
    for seed, epoch in [(0, 1), (1, 0), (1, 1)]:
        same = int((base == permute(np.arange(1000), 1000, seed, epoch)).sum())
        assert same < 20  # about one in a thousand stays by chance


def test_the_order_is_well_mixed() -> None:
    sent = permute(np.arange(10_000), 10_000, 7, 0)
    assert abs(np.corrcoef(np.arange(10_000), sent)[0, 1]) < 0.05
    assert len(np.unique(np.diff(sent))) > 5000


def test_the_order_never_changes_between_versions() -> None:
    order = SampleOrder(1001, 3)
    assert order.samples_at(np.arange(5)).tolist() == [917, 6, 141, 355, 71]


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="8 does not divide by 3 ranks x 1"):
        rank_indices(0, 8, 0, 3, 1)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), max_size=6),
    st.integers(0, 40),
)
def test_steps_take_the_batches_that_no_rollback_stepped_over_each_once(
    ranges: list[tuple[int, int]], steps: int
) -> None:
    skipped = {batch for first, last in ranges for batch in range(first, last + 1)}
    left = [batch for batch in range(200) if batch not in skipped]
    assert [batch_of_step(step, ranges) for step in range(steps)] == left[:steps]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 6)), max_size=4), st.data())
def test_a_run_rolled_back_any_number_of_times_trains_on_what_is_left_once(
    windows: list[tuple[int, int]], data: st.DataObject
) -> None:
    """As a worker and its coordinator do it: from a checkpoint on, over the batches since."""
    ranges: list[tuple[int, int]] = []
    trained: list[int] = []
    for ahead, width in windows:
        saved = len(trained) + ahead
        trained += [batch_of_step(step, ranges) for step in range(len(trained), saved)]
        bad = [batch_of_step(step, ranges) for step in range(saved, saved + width + 1)]
        ranges.append((bad[0], bad[-1]))
        # The checkpoint that is loaded in the end may be an older one: its steps stay as they were.
        back = data.draw(st.integers(0, saved))
        assert [batch_of_step(step, ranges) for step in range(back, saved)] == trained[back:]
        trained = trained[:back]
    trained += [batch_of_step(step, ranges) for step in range(len(trained), 60)]
    skipped = {batch for first, last in ranges for batch in range(first, last + 1)}
    assert trained == [batch for batch in range(60 + len(skipped)) if batch not in skipped][:60]
