"""Distributed checkpoints in the run directory's commit protocol."""
