"""air_hpc: a Slurm-integrated batch platform for training large models."""

__version__ = "0.1.0"
