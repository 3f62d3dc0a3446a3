"""Nodes that a run's failures are held against: kept out of what starts next, here and elsewhere.

Evidence goes to three places: the restart machine (no generation of this attempt takes the node),
the ledger, and the file that all runs of the user share. The next start of the job is told by the
batch script, from a line beside its intent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from air_hpc.errors import EnvironmentFailure
from air_hpc.plan.frozen import FrozenRun
from air_hpc.recovery.exclusions import exclusion
from air_hpc.rundir.events import Kind
from air_hpc.rundir.exclusions import append_exclusions, is_node_name, read_exclusions
from air_hpc.rundir.layout import SHARED_DIR, RunDir
from air_hpc.rundir.words import FailureClass
from air_hpc.slurm import exclude, snapshot

LOST_FOR_H = 1.0
"""How long a machine that died is avoided at most: Slurm may take minutes to find out, and then
keeps it down itself until somebody has looked."""
ASK_TIMEOUT_S = 10.0


class Avoiding:
    """Writes exclusions for one run and tells what its next start is to avoid."""

    def __init__(
        self,
        run: RunDir,
        frozen: FrozenRun,
        *,
        record: Callable[..., None],
        say: Callable[[str], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._run = run
        self._spec, self._plan = frozen.spec, frozen.plan
        self._record = record
        self._say = say
        self._wall_clock = wall_clock

    def exclude(self, node: str, failure_class: FailureClass, reason: str) -> bool:
        """Hold a failure against a node; whether the policy wants that."""
        policy = self._spec.recovery.exclusion
        if not policy.enabled or self._spec.cluster.kind == "local" or not is_node_name(node):
            return False
        lost = failure_class is FailureClass.NODE_LOST
        entry = exclusion(
            node,
            now=self._wall_clock(),
            hours=min(policy.expiry_h, LOST_FOR_H) if lost else policy.expiry_h,
            reason=reason,
            failure_class=str(failure_class),
            run=self._run.run_id,
        )
        self._record(
            Kind.NODE_EXCLUDED,
            node=node,
            reason=entry.reason,
            failure_class=failure_class,
            expires=entry.until,
        )
        self._say(f"{node} is avoided for {(entry.until - entry.time) / 3600:g} h: {entry.reason}")
        try:
            append_exclusions(self._run.runs_dir, [entry])
        except EnvironmentFailure as failure:
            self._say(f"other runs are not told to avoid {node}: {failure}")
        return True

    def line(self) -> str | None:
        """`exclude=...` for the intent; None where nothing was ever excluded. May ask Slurm."""
        if not self._spec.recovery.exclusion.enabled:
            return None
        try:
            entries = read_exclusions(self._run.runs_dir).entries
        except EnvironmentFailure as failure:
            self._say(f"the next start avoids what this one did: {failure}")
            return None
        if not entries:
            return None
        site = None
        with contextlib.suppress(EnvironmentFailure):
            cache = self._run.runs_dir / SHARED_DIR / "site.json"
            site = snapshot.take(timeout_s=ASK_TIMEOUT_S, cache=cache)
        nodes = exclude.exclude_option(self._spec, self._plan, site, entries, self._wall_clock())
        return f"exclude={nodes}"
