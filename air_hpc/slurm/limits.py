"""Checks a run against the limits of the site, before anything is submitted.

Slurm accepts many jobs that can never start and leaves them pending without an end. Here a limit
that makes a job never start is an error, one that makes it wait is a warning, and what the site
does not tell is not checked. All problems are found in one pass. Pure functions of a Snapshot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator

from air_hpc.config.spec import LaunchSpec, RunSpec
from air_hpc.errors import Problem, nearest
from air_hpc.plan.types import Plan
from air_hpc.slurm.site import Association, Node, Partition, Snapshot

_ENFORCING = {"associations", "limits", "safe", "qos", "all"}
"""Values of AccountingStorageEnforce with which a job needs an association."""

_MEM_UNITS = {"K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


def check(spec: RunSpec, plan: Plan, snapshot: Snapshot) -> list[Problem]:
    """Every problem that the site's limits make of this run."""
    launch = spec.launch
    partition = snapshot.partition(launch.partition)
    found = list(_partition_problems(launch, snapshot, partition))
    found += _account_problems(launch, snapshot, partition)
    found += _qos_problems(launch, snapshot, partition)
    found += _time_problems(launch, plan, snapshot, partition)
    if partition is not None:
        found += _size_problems(spec, plan, snapshot, partition)
    found += _continuation_problems(launch, snapshot)
    found += _grace_problems(spec, snapshot, partition)
    return found


def uses_devices(spec: RunSpec) -> bool:
    """Whether the scheduler is asked for devices: not for a CPU, not when told `gpus=none`."""
    if spec.launch.gpus == "none":
        return False
    return spec.launch.gpus != "auto" or spec.accelerator.kind != "cpu"


def memory_bytes(mem: str) -> int | None:
    """sbatch's `--mem` (`64G`, `2048` MiB) in bytes; 0 asks for all of a node; None: not one."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", mem.strip().upper())
    if match is None:
        return None
    return int(match[1]) * _MEM_UNITS[match[2] or "M"]


def association_of(launch: LaunchSpec, snapshot: Snapshot) -> Association | None:
    """The association the job will be charged to, where it is known."""
    account = launch.account or snapshot.default_account
    partition = snapshot.partition(launch.partition)
    named = [a for a in snapshot.associations or () if account is None or a.account == account]
    exact = [a for a in named if partition is not None and a.partition == partition.name]
    general = [a for a in named if a.partition is None]
    return next(iter(exact + general), None)


def qos_name(launch: LaunchSpec, snapshot: Snapshot) -> str | None:
    """The QOS the job will have, where it is known."""
    if launch.qos is not None:
        return launch.qos
    association = association_of(launch, snapshot)
    return association.default_qos if association else None


def _partition_problems(
    launch: LaunchSpec, snapshot: Snapshot, partition: Partition | None
) -> Iterator[Problem]:
    names = [each.name for each in snapshot.partitions]
    if partition is None:
        # Several partitions may be given; Slurm takes the one that starts first.
        unknown = [n for n in (launch.partition or "").split(",") if n not in names]
        if launch.partition is None:
            yield Problem(
                "launch.partition", "null", "this site has no default partition", ", ".join(names)
            )
        for name in unknown if launch.partition else ():
            yield Problem(
                "launch.partition",
                name,
                "no such partition",
                ", ".join(names),
                nearest(name, names),
            )
        return
    if partition.state == "INACTIVE":
        yield Problem("launch.partition", partition.name, "takes no jobs (INACTIVE)")
    elif partition.state != "UP":
        yield Problem(
            "launch.partition",
            partition.name,
            f"starts no jobs at present ({partition.state})",
            hint="The job will wait until the site brings it up",
            warning=True,
        )
    allowed = set(partition.allow_groups)
    if allowed and not allowed & set(snapshot.groups) and snapshot.user != "root":
        yield Problem(
            "launch.partition",
            partition.name,
            f"is only for groups {', '.join(sorted(allowed))}; {snapshot.user} is in none",
        )
    if partition.root_only and snapshot.user != "root":
        yield Problem("launch.partition", partition.name, "is only for root")


def _account_problems(
    launch: LaunchSpec, snapshot: Snapshot, partition: Partition | None
) -> Iterator[Problem]:
    account = launch.account or snapshot.default_account
    shown = launch.account or f"{account} (your default)"
    known = None
    if snapshot.associations is not None:
        known = sorted({association.account for association in snapshot.associations})
    enforced = bool(_ENFORCING & set(snapshot.config.accounting_enforce))
    if known is not None and launch.account is not None and launch.account not in known:
        yield Problem(
            "launch.account",
            launch.account,
            f"{snapshot.user} has no such account on {snapshot.config.cluster_name}",
            ", ".join(known) or "none",
            nearest(launch.account, known),
            warning=not enforced,
        )
        return
    if known == [] and enforced:
        yield Problem(
            "launch.account",
            "null",
            f"{snapshot.user} has no account on {snapshot.config.cluster_name}, and it is required",
            hint="Ask the site for one",
        )
        return
    if partition is None or account is None:
        return
    yield from _policy_problems(
        "launch.account",
        shown,
        account,
        partition.name,
        partition.allow_accounts,
        partition.deny_accounts,
    )


def _qos_problems(
    launch: LaunchSpec, snapshot: Snapshot, partition: Partition | None
) -> Iterator[Problem]:
    name = qos_name(launch, snapshot)
    if name is None:
        return
    shown = launch.qos or f"{name} (your default)"
    association = association_of(launch, snapshot)
    if launch.qos is not None and association is not None and association.qos:
        if name not in association.qos:
            yield Problem(
                "launch.qos",
                shown,
                f"account {association.account} may not use it",
                ", ".join(association.qos),
                nearest(name, association.qos),
            )
    elif launch.qos is not None and snapshot.qos is not None and not snapshot.named_qos(name):
        names = [qos.name for qos in snapshot.qos]
        yield Problem("launch.qos", shown, "no such QOS", ", ".join(names), nearest(name, names))
    if partition is None:
        return
    yield from _policy_problems(
        "launch.qos", shown, name, partition.name, partition.allow_qos, partition.deny_qos
    )


def _policy_problems(
    key: str,
    shown: str,
    value: str,
    partition: str,
    allowed: Collection[str],
    denied: Collection[str],
) -> Iterator[Problem]:
    """What a partition's Allow and Deny lists say of an account or a QOS."""
    if allowed and value not in allowed:
        yield Problem(key, shown, f"partition {partition} does not take it", ", ".join(allowed))
    elif value in denied:
        yield Problem(key, shown, f"partition {partition} refuses it")


def _time_limits(
    launch: LaunchSpec, snapshot: Snapshot, partition: Partition | None
) -> Iterator[tuple[int, str]]:
    qos = snapshot.named_qos(qos_name(launch, snapshot))
    override = qos is not None and "PartitionTimeLimit" in qos.flags
    if partition is not None and partition.max_time_min is not None and not override:
        yield partition.max_time_min, f"partition {partition.name}"
    partition_qos = snapshot.named_qos(partition.qos) if partition is not None else None
    for each in (qos, partition_qos):
        if each is not None and each.max_wall_min is not None:
            yield each.max_wall_min, f"QOS {each.name}"
    association = association_of(launch, snapshot)
    if association is not None and association.max_wall_min is not None and qos is None:
        yield association.max_wall_min, f"account {association.account}"


def _time_problems(
    launch: LaunchSpec, plan: Plan, snapshot: Snapshot, partition: Partition | None
) -> Iterator[Problem]:
    asked = launch.time_limit_min
    limits = sorted(_time_limits(launch, snapshot, partition))
    if asked is not None and limits and asked > limits[0][0]:
        yield Problem(
            "launch.time_limit_min",
            str(asked),
            f"is above the maximum of {limits[0][1]}",
            f"at most {limits[0][0]} minutes",
            "A shorter limit and launch.continuation carry a long run over several jobs",
        )
    in_force = asked
    if in_force is None and partition is not None:
        in_force = partition.default_time_min or partition.max_time_min
    if in_force is not None and plan.lead_s >= in_force * 60:
        yield Problem(
            "launch.lead_s",
            f"{plan.lead_s:g}",
            f"leaves no time to train in a limit of {in_force} minutes",
            f"below {in_force * 60} s",
            "Raise launch.time_limit_min or lower launch.lead_s",
        )


def _size_problems(
    spec: RunSpec, plan: Plan, snapshot: Snapshot, partition: Partition
) -> Iterator[Problem]:
    launch = spec.launch
    nodes = snapshot.nodes_of(partition.name)
    total = partition.total_nodes or len(nodes)
    most = min(total, partition.max_nodes) if partition.max_nodes is not None else total
    asked = spec.allocated_nodes
    if asked > most:
        why = "has" if most == total else "gives one job"
        yield too_many_nodes(spec, most, f"is more than partition {partition.name} {why}")
    elif asked < partition.min_nodes:
        yield Problem(
            "launch.nodes",
            str(spec.launch.nodes),
            f"is less than partition {partition.name} takes",
            f"at least {partition.min_nodes}",
        )
    if not nodes:
        return
    # A number of nodes that is too large is told above: here, whether any so many would do.
    wanted = max(1, min(asked, most))
    fits: tuple[Node, ...] = nodes
    for key, value, message, test in _needs(spec, plan):
        fitting = tuple(node for node in fits if test(node))
        if len(fitting) < wanted:
            have = len(fitting)
            yield Problem(
                key,
                value,
                f"{message} on {wanted} node(s), and {have} of partition {partition.name} "
                "can give that",
                _what_nodes_have(key, nodes, launch),
            )
        else:
            fits = fitting
    usable = sum(node.usable for node in fits)
    if usable < wanted:
        yield Problem(
            "launch.nodes",
            str(spec.launch.nodes),
            f"only {usable} such nodes of partition {partition.name} are up",
            hint="The job will wait for the others",
            warning=True,
        )


def fits(spec: RunSpec, plan: Plan, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Those of these nodes that have what the run asks of each."""
    tests = [test for _, _, _, test in _needs(spec, plan)]
    return tuple(node for node in nodes if all(test(node) for test in tests))


def too_many_nodes(spec: RunSpec, most: int, why: str) -> Problem:
    """More nodes than there are: the training's own, or only with its spares. `why`: than what."""
    nodes, spares = spec.launch.nodes, spec.allocated_nodes - spec.launch.nodes
    if nodes > most or not spares:
        allowed = f"at most {max(0, most - spares)}"
        beside = f" with the {spares} of recovery.spare_nodes" if spares else ""
        return Problem("launch.nodes", str(nodes), f"{why}{beside}", allowed)
    left = most - spares
    none = ", and the spares would leave no node to train on" if left < 1 else ""
    return Problem(
        "recovery.spare_nodes",
        str(spares),
        f"with launch.nodes {nodes} {why} ({most}){none}",
        f"at most {most - nodes}",
        "Ask for fewer spares, or use recovery.restart=elastic, which needs none",
    )


def _needs(spec: RunSpec, plan: Plan) -> Iterator[tuple[str, str, str, Callable[[Node], bool]]]:
    """What each node must have: (key, value, what is asked, test of a node)."""
    launch = spec.launch
    devices = plan.devices_per_node
    if launch.cpus_per_device is not None:
        cpus = launch.cpus_per_device * devices
        value = str(launch.cpus_per_device)
        needed = f"{cpus} CPUs are needed"
        yield "launch.cpus_per_device", value, needed, lambda node: node.cpus >= cpus
    if uses_devices(spec):
        kind = launch.gres_type
        if kind is not None:
            needed = f"gpus of type {kind} are needed"
            yield "launch.gres_type", kind, needed, lambda node: node.devices(kind) > 0
        needed = f"{devices} gpus are needed"
        enough = _has_devices(devices, kind)
        yield "launch.devices_per_node", str(devices), needed, enough
    asked = memory_bytes(launch.mem) if launch.mem is not None else None
    if asked:
        needed = f"{launch.mem} of memory is needed"
        yield "launch.mem", str(launch.mem), needed, lambda node: node.memory_bytes >= asked


def _has_devices(count: int, kind: str | None) -> Callable[[Node], bool]:
    return lambda node: node.devices(kind) >= count


def _what_nodes_have(key: str, nodes: tuple[Node, ...], launch: LaunchSpec) -> str:
    if key == "launch.cpus_per_device":
        return f"nodes have up to {max(node.cpus for node in nodes)} CPUs"
    if key == "launch.mem":
        return f"nodes have up to {max(node.memory_bytes for node in nodes) // 1024**2}M"
    if key == "launch.gres_type":
        types = sorted({g.type for node in nodes for g in node.gres if g.name == "gpu" and g.type})
        return ", ".join(types) or "no gpu types are configured"
    most = max(node.devices(launch.gres_type) for node in nodes)
    return f"nodes have up to {most} gpus"


def _continuation_problems(launch: LaunchSpec, snapshot: Snapshot) -> Iterator[Problem]:
    if launch.continuation == "requeue" and not snapshot.config.job_requeue:
        # The script asks with --requeue, which overrides the site's default for this job.
        yield Problem(
            "launch.continuation",
            "requeue",
            "this site's default forbids requeueing (JobRequeue=0)",
            hint="The job asks for --requeue; if the site refuses that, use chain",
            warning=True,
        )


def _grace_problems(
    spec: RunSpec, snapshot: Snapshot, partition: Partition | None
) -> Iterator[Problem]:
    """A run that counts on more time after SIGTERM than it gets loses its last steps."""
    config = snapshot.config
    if partition is None or not config.preempt_type.endswith("partition_prio"):
        return
    if partition.preempt_mode not in {"REQUEUE", "CANCEL"}:
        return
    left_s = partition.grace_time_s + config.kill_wait_s
    if spec.cluster.grace_s > left_s:
        yield Problem(
            "cluster.grace_s",
            f"{spec.cluster.grace_s:g}",
            f"partition {partition.name} leaves a preempted job {left_s} s "
            f"(GraceTime {partition.grace_time_s} + KillWait {config.kill_wait_s})",
            f"at most {left_s}",
            warning=True,
        )
