"""A stand-in for an engine: the worker is `__main__`, as an engine's is."""

PRELOAD = ("json",)
