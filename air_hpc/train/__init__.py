"""The worker: the native training loop.

__main__      the process that an agent starts; signals first
main          reads run.yaml, trains, and says how it ended
setup         threads, determinism, data, peak
loop          one step after another
compute_time  how long a rank computes, without waiting for the others
optimizer     optimizers and learning-rate schedules
rates         tokens per second and MFU
peak          what the device could do at most
"""

PRELOAD = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "numpy",
    "numpy.ma",
    "numpy.random",
    # Deterministic algorithms are switched on there too: torch then imports it, for a whole second.
    "torch._inductor",
    "torch.utils.serialization.config",
    "air_hpc.train.main",
    "air_hpc.train.loop",
    "air_hpc.train.peak",
    "air_hpc.parallel.failures",
    "air_hpc.probes.ranks",
    "air_hpc.config.accelerators",
)
"""What the template process of `launch.starter=fork` imports before it forks workers: all that a
worker imports up to its first step. A test holds the list to that."""
