"""Which layers each stage of a pipeline has.

Layers stay in order and are weighed by the FLOPs of a sequence, attention and experts in, so that
layers with a window, dense ones before those with experts, and the output head (as heavy as
several layers in a small model with a large vocabulary) count as what they cost. The largest stage
decides how fast the pipeline is, so it is made as small as any cut can make it.

The embedding multiplies nothing. What it costs is memory, so it decides between cuts whose largest
stage is the same: the one with the smallest sum of squares of stage parameters is taken, the
embedding and the head in, and where that leaves several, the one with fewer layers in the earlier
stages, which hold more micro-batches at a time.

Each stage has at least one layer, but for the last, which may be the head alone where that is as
heavy as it gets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from air_hpc.config.spec import ModelSpec
from air_hpc.errors import BadInput
from air_hpc.plan.flops import block_flops, block_parameters, embedding_parameters, head_flops


@lru_cache(maxsize=512)
def cut_layers(model: ModelSpec, sequence_length: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """The numbers of the layers of each stage, in order; together all of them, once each.

    Raises BadInput for more stages than layers.
    """
    if not 1 <= stages <= model.layers:
        message = f"so many stages cannot be cut from model.layers ({model.layers})"
        raise BadInput.single("stages", stages, message, allowed=f"1 to {model.layers}")
    layers = range(model.layers)
    costs = [block_flops(model, layer, sequence_length).total.causal for layer in layers]
    sizes = [float(block_parameters(model, layer).total) for layer in layers]
    embedding = float(embedding_parameters(model))
    ends = cut(costs, sizes, stages, head_cost=head_flops(model), end_sizes=(embedding, embedding))
    starts = (0, *ends[:-1])
    return tuple(tuple(range(a, b)) for a, b in zip(starts, ends, strict=True))


def cut(
    costs: Sequence[float],
    sizes: Sequence[float],
    stages: int,
    *,
    head_cost: float = 0.0,
    end_sizes: tuple[float, float] = (0.0, 0.0),
) -> tuple[int, ...]:
    """Where each stage ends: the layer after its last.

    `head_cost` is added to the last stage, `end_sizes` to the sizes of the first and the last one.
    Exact: the largest cost is found among the costs that a stage can have, then the best cut under
    it by dynamic programming.
    """
    layers = len(costs)
    cost_before = (0.0, *accumulate(costs))
    size_before = (0.0, *accumulate(sizes))
    most = _least_largest(cost_before, stages, head_cost)
    # best[i]: (sum of squares, ends) for the first layers up to i in the stages so far.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        last = stage == stages - 1
        extra = end_sizes[0] * (stage == 0) + end_sizes[1] * last
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (total, ends) in best.items():
            shortest = start if last else start + 1
            for end in range(layers if last else shortest, layers + 1):
                cost = cost_before[end] - cost_before[start] + head_cost * last
                if cost > most * (1 + 1e-12):
                    break
                size = size_before[end] - size_before[start] + extra
                candidate = (total + size * size, (*ends, end))
                if end not in reached or candidate < reached[end]:
                    reached[end] = candidate
        best = reached
    return best[layers][1]


def _least_largest(cost_before: Sequence[float], stages: int, head_cost: float) -> float:
    """The smallest largest stage of any cut."""
    layers = len(cost_before) - 1
    possible = {head_cost}
    for start in range(layers):
        for end in range(start + 1, layers + 1):
            possible.add(cost_before[end] - cost_before[start])
        possible.add(cost_before[layers] - cost_before[start] + head_cost)
    ordered = sorted(possible)
    found = bisect_left(ordered, True, key=lambda most: _do(cost_before, stages, head_cost, most))
    return ordered[found]


def _do(cost_before: Sequence[float], stages: int, head_cost: float, most: float) -> bool:
    """Whether `stages` stages suffice when none may cost more: each takes as much as it can."""
    layers = len(cost_before) - 1
    limit = most * (1 + 1e-12)
    if head_cost > limit:
        return False
    start = 0
    for stage in range(stages - 1):
        end = start
        room = layers - (stages - 2 - stage)  # one layer each for those between here and the last
        while end < room and cost_before[end + 1] - cost_before[start] <= limit:
            end += 1
        if end == start:
            return False
        start = end
    return cost_before[layers] - cost_before[start] + head_cost <= limit
