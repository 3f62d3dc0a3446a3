"""Measurements of one machine: matmul rate and free ports.

matmul  the rate of a large matrix product: the peak of a CPU, a device check (needs torch)
ports   whether a port can be listened on (no torch)
"""
