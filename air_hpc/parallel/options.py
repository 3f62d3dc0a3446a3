"""How the engine is to spread, compute and remember."""

from __future__ import annotations

from dataclasses import dataclass

from air_hpc.config.spec import RunSpec


@dataclass(frozen=True)
class EngineOptions:
    """The keys of a RunSpec that the engine reads; what each means is said there.

    `precision` is `fp32` or `bf16`. `compile_backend` is torch.compile's: tests take a quick one.
    """

    precision: str = "fp32"
    reshard_after_forward: bool = True
    prefetch: int = 1
    cpu_offload: bool = False
    compile: bool = False
    compile_backend: str = "inductor"
    loss_parallel: bool = True
    pp_schedule: str = "1f1b"
    pp_stages_per_rank: int | None = None
    cp_method: str = "ulysses"
    recompute: str = "none"
    recompute_budget: float = 0.5

    @classmethod
    def of(cls, spec: RunSpec) -> EngineOptions:
        """What `spec` asks for."""
        asked = spec.parallelism
        stages = asked.pp_stages_per_rank
        return cls(
            precision=spec.train.precision,
            reshard_after_forward=asked.reshard_after_forward,
            prefetch=asked.prefetch,
            cpu_offload=asked.cpu_offload,
            compile=spec.train.compile,
            loss_parallel=asked.loss_parallel,
            pp_schedule=asked.pp_schedule,
            pp_stages_per_rank=None if stages == "auto" else int(stages),
            cp_method=asked.cp_method,
            recompute=asked.recompute,
            recompute_budget=asked.recompute_budget,
        )
