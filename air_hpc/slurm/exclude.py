"""The `--exclude` of a job: what the user asked for, and what all runs of the user avoid.

One value for sbatch's option, for `scontrol update ... excnodelist=`, and for the script, which
takes nothing but node names, commas and brackets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from air_hpc.config.spec import RunSpec
from air_hpc.errors import EnvironmentFailure
from air_hpc.plan.types import Plan
from air_hpc.recovery.exclusions import exclude_list
from air_hpc.rundir.exclusions import Entry
from air_hpc.slurm.hostlist import expand, fold
from air_hpc.slurm.limits import fits
from air_hpc.slurm.site import Snapshot


def exclude_option(
    spec: RunSpec, plan: Plan, site: Snapshot | None, entries: Iterable[Entry], now: float
) -> str:
    """The hostlist to exclude; the empty text for none.

    `site` None: Slurm did not say which nodes there are, and `recovery.exclusion.max_nodes` alone
    bounds the list.
    """
    return fold([*own_exclusions(spec), *avoided(spec, plan, site, entries, now)])


def avoided(
    spec: RunSpec, plan: Plan, site: Snapshot | None, entries: Iterable[Entry], now: float
) -> tuple[str, ...]:
    """The nodes of `exclude_option` that the platform adds to the user's own."""
    policy = spec.recovery.exclusion
    if not policy.enabled:
        return ()
    serving = None if site is None else serving_nodes(spec, plan, site)
    return exclude_list(entries, now, spec.allocated_nodes, serving, policy.max_nodes)


def own_exclusions(spec: RunSpec) -> tuple[str, ...]:
    """The nodes of `launch.sbatch.exclude`; none where it is no hostlist (sbatch will say so)."""
    for name, value in spec.launch.sbatch.items():
        if name.strip().lstrip("-").replace("_", "-") == "exclude" and isinstance(value, str):
            with contextlib.suppress(EnvironmentFailure):
                return expand(value)
    return ()


def serving_nodes(spec: RunSpec, plan: Plan, site: Snapshot) -> dict[str, bool] | None:
    """The nodes that could serve this run, by name, and whether each takes jobs now.

    Of several partitions Slurm takes one: their nodes count together. None where no partition is
    known.
    """
    asked = spec.launch.partition
    named = [site.partition(name) for name in (asked.split(",") if asked else [None])]
    names = {partition.name for partition in named if partition is not None}
    if not names:
        return None
    own = set(own_exclusions(spec))
    nodes = tuple(node for node in site.nodes if names & set(node.partitions))
    return {node.name: node.usable for node in fits(spec, plan, nodes) if node.name not in own}
