"""Checks across keys: what no single field can know. Pure functions from a RunSpec to Problems.

Each check says which keys it reads. Where one of those already has a problem of its own, the check
is skipped: it would speak about a default that nobody asked for.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields, replace
from typing import get_args

from air_hpc.config.spec import RunSpec
from air_hpc.errors import Problem, nearest
from air_hpc.hardware.accelerator import Precision
from air_hpc.plan import degrees

_BYTES = 256

Check = Callable[[RunSpec], Iterable[Problem]]


@dataclass(frozen=True)
class Rule:
    """A check and the keys (or sections) it reads.

    `to_run`: it is about what this version can run, not about the config: somebody who only plans
    is warned. `here`: it is about the place, which a plan for another has nothing to do with.
    """

    reads: tuple[str, ...]
    check: Check
    to_run: bool = False
    here: bool = False


def check_spec(
    spec: RunSpec, unsure: Collection[str] = (), *, to_run: bool = True
) -> list[Problem]:
    """Every problem across keys; checks that read an `unsure` key are left out.

    Unless the spec is `to_run`, what only stops a run is a warning, and the place does not matter.
    """
    problems: list[Problem] = []
    for rule in RULES:
        if depends_on(rule.reads, unsure) or (rule.here and not to_run):
            continue
        found = rule.check(spec)
        if rule.to_run and not to_run:
            found = [replace(problem, warning=True) for problem in found]
        problems += found
    return problems


def depends_on(reads: Collection[str], unsure: Collection[str]) -> bool:
    """Whether any key or section of `reads` is, holds or lies in one of the `unsure` keys."""
    return any(_overlap(key, read) for key in unsure for read in reads)


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _vocabulary(spec: RunSpec) -> Iterable[Problem]:
    vocabulary = spec.model.vocab_size
    if spec.data.source == "python_stdlib" and vocabulary < _BYTES:
        message = f"data={spec.data.name} is bytes, so tokens go up to {_BYTES - 1}"
        yield Problem("model.vocab_size", str(vocabulary), message, f"at least {_BYTES}")


def _engine(spec: RunSpec) -> Iterable[Problem]:
    device = spec.accelerator
    there = device.kind != "cpu" and "fp8" not in device.unsupported_precisions
    if spec.train.precision == "fp8" and there:
        message = f"engine={spec.engine.name} of this version plans fp8 and does not train in it"
        yield Problem("train.precision", "fp8", message, "fp32, bf16")


def _accelerator(spec: RunSpec) -> Iterable[Problem]:
    device, precision = spec.accelerator, spec.train.precision
    if precision in device.unsupported_precisions:
        known = ("fp32", "bf16", "fp8")
        others = [p for p in known if p not in device.unsupported_precisions]
        message = f"accelerator={device.name} has no {precision}"
        yield Problem("train.precision", precision, message, ", ".join(others))
    elif precision == "fp8" and device.kind == "cpu":
        message = f"accelerator={device.name} computes nothing in fp8"
        yield Problem("train.precision", precision, message, "fp32, bf16")
    elif device.peak(precision) is None and device.peak_source == "datasheet":
        yield Problem(
            f"accelerator.peak_flops.{precision}",
            "null",
            f"no {precision} peak is known for accelerator={device.name}, so no MFU is shown",
            hint=f"To have one, set it in FLOP/s (dense, one device) in accelerator/"
            f"{device.name}.yaml: peak_flops: {{{precision}: <FLOP/s>}}",
            warning=True,
        )


_POSITIVE_FIGURES = (
    "memory_bytes",
    "memory_bandwidth_bytes_per_s",
    "scale_up_bytes_per_s",
    "scale_up_devices",
    "scale_up_latency_s",
    "scale_out_bytes_per_s",
    "scale_out_latency_s",
    "host_link_bytes_per_s",
    "cost_per_device_hour",
)


def _accelerator_figures(spec: RunSpec) -> Iterable[Problem]:
    device = spec.accelerator
    known = get_args(Precision)
    for precision, peak in device.peak_flops.items():
        key = f"accelerator.peak_flops.{precision}"
        if precision not in known:
            hint = nearest(precision, known)
            yield Problem(key, f"{peak:g}", "unknown precision", ", ".join(known), hint)
        elif peak <= 0:
            yield Problem(key, f"{peak:g}", "a peak in FLOP/s", "above 0, or leave it out")
    for name in _POSITIVE_FIGURES:
        value = getattr(device, name)
        if value is not None and value <= 0:
            yield Problem(f"accelerator.{name}", str(value), "out of range", "above 0 or null")
    ceiling = device.matmul_ceiling
    if ceiling is not None and not 0 < ceiling <= 1:
        message = "a part of the peak"
        yield Problem("accelerator.matmul_ceiling", f"{ceiling:g}", message, "above 0, at most 1")


def _schedule(spec: RunSpec) -> Iterable[Problem]:
    warmup, steps = spec.schedule.warmup_steps, spec.train.steps
    if warmup >= steps:
        message = f"warm-up ({warmup} steps) leaves nothing of train.steps ({steps})"
        hint = f"For so short a run add schedule.warmup_steps={steps // 10}"
        yield Problem("schedule.warmup_steps", str(warmup), message, f"below {steps}", hint)
    elif spec.schedule.name == "wsd":
        decay = round(spec.schedule.decay_ratio * steps)
        if warmup + decay > steps:
            yield Problem(
                "schedule.decay_ratio",
                str(spec.schedule.decay_ratio),
                f"warm-up ({warmup}) and decay ({decay}) are more than train.steps ({steps})",
                f"at most {(steps - warmup) / steps:.3g}",
            )


def _time_limit(spec: RunSpec) -> Iterable[Problem]:
    limit_min, lead_s = spec.launch.time_limit_min, spec.launch.lead_s
    if limit_min is None or lead_s == "auto":
        return
    if lead_s >= 60 * limit_min:
        yield Problem(
            "launch.lead_s",
            f"{lead_s:g}",
            f"the save ahead of the limit begins before the run: launch.time_limit_min"
            f" {limit_min} is {60 * limit_min} s",
            f"below {60 * limit_min}",
        )


def _save_interval(spec: RunSpec) -> Iterable[Problem]:
    low_s, high_s = spec.checkpoint.min_interval_s, spec.checkpoint.max_interval_s
    if low_s > high_s:
        yield Problem(
            "checkpoint.min_interval_s",
            f"{low_s:g}",
            f"above checkpoint.max_interval_s {high_s:g}",
            f"at most {high_s:g}",
        )


def _heartbeat(spec: RunSpec) -> Iterable[Problem]:
    recovery = spec.recovery
    if recovery.heartbeat_timeout_s <= recovery.heartbeat_interval_s:
        yield Problem(
            "recovery.heartbeat_timeout_s",
            f"{recovery.heartbeat_timeout_s:g}",
            f"a member would be given up before its next heartbeat"
            f" (recovery.heartbeat_interval_s {recovery.heartbeat_interval_s:g})",
            f"above {recovery.heartbeat_interval_s:g}",
        )
    if recovery.lease_s <= recovery.heartbeat_timeout_s:
        yield Problem(
            "recovery.lease_s",
            f"{recovery.lease_s:g}",
            f"workers would stop writing before their node is given up"
            f" (recovery.heartbeat_timeout_s {recovery.heartbeat_timeout_s:g})",
            f"above {recovery.heartbeat_timeout_s:g}",
        )


def _hang_limits(spec: RunSpec) -> Iterable[Problem]:
    """A limit below what tells a dead node: a loss would be taken for a hang of those that wait."""
    recovery = spec.recovery
    limits = {
        f"recovery.hang.{f.name}": getattr(recovery.hang, f.name)
        for f in fields(recovery.hang)
        if f.name.endswith("_s")
    }
    shortest = min(limits, key=lambda key: float(limits[key]))
    limit_s = limits[shortest]
    early = f"would count as hanging before it is given up ({shortest} {limit_s:g})"
    late = f"a hang would be told after its limit ({shortest} {limit_s:g})"
    for name, message in (
        ("heartbeat_timeout_s", f"whoever waits for a node that died {early}"),
        ("heartbeat_interval_s", late),
    ):
        value_s = getattr(recovery, name)
        if value_s >= limit_s:
            key, hint = f"recovery.{name}", f"Or raise {shortest}"
            yield Problem(key, f"{value_s:g}", message, f"below {limit_s:g}", hint)


def _restart(spec: RunSpec) -> Iterable[Problem]:
    recovery, nodes = spec.recovery, spec.launch.nodes
    fewest, spares, policy = recovery.min_nodes, recovery.spare_nodes, recovery.restart
    if fewest is not None and fewest > nodes:
        yield Problem(
            "recovery.min_nodes",
            str(fewest),
            f"is more than the run has (launch.nodes {nodes})",
            f"null or 1 to {nodes}",
        )
    if fewest is not None and policy != "elastic":
        yield Problem(
            "recovery.min_nodes",
            str(fewest),
            f"recovery.restart={policy} never trains on fewer nodes",
            "null",
            "Or set recovery.restart=elastic",
        )
    if spares and policy != "spare":
        yield Problem(
            "recovery.spare_nodes",
            str(spares),
            f"recovery.restart={policy} takes none",
            "0",
            "Or set recovery.restart=spare",
        )
    if policy == "spare" and not spares:
        yield Problem(
            "recovery.spare_nodes",
            "0",
            "recovery.restart=spare has nothing to take from",
            "at least 1",
            "Or use recovery.restart=same, which needs none",
        )


def _container(spec: RunSpec) -> Iterable[Problem]:
    container = spec.cluster.container
    if container.kind != "none" and container.image is None:
        message = f"container.kind={container.kind} needs an image"
        yield Problem("cluster.container.image", "null", message, "a path or a name of an image")
    if spec.cluster.venv is not None and spec.cluster.conda_env is not None:
        message = f"cluster.conda_env ({spec.cluster.conda_env}) is set as well"
        yield Problem("cluster.venv", spec.cluster.venv, message, "one of the two")


def _local_nodes(spec: RunSpec) -> Iterable[Problem]:
    if spec.cluster.kind != "local":
        return
    if spec.allocated_nodes > spec.launch.nodes:
        spares = str(spec.recovery.spare_nodes)
        message = f"cluster={spec.cluster.name} is one machine and has no spare"
        hint = "Set recovery.restart=same, or choose cluster=slurm"
        yield Problem("recovery.spare_nodes", spares, message, "0", hint)
    if spec.launch.nodes > 1:
        yield Problem(
            "launch.nodes",
            str(spec.launch.nodes),
            f"cluster={spec.cluster.name} is one machine",
            "1",
            "Raise launch.devices_per_node, or choose cluster=slurm",
        )


def _runs_dir(spec: RunSpec) -> Iterable[Problem]:
    if not spec.runs_dir.strip():
        yield Problem(
            "runs_dir", spec.runs_dir, "is empty; from a variable that is not set?", "a folder"
        )


_STORE_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")


def _tracking(spec: RunSpec) -> Iterable[Problem]:
    uri = spec.tracking.uri
    if uri == "auto" and spec.cluster.kind == "local" and set(spec.runs_dir) & set("?#"):
        message = "the default store in this folder has no address (? and # mean something there)"
        yield Problem("runs_dir", spec.runs_dir, message, "a path without ? and #")
    if uri is None or uri in ("auto", "databricks"):
        return
    allowed = "auto, null, https://..., http://..., sqlite:///<path>, a database, databricks"
    scheme, colon, _ = uri.partition(":")
    base = scheme.split("+")[0].lower()
    if not colon or base == "file":
        hint = f"For a local store write sqlite:///{uri.removeprefix('file:').lstrip('/')}.db"
        message = "a store of plain files, which MLflow no longer takes"
        yield Problem("tracking.uri", uri, message, allowed, hint)
    elif base not in _STORE_SCHEMES:
        hint = nearest(base, _STORE_SCHEMES)
        yield Problem("tracking.uri", uri, f"MLflow has no store for {base}:", allowed, hint)
    elif urllib.parse.urlsplit(uri).password is not None:
        hidden = uri.replace(f":{urllib.parse.urlsplit(uri).password}@", ":***@")
        yield Problem(
            "tracking.uri",
            hidden,
            "a password here would be written into run.yaml and logs",
            "an address without a password",
            "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD where the run starts",
        )


_DEADLINES = tuple(
    f"recovery.{name}" for name in ("heartbeat_interval_s", "heartbeat_timeout_s", "lease_s")
)
_POLICY = tuple(f"recovery.{name}" for name in ("restart", "spare_nodes", "min_nodes"))

RULES: tuple[Rule, ...] = (
    Rule(("model",), degrees.model_shape),
    Rule(
        ("model", "parallelism.tp", "parallelism.cp", "data.sequence_length"), degrees.tensor_degree
    ),
    Rule(("model", "parallelism", "data.sequence_length"), degrees.context_degree),
    Rule(("model", "parallelism", "train.compile"), degrees.pipeline_degree),
    Rule(("model", "parallelism.ep"), degrees.expert_degree),
    Rule(("parallelism.tp", "launch.devices_per_node"), degrees.tensor_in_node),
    Rule(("parallelism", "train.compile"), degrees.recompute),
    Rule(("model.vocab_size", "data"), _vocabulary),
    Rule(("train.precision", "engine", "accelerator"), _engine, to_run=True),
    Rule(("accelerator", "train.precision"), _accelerator),
    Rule(("accelerator",), _accelerator_figures),
    Rule(("schedule", "train.steps"), _schedule),
    Rule(("launch.time_limit_min", "launch.lead_s"), _time_limit),
    Rule(("checkpoint",), _save_interval),
    Rule(_DEADLINES, _heartbeat),
    Rule((*_DEADLINES, "recovery.hang"), _hang_limits),
    Rule((*_POLICY, "launch.nodes"), _restart),
    Rule(("cluster",), _container),
    Rule(("cluster", "launch.nodes", *_POLICY), _local_nodes, here=True),
    Rule(("runs_dir",), _runs_dir),
    Rule(("tracking.uri", "cluster", "runs_dir"), _tracking),
)
