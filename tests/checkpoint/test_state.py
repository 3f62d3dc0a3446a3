"""What each rank stages of a state."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from air_hpc.checkpoint.state import share_of

pytestmark = pytest.mark.torch
SIZES = {"embedding": 400, "wq": 100, "wk": 90, "w1": 210, "w2": 200, "norm": 3}


@pytest.mark.parametrize("ranks", [1, 2, 3, 20])
def test_replicas_share_out_what_they_all_hold(ranks: int) -> None:
    """Eight ranks of a node once staged eight whole models in its memory."""
    model = {name: torch.zeros(size) for name, size in SIZES.items()}
    moments = {f"state.{name}.exp_avg": torch.zeros(size) for name, size in SIZES.items()}
    names: Counter[str] = Counter()
    held = []
    for rank in range(ranks):
        random = {f"{rank}.cpu": torch.zeros(5)}
        share = share_of({"model": model, "optimizer": moments, "random": random}, rank, ranks)
        assert share["random"] == random
        mine = {**share.get("model", {}), **share.get("optimizer", {})}
        assert all(tensor is {**model, **moments}[name] for name, tensor in mine.items())
        assert all(share[part] for part in share)
        names.update(mine.keys())
        held.append(sum(tensor.nbytes for tensor in mine.values()))
    assert names == Counter([*model, *moments])
    largest = max(tensor.nbytes for tensor in model.values())
    assert max(held) <= sum(held) / ranks + largest


def test_an_optimizer_without_state_keeps_its_place() -> None:
    state = {"model": {"w": torch.zeros(1)}, "optimizer": {}, "random": {}}
    assert share_of(state, 0, 2)["optimizer"] == {}
