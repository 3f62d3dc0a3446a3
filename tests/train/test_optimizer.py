from __future__ import annotations

import itertools

import pytest
import torch

from air_hpc.config.spec import ModelSpec, OptimizerSpec, ScheduleSpec
from air_hpc.models import Decoder
from air_hpc.train.optimizer import build_optimizer, learning_rate, set_learning_rate

CPU = torch.device("cpu")


def rates(schedule: ScheduleSpec, steps: int = 100) -> list[float]:
    return [learning_rate(step, steps, 1.0, schedule) for step in range(steps)]


def test_warm_up_rises_linearly_to_the_peak_and_starts_above_zero() -> None:
    values = rates(ScheduleSpec(name="constant", warmup_steps=4))
    assert values[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert set(values[4:]) == {1.0}


def test_cosine_ends_at_its_minimum_and_never_rises_after_warm_up() -> None:
    values = rates(ScheduleSpec(name="cosine", warmup_steps=10, min_lr_ratio=0.1))
    assert values[-1] == pytest.approx(0.1)
    assert values[9] == 1.0
    assert all(a >= b for a, b in itertools.pairwise(values[9:]))
    assert values[54] == pytest.approx(0.55)  # the middle of the fall


def test_wsd_is_stable_until_its_last_part() -> None:
    values = rates(ScheduleSpec(name="wsd", warmup_steps=10, min_lr_ratio=0.0, decay_ratio=0.2))
    assert set(values[9:80]) == {1.0}
    assert values[80] == pytest.approx(0.95)
    assert values[-1] == pytest.approx(0.0)


def test_schedules_survive_odd_lengths() -> None:
    for name in ("cosine", "wsd", "constant"):
        for steps, warmup in [(1, 0), (1, 5), (5, 5), (3, 10)]:
            schedule = ScheduleSpec(name=name, warmup_steps=warmup)
            assert all(0 < value <= 1 for value in rates(schedule, steps))


def test_weight_decay_acts_on_matrices_only() -> None:
    model = Decoder(ModelSpec(dim=16, layers=1, heads=2, kv_heads=2, ffn_dim=32, vocab_size=32), 8)
    optimizer = build_optimizer(model.parameters(), OptimizerSpec(weight_decay=0.5), CPU)
    decays = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    for name, parameter in model.named_parameters():
        assert decays[id(parameter)] == (0.0 if "norm" in name else 0.5), name


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_learning_rate_reaches_every_group(name: str) -> None:
    weight, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = build_optimizer([weight, bias], OptimizerSpec(name=name, weight_decay=0), CPU)
    set_learning_rate(optimizer, 0.25)
    weight.grad, bias.grad = torch.ones(2, 2), torch.ones(2)
    optimizer.step()
    assert torch.allclose(weight, torch.tensor(0.75))
    assert torch.allclose(bias, torch.tensor(0.75))
