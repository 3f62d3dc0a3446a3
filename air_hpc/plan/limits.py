"""Bounds that more than one part of the planner keeps to."""

AUTO_MICRO_BATCH_MAX = 8
"""The most sequences that `train.micro_batch_size=auto` puts into one forward.

Fewer where the device's memory is known and the estimate for so many is above it.
"""
