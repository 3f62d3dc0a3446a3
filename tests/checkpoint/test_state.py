"""What a state holds, and what each rank stages of it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from air_hpc.checkpoint.state import put_back, share_of, training_state

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


class TwoLayers(nn.Module):
    """Two matrices, a vector and a buffer that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("derived", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def test_names_and_values_are_those_of_torch_s_own_flattened_state() -> None:
    """What earlier checkpoints were written by."""
    model = TwoLayers()
    optimizer = stepped(model)
    state = training_state([model], optimizer, 0, torch.device("cpu"))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    theirs = get_optimizer_state_dict(model, optimizer, options=options)
    theirs = {k: v for k, v in theirs.items() if not k.startswith("param_groups.")}
    assert state["optimizer"].keys() == theirs.keys()
    assert all(torch.equal(state["optimizer"][name], v) for name, v in theirs.items())
    assert state["model"].keys() == get_model_state_dict(model).keys()


def test_loading_into_a_state_is_loading_into_model_and_optimizer() -> None:
    source, target = TwoLayers(), TwoLayers()
    saved = training_state([source], stepped(source), 0, torch.device("cpu"))
    optimizer = torch.optim.AdamW(target.parameters(), lr=0.1)
    before = target.first.weight.detach().clone()
    state = training_state([target], optimizer, 0, torch.device("cpu"))
    assert torch.equal(target.first.weight, before)
    for part in ("model", "optimizer"):
        for name, value in state[part].items():
            value.copy_(saved[part][name])
    put_back({**state, "random": {}}, [target], optimizer, 0)
    assert torch.equal(target.first.weight, source.first.weight)
    found = optimizer.state[target.first.weight]
    assert torch.equal(found["exp_avg"], saved["optimizer"]["state.first.weight.exp_avg"])
    assert found["step"] == 1


def test_a_second_copy_of_a_name_is_given_what_the_first_was_loaded_with() -> None:
    """As a rank of a V-shaped pipeline has that holds a tied head and its embedding."""
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.AdamW([first.weight, second.weight], lr=0.1)
    state = training_state([first, second], optimizer, 0, torch.device("cpu"))
    assert list(state["model"]) == ["weight"]
    state["model"]["weight"].fill_(5.0)
    state["optimizer"]["state.weight.exp_avg"].fill_(6.0)
    put_back({**state, "random": {}}, [first, second], optimizer, 0)
    assert torch.equal(second.weight, torch.full((2, 2), 5.0))
    assert torch.equal(optimizer.state[second.weight]["exp_avg"], torch.full((2, 2), 6.0))


def test_what_is_written_elsewhere_is_left_out_with_its_moments() -> None:
    state = {
        "model": {"a": torch.zeros(1), "b": torch.zeros(1)},
        "optimizer": {"state.a.exp_avg": torch.zeros(1), "state.b.exp_avg": torch.zeros(1)},
        "random": {},
    }
    share = share_of(state, 0, 1, elsewhere=("a",))
    assert list(share["model"]) == ["b"]
    assert list(share["optimizer"]) == ["state.b.exp_avg"]
