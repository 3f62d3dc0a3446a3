"""The sbatch options of a run: what the platform asks for, and the user's pass-through, checked.

`launch.sbatch` takes any sbatch option by its long name. An option that the platform owns is
refused with the key to use instead, an unknown one with the nearest name, a value that sbatch
would not read exactly with the reason: all of them in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from air_hpc.config.spec import RunSpec
from air_hpc.errors import Problem, nearest
from air_hpc.launch import identity
from air_hpc.launch.quote import header_problem
from air_hpc.launch.sbatch_options import FLAGS, OWNED, WITH_VALUE
from air_hpc.plan.types import Plan
from air_hpc.slurm.limits import uses_devices

Options = tuple[tuple[str, str | bool], ...]
"""Long names without dashes, each with its value (True: a flag), in the order of the header."""


@dataclass(frozen=True)
class JobHeader:
    """Where this header is for: what differs between the scripts of one run or sweep."""

    name: str
    output: str
    chdir: str
    array_size: int | None = None


def problems(spec: RunSpec) -> list[Problem]:
    """What is wrong with the values of launch and cluster that reach the header."""
    found = list(_value_problems(spec))
    found += _passthrough_problems(spec)
    return found


def build(spec: RunSpec, plan: Plan, where: JobHeader) -> Options:
    """The options of one script's header. `problems` must have found nothing."""
    launch = spec.launch
    options: list[tuple[str, str | bool]] = [("job-name", where.name)]
    if where.array_size is not None:
        throttle = f"%{launch.array_parallelism}" if launch.array_parallelism else ""
        options.append(("array", f"0-{where.array_size - 1}{throttle}"))
    options += [
        ("output", where.output),
        ("open-mode", "append"),
        ("chdir", where.chdir),
        ("export", spec.cluster.export),
        ("nodes", str(spec.allocated_nodes)),
        ("ntasks-per-node", "1"),
    ]
    cpus = cpus_per_node(spec, plan)
    if cpus is not None:
        options.append(("cpus-per-task", str(cpus)))
    options += _device_options(spec, plan)
    named = {
        "partition": launch.partition,
        "account": launch.account,
        "qos": launch.qos,
        "time": launch.time_limit_min,
        "mem": launch.mem,
        "constraint": launch.constraint,
        "reservation": launch.reservation,
        "mail-type": launch.mail_type,
        "mail-user": launch.mail_user,
        "dependency": launch.dependency,
        "comment": launch.comment,
    }
    options += [(name, str(value)) for name, value in named.items() if value is not None]
    if launch.exclusive:
        options.append(("exclusive", True))
    if spec.outlives_nodes:
        options.append(("no-kill", True))
    # Without "B:" the signal reaches the agents, not this shell.
    options.append(("signal", f"USR2@{math.ceil(plan.lead_s)}"))
    options.append(("no-requeue" if launch.continuation == "none" else "requeue", True))
    for name, value in launch.sbatch.items():
        if value is True:
            options.append((_normal(name), True))
        elif value is not None and value is not False:
            options.append((_normal(name), str(value)))
    return tuple(options)


def cpus_per_node(spec: RunSpec, plan: Plan) -> int | None:
    """CPUs of a node's one task, or None to leave it to the site."""
    per_device = spec.launch.cpus_per_device
    return None if per_device is None else per_device * plan.devices_per_node


def shape(spec: RunSpec, plan: Plan) -> tuple[object, ...]:
    """What must be equal for two runs to share one array: everything that reaches the script."""
    launch = spec.launch
    return (
        build(spec, plan, JobHeader("-", "-", "-")),
        launch.job_name,
        repr(spec.cluster),
        spec.accelerator.kind,
        launch.continuation,
        launch.chain_length,
        launch.array_parallelism,
        launch.share_group,
    )


def label_of(specs: Sequence[RunSpec]) -> str:
    """The readable part of the name of the job (or array) of these runs."""
    names = {s.launch.job_name or s.name or identity.label(s.model.name) for s in specs}
    return names.pop() if len(names) == 1 else "sweep"


def _device_options(spec: RunSpec, plan: Plan) -> Iterator[tuple[str, str]]:
    if not uses_devices(spec):
        return
    typed = f"{spec.launch.gres_type}:" if spec.launch.gres_type else ""
    if spec.launch.gpus == "gres":
        yield "gres", f"gpu:{typed}{plan.devices_per_node}"
    else:
        yield "gpus-per-node", f"{typed}{plan.devices_per_node}"


def _value_problems(spec: RunSpec) -> Iterator[Problem]:
    launch = spec.launch
    values = {
        "launch.partition": launch.partition,
        "launch.account": launch.account,
        "launch.qos": launch.qos,
        "launch.constraint": launch.constraint,
        "launch.reservation": launch.reservation,
        "launch.mem": launch.mem,
        "launch.gres_type": launch.gres_type,
        "launch.mail_type": launch.mail_type,
        "launch.mail_user": launch.mail_user,
        "launch.dependency": launch.dependency,
        "launch.comment": launch.comment,
        "launch.job_name": launch.job_name,
        "name": spec.name,
        "cluster.export": spec.cluster.export,
    }
    for key, value in values.items():
        if value is not None and (problem := header_problem(value, key)):
            yield problem
    for key in ("launch.job_name", "name"):
        name = values[key]
        if name is not None and "," in name:
            # squeue and sacct would take it for two names: the job could not be looked up.
            yield Problem(key, name, "has a comma", "a job name without commas")
    if launch.lead_s != "auto" and launch.lead_s > 65535:
        yield Problem(
            "launch.lead_s", f"{launch.lead_s:g}", "is above what sbatch takes", "at most 65535 s"
        )


def _passthrough_problems(spec: RunSpec) -> Iterator[Problem]:
    known = sorted(FLAGS | WITH_VALUE)
    for given, value in spec.launch.sbatch.items():
        name, key = _normal(given), f"launch.sbatch.{given}"
        shown = "null" if value is None else str(value)
        if name in OWNED:
            yield Problem(key, shown, f"--{name} is set by the platform", hint=OWNED[name])
        elif name == "gres" and spec.launch.gpus == "gres":
            yield Problem(key, shown, "--gres is set by launch.gpus=gres")
        elif name not in FLAGS | WITH_VALUE:
            yield Problem(key, shown, "sbatch has no such long option", hint=nearest(name, known))
        elif value is True and name not in FLAGS:
            yield Problem(key, shown, f"--{name} needs a value")
        elif isinstance(value, str) and (problem := header_problem(value, key)):
            yield problem


def _normal(name: str) -> str:
    return name.strip().lstrip("-").replace("_", "-")
