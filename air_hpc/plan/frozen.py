"""run.yaml: a RunSpec and its Plan, frozen together with their hash.

The file is the one thing that every attempt reads, maybe weeks later and by another version of
this project. So it carries a schema version (a newer one is refused, by name), its hash (a file
edited by hand is refused: the run it describes would not be the run that its checkpoints are of),
and whatever a later writer of the same version added is kept when it is written again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from air_hpc.config.build import Built, build, show
from air_hpc.config.freeze import canonical_hash, dump_yaml, load_yaml, to_plain
from air_hpc.config.spec import SCHEMA_VERSION, RunSpec
from air_hpc.errors import BadInput, Problem, raise_if_any
from air_hpc.plan.types import Plan

_HEADER = (
    "# A frozen run of air_hpc: what was asked for (spec) and what it resolves to (plan).\n"
    "# Read at every attempt. Do not edit it: config_hash covers spec and plan; submit a new run.\n"
)


@dataclass(frozen=True)
class FrozenRun:
    """One run.yaml. `extra` holds keys this version does not know, nested as they were found."""

    run_id: str
    spec: RunSpec
    plan: Plan
    config_hash: str
    overrides: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


def freeze_run(
    run_id: str, spec: RunSpec, plan: Plan, overrides: tuple[str, ...] = ()
) -> FrozenRun:
    """A FrozenRun with its hash."""
    return FrozenRun(run_id, spec, plan, config_hash(spec, plan), overrides)


def config_hash(spec: RunSpec, plan: Plan, extra: Mapping[str, Any] | None = None) -> str:
    """The hash of a spec, its plan and the unknown keys inside them; the run's id is not in it."""
    return canonical_hash(_hashed(_plain_parts(spec, plan, extra or {})))


def render_run_yaml(frozen: FrozenRun) -> str:
    """The text of run.yaml. Writing it (atomically) is the run directory's business."""
    parts = _plain_parts(frozen.spec, frozen.plan, frozen.extra)
    body = {
        "schema_version": SCHEMA_VERSION,
        "run_id": frozen.run_id,
        "config_hash": canonical_hash(_hashed(parts)),
        "overrides": list(frozen.overrides),
        **parts,
    }
    return _HEADER + dump_yaml(body)


def read_run_yaml(text: str, source: str = "run.yaml") -> FrozenRun:
    """What `render_run_yaml` wrote.

    Raises BadInput, naming `source`, for what is no run.yaml, for a newer schema version, for a
    hash that does not match, and for keys that do not fit their types.
    """
    body = _mapping(text, source)
    _check_version(body, source)
    known = {"schema_version", "run_id", "config_hash", "overrides", "spec", "plan"}
    missing = [Problem(name, "null", f"{source} lacks it") for name in known if name not in body]
    raise_if_any(sorted(missing, key=lambda problem: problem.key))
    _check_header(body, source)
    found = _hash_of_file(body, source)
    if found != body["config_hash"]:
        raise BadInput.single(
            "config_hash",
            body["config_hash"],
            f"{source} was edited after it was written (its content has the hash {found})",
            hint="Submit a new run with the changed config instead",
        )
    spec = build(RunSpec, body["spec"], keep_unknown=True)
    plan = build(Plan, body["plan"], keep_unknown=True)
    raise_if_any(_placed("spec", spec) + _placed("plan", plan))
    assert spec.value is not None
    assert plan.value is not None
    extra: dict[str, Any] = {name: body[name] for name in body if name not in known}
    for name, unknown in (("spec", spec.unknown), ("plan", plan.unknown)):
        if unknown:
            extra[name] = unknown
    overrides = tuple(body["overrides"])
    return FrozenRun(body["run_id"], spec.value, plan.value, found, overrides, extra)


def _plain_parts(spec: RunSpec, plan: Plan, extra: Mapping[str, Any]) -> dict[str, Any]:
    parts: dict[str, Any] = {"spec": to_plain(spec), "plan": to_plain(plan)}
    _merge(parts, extra)
    return parts


def _merge(into: dict[str, Any], extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        present = into.get(name)
        if isinstance(present, dict) and isinstance(value, Mapping):
            _merge(present, value)
        else:
            into[name] = value


def _hashed(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"spec": body["spec"], "plan": body["plan"]}


def _placed(part: str, built: Built[Any]) -> list[Problem]:
    return [
        Problem(f"{part}.{p.key}", p.value, p.message, p.allowed, p.hint) for p in built.problems
    ]


def _mapping(text: str, source: str) -> Mapping[str, Any]:
    try:
        body = load_yaml(text)
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise BadInput.single("", "", f"{source} is no YAML: {where}") from None
    if not isinstance(body, Mapping) or not isinstance(body.get("schema_version"), int):
        raise BadInput.single("", "", f"{source} is no run.yaml: it has no schema_version")
    return body


def _check_header(body: Mapping[str, Any], source: str) -> None:
    problems = []
    if not isinstance(body["run_id"], str):
        problems.append(Problem("run_id", show(body["run_id"]), f"in {source}", "text"))
    overrides = body["overrides"]
    if not isinstance(overrides, list) or not all(isinstance(text, str) for text in overrides):
        problems.append(Problem("overrides", show(overrides), f"in {source}", "a list of text"))
    for part in ("spec", "plan"):
        if not isinstance(body[part], Mapping):
            problems.append(Problem(part, show(body[part]), f"in {source}", "a mapping"))
    raise_if_any(problems)


def _hash_of_file(body: Mapping[str, Any], source: str) -> str:
    """The hash of what a file holds; BadInput for what only an editor puts there (a date, nan)."""
    try:
        return canonical_hash(_hashed(body))
    except (TypeError, ValueError) as error:
        raise BadInput.single(
            "config_hash", body["config_hash"], f"{source} was edited after it was written: {error}"
        ) from None


def _check_version(body: Mapping[str, Any], source: str) -> None:
    version = body["schema_version"]
    if version > SCHEMA_VERSION:
        raise BadInput.single(
            "schema_version",
            version,
            f"{source} was written by a newer air_hpc",
            allowed=f"at most {SCHEMA_VERSION}",
            hint="Use the version of air_hpc that submitted the run, or a later one",
        )
