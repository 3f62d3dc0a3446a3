"""One snapshot of the site for a whole submission, a handful of commands whatever the sweep's size.

Promise: the commands run at most once for each `max_age_s`, the answers may be kept in a file that
the user's later commands share, and a damaged or foreign cache is never an error. What is kept are
the printed texts, so the parsers here are pure and their fixtures are recordings. Where accounting
is missing or refuses, associations and QOS are None: unknown, and no limit is invented.
"""

from __future__ import annotations

import getpass
import grp
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from air_hpc.errors import EnvironmentFailure
from air_hpc.rundir.atomic import write_atomic
from air_hpc.slurm import command
from air_hpc.slurm.records import integer, minutes, parse_gres, split_record, text_or_none
from air_hpc.slurm.site import Association, Node, Partition, Qos, SiteConfig, Snapshot
from air_hpc.slurm.version import parse_version

SCHEMA_VERSION = 1
MAX_AGE_S = 300.0
"""Partitions and limits change by the day; nodes' states are only hints and may be this old."""

ACCOUNTING_TIMEOUT_S = 10.0
"""slurmdbd may be down while the controller works: a submission does not wait for it."""

_ASSOCIATION_FIELDS = "Account,Partition,QOS,DefaultQOS,MaxJobs,MaxSubmitJobs,MaxWall,GrpSubmitJobs"
_QOS_FIELDS = "Name,MaxWall,MaxJobsPerUser,MaxSubmitJobsPerUser,GrpSubmitJobs,Flags"


def take(
    *,
    timeout_s: float = command.DEFAULT_TIMEOUT_S,
    cache: Path | None = None,
    max_age_s: float = MAX_AGE_S,
) -> Snapshot:
    """The site as it is now, or as `cache` says when that is younger than `max_age_s`.

    Raises EnvironmentFailure when Slurm does not answer.
    """
    now = time.time()
    key = _cache_key()
    texts = _read_cache(cache, key, now, max_age_s) if cache else None
    if texts is None:
        texts = ask(timeout_s)
        if cache is not None:
            _write_cache(cache, key, now, texts)
    return parse(texts, taken_at=float(texts.get("taken_at", now)))


def ask(timeout_s: float) -> dict[str, str]:
    """Run the commands: the printed text of each, by name."""
    user = getpass.getuser()

    def read(*argv: str) -> str:
        return command.read(argv, timeout_s=timeout_s)

    def read_accounting(*argv: str) -> str:
        return command.read(argv, timeout_s=min(timeout_s, ACCOUNTING_TIMEOUT_S))

    texts = {
        "user": user,
        "groups": ",".join(_groups()),
        "config": read("scontrol", "show", "config"),
        "partitions": read("scontrol", "-o", "show", "partitions"),
        "nodes": read("scontrol", "-o", "show", "nodes"),
    }
    config = parse_config(texts["config"])
    if config.accounting:
        where = ("where", f"user={user}", f"cluster={config.cluster_name}")
        try:
            texts["user_account"] = read_accounting(
                "sacctmgr", "-nP", "show", "user", user, "format=DefaultAccount"
            )
            texts["associations"] = read_accounting(
                "sacctmgr", "-nP", "show", "associations", *where,
                f"format={_ASSOCIATION_FIELDS}",
            )  # fmt: skip
            texts["qos"] = read_accounting(
                "sacctmgr", "-nP", "show", "qos", f"format={_QOS_FIELDS}"
            )
        except EnvironmentFailure:
            for name in ("associations", "qos"):
                texts.pop(name, None)
    return texts


def parse(texts: Mapping[str, str], *, taken_at: float) -> Snapshot:
    """The snapshot that these printed texts are."""
    associations = texts.get("associations")
    qos = texts.get("qos")
    return Snapshot(
        taken_at=taken_at,
        user=texts["user"],
        groups=tuple(filter(None, texts["groups"].split(","))),
        config=parse_config(texts["config"]),
        partitions=parse_partitions(texts["partitions"]),
        nodes=parse_nodes(texts["nodes"]),
        associations=None if associations is None else parse_associations(associations),
        qos=None if qos is None else parse_qos(qos),
        default_account=text_or_none(texts.get("user_account", "").strip()),
    )


def parse_config(text: str) -> SiteConfig:
    """`scontrol show config`."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.partition("=")
        if separator:
            values.setdefault(key.strip(), value.strip())
    parameters = text_or_none(values.get("SchedulerParameters")) or ""
    options = dict(
        (item.partition("=")[0].strip(), item.partition("=")[2]) for item in parameters.split(",")
    )
    enforce = values.get("AccountingStorageEnforce", "").lower().split(",")
    storage = values.get("AccountingStorageType", "")
    return SiteConfig(
        cluster_name=values.get("ClusterName", ""),
        version=parse_version(values.get("SLURM_VERSION", "")),
        max_array_size=_or(integer(values.get("MaxArraySize")), 1001),
        max_array_tasks=integer(options.get("max_array_tasks")),
        job_requeue=values.get("JobRequeue", "1") != "0",
        kill_wait_s=_or(integer(values.get("KillWait")), 30),
        preempt_type=text_or_none(values.get("PreemptType")) or "",
        preempt_mode=text_or_none(values.get("PreemptMode")) or "",
        accounting=storage.endswith("slurmdbd"),
        accounting_enforce=tuple(i.strip() for i in enforce if i.strip() not in {"", "none"}),
        scheduler_parameters=parameters,
    )


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """`scontrol -o show partitions`."""
    return tuple(
        _partition(split_record(line))
        for line in text.splitlines()
        if line.startswith("PartitionName=")
    )


def _partition(record: Mapping[str, str]) -> Partition:
    return Partition(
        name=record["PartitionName"],
        state=record.get("State", "UP"),
        default=record.get("Default") == "YES",
        max_time_min=minutes(record.get("MaxTime")),
        default_time_min=minutes(text_or_none(record.get("DefaultTime"))),
        max_nodes=integer(record.get("MaxNodes")),
        min_nodes=_or(integer(record.get("MinNodes")), 0),
        total_nodes=_or(integer(record.get("TotalNodes")), 0),
        allow_accounts=_names(record.get("AllowAccounts")),
        deny_accounts=_names(record.get("DenyAccounts")),
        allow_groups=_names(record.get("AllowGroups")),
        allow_qos=_names(record.get("AllowQos")),
        deny_qos=_names(record.get("DenyQos")),
        grace_time_s=_or(integer(record.get("GraceTime")), 0),
        preempt_mode=record.get("PreemptMode", ""),
        qos=text_or_none(record.get("QoS")),
        root_only=record.get("RootOnly") == "YES",
    )


def parse_nodes(text: str) -> tuple[Node, ...]:
    """`scontrol -o show nodes`."""
    return tuple(
        _node(split_record(line)) for line in text.splitlines() if line.startswith("NodeName=")
    )


def _node(record: Mapping[str, str]) -> Node:
    states = record.get("State", "").rstrip("*~#!%$@^-").lower().split("+")
    return Node(
        name=record["NodeName"],
        states=tuple(state.strip("*~#!%$@^-") for state in states),
        cpus=_or(integer(record.get("CPUEfctv")), _or(integer(record.get("CPUTot")), 0)),
        memory_bytes=_or(integer(record.get("RealMemory")), 0) * 1024**2,
        gres=parse_gres(record.get("Gres")),
        features=_names(record.get("AvailableFeatures")),
        partitions=_names(record.get("Partitions")),
    )


def parse_associations(text: str) -> tuple[Association, ...]:
    """`sacctmgr -nP show associations` in the format that `ask` requests."""
    found = []
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) < 8 or not parts[0]:
            continue
        account, partition, qos, default_qos, jobs, submit, wall, group = parts[:8]
        found.append(
            Association(
                account=account,
                partition=partition or None,
                qos=_names(qos),
                default_qos=default_qos or None,
                max_jobs=integer(jobs),
                max_submit_jobs=integer(submit),
                max_wall_min=minutes(wall),
                grp_submit_jobs=integer(group),
            )
        )
    return tuple(found)


def parse_qos(text: str) -> tuple[Qos, ...]:
    """`sacctmgr -nP show qos` in the format that `ask` requests."""
    found = []
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) < 6 or not parts[0]:
            continue
        name, wall, jobs, submit, group, flags = parts[:6]
        found.append(
            Qos(name, minutes(wall), integer(jobs), integer(submit), integer(group), _names(flags))
        )
    return tuple(found)


def _names(text: str | None) -> tuple[str, ...]:
    if text is None or text_or_none(text) is None or text == "ALL":
        return ()
    return tuple(item for item in text.split(",") if item)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _groups() -> list[str]:
    names = []
    for gid in os.getgroups() or [os.getgid()]:
        try:
            names.append(grp.getgrgid(gid).gr_name)
        except KeyError:
            continue
    return names


def _cache_key() -> str:
    environ = os.environ
    return f"{getpass.getuser()}:{environ.get('SLURM_CONF', '')}"


def _read_cache(cache: Path, key: str, now: float, max_age_s: float) -> dict[str, str] | None:
    try:
        content = json.loads(cache.read_bytes())
        fresh = 0 <= now - float(content["texts"]["taken_at"]) <= max_age_s
        if content["schema_version"] == SCHEMA_VERSION and content["key"] == key and fresh:
            return dict(content["texts"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


def _write_cache(cache: Path, key: str, now: float, texts: dict[str, str]) -> None:
    content = {
        "schema_version": SCHEMA_VERSION,
        "key": key,
        "texts": {**texts, "taken_at": repr(now)},
    }
    try:
        write_atomic(cache, json.dumps(content).encode("utf-8", "surrogateescape"))
    except OSError:
        # A cache that cannot be kept costs a few commands the next time, and nothing else.
        return
