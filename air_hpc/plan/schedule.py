"""Stand-in until the planner's schedules land: which rank holds which stage."""

from __future__ import annotations


def stages_per_rank(schedule: str) -> int:
    """What `pp_stages_per_rank=auto` is."""
    return 1 if schedule in ("gpipe", "1f1b") else 2


def stage_owner(schedule: str, pp: int, stages_per_rank: int) -> tuple[int, ...]:
    """The pipeline rank of each stage."""
    loops = []
    for loop in range(stages_per_rank):
        ranks = list(range(pp))
        turned = schedule in ("zbv_zero_bubble", "dual_pipe_v") and loop % 2
        loops += ranks[::-1] if turned else ranks
    return tuple(loops)
