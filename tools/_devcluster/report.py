"""What is known of a cluster: its shape, the lines to use it, and how it is now."""

from dataclasses import asdict, dataclass
from typing import Any

from . import munge
from .daemons import servers, slurmds, stepds
from .errors import DevclusterError
from .install import Install
from .nodes import node_states
from .processes import process_table
from .spec import ClusterSpec
from .state import State


def require_cluster(state: State) -> ClusterSpec:
    """The spec of the cluster that is in this folder; DevclusterError if there is none."""
    content = state.read().get("spec")
    if not isinstance(content, dict):
        raise DevclusterError(f"no cluster in {state.root}: `devcluster up --state {state.root}`")
    try:
        return ClusterSpec(**{**content, "settings": tuple(content["settings"])})
    except (TypeError, KeyError) as error:
        raise DevclusterError(f"{state.marker} is of another version of devcluster: {error}") from (
            None
        )


def environment_lines(state: State) -> str:
    """What a shell evaluates to use the cluster."""
    return f"export SLURM_CONF={state.slurm_conf}"


@dataclass(frozen=True)
class Status:
    """A cluster as it is. `state` is up, degraded (a daemon is missing) or down."""

    state: str
    state_folder: str
    slurm_conf: str | None = None
    user: str | None = None
    daemons: dict[str, int | None] | None = None
    """The pid of slurmctld and, with accounting, of slurmdbd and mariadbd."""
    slurmd: dict[str, int] | None = None
    """The pid of each node's slurmd that runs."""
    slurmd_missing: list[str] | None = None
    slurmstepd: int | None = None
    """How many run."""
    munged_started_here: bool | None = None
    nodes: dict[str, list[str]] | None = None
    """Node names by the state that sinfo prints; null without a slurmctld."""
    jobs: list[dict[str, str]] | None = None

    def to_json(self) -> dict[str, Any]:
        """As printed by --json."""
        return asdict(self)


def status(install: Install, state: State) -> Status:
    """The cluster as it is now; asks slurmctld once for nodes and once for jobs."""
    if not state.read().get("spec"):
        return Status("down", str(state.root))
    spec = require_cluster(state)
    table = process_table()
    alive, running = servers(table, state), slurmds(table, state)
    expected = ["slurmctld", *(("slurmdbd", "mariadbd") if spec.accounting else ())]
    missing = [name for name in spec.node_names() if name not in running]
    nodes: dict[str, list[str]] | None = None
    jobs: list[dict[str, str]] | None = None
    if "slurmctld" in alive:
        nodes = {}
        for name, value in node_states(install, state).items():
            nodes.setdefault(value, []).append(name)
        jobs = queued_jobs(install, state)
    complete = not missing and all(name in alive for name in expected)
    return Status(
        state="up" if complete else "degraded" if alive or running else "down",
        state_folder=str(state.root),
        slurm_conf=str(state.slurm_conf),
        user=spec.user,
        daemons={name: alive[name].pid if name in alive else None for name in expected},
        slurmd={name: running[name].pid for name in spec.node_names() if name in running},
        slurmd_missing=missing,
        slurmstepd=len(stepds(table, state)),
        munged_started_here=munge.started_munged() is not None,
        nodes=nodes,
        jobs=jobs,
    )


def queued_jobs(install: Install, state: State) -> list[dict[str, str]]:
    """The jobs that squeue lists, one for each array task."""
    text = install.run(
        "squeue", "-h", "-r", "-o", "%i|%u|%P|%T|%N|%j", slurm_conf=str(state.slurm_conf)
    )
    keys = ("id", "user", "partition", "state", "nodes", "name")
    return [dict(zip(keys, line.split("|", 5), strict=True)) for line in text.splitlines()]
