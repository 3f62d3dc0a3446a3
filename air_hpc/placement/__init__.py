"""Which node gets which ranks: pure functions of Slurm's word and the plan."""
