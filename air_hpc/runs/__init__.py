"""Find runs, reconcile them with Slurm, read their logs."""
