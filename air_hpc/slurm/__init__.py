"""The only door to Slurm's commands."""
