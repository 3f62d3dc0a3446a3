"""Measurements of one machine: matmul rate, ports, file system, devices."""
