"""Stand-in until the planner's cut lands: layers in equal shares."""

from __future__ import annotations

from air_hpc.config.spec import ModelSpec


def cut_layers(model: ModelSpec, sequence_length: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Contiguous layers for each stage, earlier ones taking what does not divide."""
    base, more = divmod(model.layers, stages)
    sizes = [base + (stage < more) for stage in range(stages)]
    begins = [sum(sizes[:stage]) for stage in range(stages)]
    return tuple(tuple(range(b, b + n)) for b, n in zip(begins, sizes, strict=True))
