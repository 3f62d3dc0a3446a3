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

PRELOAD = ("torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "numpy")
"""What the template process of `launch.starter=fork` imports before it forks workers."""
