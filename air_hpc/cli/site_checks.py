"""What the site would refuse of specs that are wrong already, so that all is told in one pass."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from air_hpc.errors import EnvironmentFailure, Problem

if TYPE_CHECKING:
    from air_hpc.config.spec import RunSpec
    from air_hpc.plan.types import Plan
    from air_hpc.slurm.site import Snapshot


class SiteProblems:
    """Asks the site once, and only where it is needed.

    A Slurm that does not answer has nothing to add here.
    """

    def __init__(self) -> None:
        self._snapshot: Snapshot | None = None
        self._asked = False
        self._seen: set[str] = set()

    def of(self, spec: RunSpec) -> list[Problem]:
        """The problems of one spec; none for one whose requests were checked before."""
        request = f"{spec.launch}{spec.cluster}{spec.accelerator}"
        if spec.cluster.kind != "slurm" or request in self._seen:
            return []
        self._seen.add(request)
        if not self._asked:
            self._asked = True
            self._snapshot = _site(spec)
        if self._snapshot is None:
            return []
        from air_hpc.slurm.limits import check

        return check(spec, _requested(spec), self._snapshot)


def _site(spec: RunSpec) -> Snapshot | None:
    from air_hpc.slurm.snapshot import take

    try:
        return take(timeout_s=spec.cluster.submit_timeout_s)
    except EnvironmentFailure:
        return None


def _requested(spec: RunSpec) -> Plan:
    """A plan that asks the scheduler for what `spec` does, whatever else it cannot be planned."""
    from air_hpc.config.spec import RunSpec as Default
    from air_hpc.plan.make import lead_s, make_plan

    plan, _ = make_plan(Default())
    assert plan is not None
    launch = spec.launch
    return replace(
        plan,
        nodes=launch.nodes,
        devices_per_node=launch.devices_per_node,
        lead_s=lead_s(spec),
    )
