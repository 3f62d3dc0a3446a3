"""What a plan comes to: speed, how long for so many tokens, what that costs, what failures take.

    tokens/s     of a step of the time that `plan.step_time` predicts
    device-hours tokens / (tokens/s) x devices, and with failures that over the expected ETTR
    cost         device-hours x accelerator.cost_per_device_hour, in its currency
    ETTR         the share of the time that trains: the closed form of `recovery.reliability`, at
                 the interval between saves that makes it largest

What may go wrong: a save that is asynchronous takes from training what the copy to the host takes,
and one that is not, the write; the wait of a slow file system behind an asynchronous one is not in
it. A restart is taken as five minutes, the u0 of the published vectors (arXiv 2410.21680).
"""

from __future__ import annotations

from dataclasses import dataclass

from air_hpc.config.spec import RunSpec
from air_hpc.plan.memory import state_bytes
from air_hpc.plan.step_time import StepTime, mfu, step_time
from air_hpc.plan.types import FlopsPerToken, Plan
from air_hpc.recovery.reliability import best_interval_s, first_order_ettr, mttf_s

RESTART_S = 300.0
"""From a failure to training again: u0 of the published vectors (arXiv 2410.21680)."""
WRITE_BYTES_PER_S_PER_NODE = 1e9
"""At which a node writes a checkpoint; the plan's lead goes by the same."""


@dataclass(frozen=True)
class Outlook:
    """None is unknown throughout. `unknown` says why there is no time.

    `training_s` is without failures, `expected_s` with them. `device_hours` and `cost` are with
    failures where their rate is known.
    """

    step: StepTime | None
    unknown: str | None
    tokens_per_s: float | None
    mfu: FlopsPerToken | None
    target_tokens: int
    training_s: float | None
    expected_s: float | None
    device_hours: float | None
    cost: float | None
    save_blocking_s: float | None
    save_interval_s: float | None
    ettr: float | None


def outlook(
    spec: RunSpec,
    plan: Plan,
    *,
    target_tokens: int | None = None,
    measured_flops_per_s: float | None = None,
) -> Outlook:
    """What a plan comes to, for `target_tokens` (None: those of all its steps)."""
    made = step_time(
        spec, plan.mesh, plan.micro_batch_size, measured_flops_per_s=measured_flops_per_s
    )
    tokens = target_tokens or plan.tokens_per_step * spec.train.steps
    blocking_s = save_blocking_s(spec, plan)
    interval_s, ettr = _ettr(spec, plan, blocking_s)
    if not isinstance(made, StepTime):
        return Outlook(
            step=None,
            unknown=made.reason,
            tokens_per_s=None,
            mfu=None,
            target_tokens=tokens,
            training_s=None,
            expected_s=None,
            device_hours=None,
            cost=None,
            save_blocking_s=blocking_s,
            save_interval_s=interval_s,
            ettr=ettr,
        )
    speed = plan.tokens_per_step / made.total_s
    training_s = tokens / speed
    expected_s = training_s / ettr if ettr else None
    hours = (expected_s or training_s) * plan.world_size / 3600
    price = spec.accelerator.cost_per_device_hour
    return Outlook(
        step=made,
        unknown=None,
        tokens_per_s=speed,
        mfu=mfu(
            made.total_s,
            plan.flops_per_token,
            plan.tokens_per_step,
            plan.world_size,
            plan.peak_flops_per_device,
        ),
        target_tokens=tokens,
        training_s=training_s,
        expected_s=expected_s,
        device_hours=hours,
        cost=None if price is None else hours * price,
        save_blocking_s=blocking_s,
        save_interval_s=interval_s,
        ettr=ettr,
    )


def save_blocking_s(spec: RunSpec, plan: Plan) -> float | None:
    """What a save takes from training: the copy of a rank's state to its host, or the write."""
    state = state_bytes(spec)
    if not spec.checkpoint.asynchronous:
        return state / (WRITE_BYTES_PER_S_PER_NODE * plan.nodes)
    link = spec.accelerator.host_link_bytes_per_s
    if link is None:
        return None
    mesh = plan.mesh
    return state / (mesh.pp * mesh.shard_size * mesh.tp) / link


def _ettr(spec: RunSpec, plan: Plan, blocking_s: float | None) -> tuple[float | None, float | None]:
    """(the interval between saves that is best, the expected ETTR at it)."""
    rate = spec.checkpoint.failures_per_node_day
    if rate is None or blocking_s is None:
        return None, None
    if rate == 0:
        return None, 1.0
    failures_per_s = 1 / mttf_s(plan.nodes, rate)
    best = best_interval_s(failures_per_s, blocking_s, RESTART_S)
    interval_s = min(max(best, spec.checkpoint.min_interval_s), spec.checkpoint.max_interval_s)
    ettr = first_order_ettr(
        failures_per_s, interval_s=interval_s, save_s=blocking_s, restart_s=RESTART_S
    )
    return interval_s, ettr
