"""Measurements of one machine and of the links between the ranks of a run.

result   what a check says
node     the node's own checks, in a process of their own (no torch)
host     disks, the shared file system, clock, ports
gpu      what NVML tells of the devices bound to the job
devices  which those are
run      runs the node's checks under deadlines, from outside
xid      watches NVML's events while a run trains
ranks    device and links as the workers see them: matmul, all-reduce (needs torch)
matmul   the rate of a large matrix product: the peak of a CPU, a device check (needs torch)
ports    whether a port can be listened on
"""
