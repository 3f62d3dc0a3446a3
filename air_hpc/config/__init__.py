"""The typed RunSpec: composed by Hydra, checked, and frozen into run.yaml."""
