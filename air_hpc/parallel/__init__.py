"""The mesh and the ways to spread a model over it."""
