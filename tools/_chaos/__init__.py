"""Runs under random faults on a real Slurm, compared with runs that nobody disturbed.

- `cli`: the command line; `campaign`: cluster, reference, several runs at once, a clean end.
- `plan`: which faults, when and on whom; pure, from one seed.
- `drive`: one run through its faults to its end. `faults`: how each kind is done and undone.
- `check`: what must hold when a run has ended. `report`: the campaign as markdown.
- `processes`: who works for a run. `mlflow`: a real server and a proxy that misbehaves.
- `site`: steps the clock of a node's Python processes, and nothing else's.
"""
