"""A real Slurm of 1 to some thousand nodes on one machine, for tests.

Real munged, slurmctld and one slurmd a node, all on 127.0.0.1; only the GPUs are fake (device
files that are /dev/null). Modules, top to bottom:

- `cli`: the verbs; one place turns an error into a line on stderr and an exit code.
- `cluster`: up and down. `faults`: a node's death, isolation, drain and revival. `report`: status.
- `nodes`: start slurmd, wait for nodes. `accounting`, `munge`: the daemons beside Slurm's own.
- `configs`: slurm.conf, gres.conf ... as text. `spec`: what was asked for, checked.
- `daemons`: which processes are a cluster's. `shared`: ports and locks of the whole machine.
- `state`: the folder a cluster lives in. `install`: where Slurm's programs come from.
- `processes`: the process table, and how to end a set of processes so that none escapes.
"""
