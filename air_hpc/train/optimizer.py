"""Optimizers and learning-rate schedules.

A schedule is a pure function of the step: nothing of it is saved, and a resumed run cannot be a
step off. Step 0 is the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from air_hpc.config.spec import OptimizerSpec, ScheduleSpec


def build_optimizer(
    parameters: Iterable[nn.Parameter], spec: OptimizerSpec, device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer of `spec` over matrices, which decay, and vectors, which do not.

    Parameters of different meshes are in groups of their own: an operation over many tensors at a
    time takes those of one mesh.
    """
    sorted_out: dict[tuple[object, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            sorted_out.setdefault((mesh, parameter.dim() < 2), []).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": group, "weight_decay": 0.0 if is_vector else spec.weight_decay}
        for (_, is_vector), group in sorted(sorted_out.items(), key=lambda item: item[0][1])
    ]
    if spec.name == "sgd":
        return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, foreach=True)
    return torch.optim.AdamW(
        groups,
        lr=spec.lr,
        betas=(spec.beta1, spec.beta2),
        eps=spec.eps,
        fused=device.type == "cuda",
        foreach=device.type != "cuda",
    )


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleSpec) -> float:
    """The learning rate of step `step` of `steps`.

    Linear warm-up from peak / warmup_steps to `peak`; then `cosine` falls to min_lr_ratio · peak
    at the last step (SGDR, arXiv 1608.03983, one period), `wsd` stays and falls linearly over the
    last decay_ratio of all steps (arXiv 2404.06395), `constant` stays.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    begin = schedule.warmup_steps
    if schedule.name == "wsd":
        begin = max(begin, steps - max(1, round(schedule.decay_ratio * steps)))
    if step < begin:
        return peak
    progress = min(1.0, (step - begin + 1) / max(1, steps - begin))
    if schedule.name == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return peak * (1 - (1 - schedule.min_lr_ratio) * progress)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Use `value` for every group."""
    for group in optimizer.param_groups:
        group["lr"] = value
