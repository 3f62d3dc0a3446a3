"""How the engine is to spread, compute and remember."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from air_hpc.config.spec import PipelineSchedule, RunSpec
from air_hpc.plan.schedule import stages_per_rank


@dataclass(frozen=True)
class EngineOptions:
    """The keys of a RunSpec that the engine reads; what each means is said there.

    `pp_stages_per_rank` None is what the schedule wants.
    `precision` is `fp32` or `bf16`. `compile_backend` is torch.compile's: tests take a quick one.
    """

    precision: str = "fp32"
    reshard_after_forward: bool = True
    prefetch: int = 1
    cpu_offload: bool = False
    compile: bool = False
    compile_backend: str = "inductor"
    loss_parallel: bool = True
    pp_schedule: PipelineSchedule = "1f1b"
    pp_stages_per_rank: int | None = None
    cp_method: Literal["ulysses", "ring"] = "ulysses"
    recompute: str = "none"
    recompute_budget: float = 0.5

    @classmethod
    def of(cls, spec: RunSpec) -> EngineOptions:
        """What `spec` asks for."""
        asked = spec.parallelism
        return cls(
            precision=spec.train.precision,
            reshard_after_forward=asked.reshard_after_forward,
            prefetch=asked.prefetch,
            cpu_offload=asked.cpu_offload,
            compile=spec.train.compile,
            loss_parallel=asked.loss_parallel,
            pp_schedule=asked.pp_schedule,
            pp_stages_per_rank=stages_per_rank(asked),
            cp_method=asked.cp_method,
            recompute=asked.recompute,
            recompute_budget=asked.recompute_budget,
        )
