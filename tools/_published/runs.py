"""Published runs as data, and what the planner makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from air_hpc.config.accelerators import load_accelerators
from air_hpc.config.compose import Composer
from air_hpc.config.spec import ModelSpec, ParallelismSpec
from air_hpc.hardware.accelerator import AcceleratorSpec
from air_hpc.plan.flops import flops_per_token
from air_hpc.plan.rates import Constants, Unknown, fitted, rates_of
from air_hpc.plan.step_time import job_time
from air_hpc.plan.types import Mesh
from air_hpc.plan.work import Job

FOLDER = Path(__file__).parent
GPUS_PER_NODE = 8


_PREDICTED: dict[tuple[str, str, Constants], float] = {}


@dataclass(frozen=True)
class Run:
    """One published run: what it was, and the tokens/s a GPU that were measured."""

    group: str
    name: str
    source: str
    fit: bool
    gpus: int
    job: Job
    accelerator: AcceleratorSpec
    stages: tuple[tuple[int, ...], ...] | None
    tokens_per_s: float

    def predicted(self, constants: Constants | None = None) -> float:
        """The planner's tokens/s a GPU. Raises ValueError where it has none: data must."""
        shares = constants or fitted()
        key = (self.group, self.name, shares)
        if key not in _PREDICTED:
            _PREDICTED[key] = self._predict(shares)
        return _PREDICTED[key]

    def _predict(self, constants: Constants) -> float:
        rates = rates_of(
            self.accelerator,
            GPUS_PER_NODE,
            self.job.precision,
            linear_precision="fp8" if self.job.fp8 else None,
            constants=constants,
        )
        if isinstance(rates, Unknown):
            raise ValueError(f"{self.group}, {self.name}: {rates.reason}")
        made = job_time(self.job, rates, stages=self.stages)
        if isinstance(made, Unknown):
            raise ValueError(f"{self.group}, {self.name}: {made.reason}")
        return self.tokens / made.total_s / self.gpus

    @property
    def tokens(self) -> int:
        """Of one step."""
        job = self.job
        sequences = job.micro_batch_size * job.micro_batches * job.mesh.data_parallel_size
        return sequences * job.sequence_length

    def error(self, constants: Constants | None = None) -> float:
        """Predicted over measured, less one: above 0 the planner promises too much."""
        return self.predicted(constants) / self.tokens_per_s - 1


def sources() -> dict[str, str]:
    """Where each figure is from."""
    return dict(_runs_yaml()["sources"])


def notes() -> dict[str, str]:
    """What was taken where a source does not say it, by group."""
    body = _runs_yaml()
    found = {group["name"]: group["note"] for group in body["groups"] if "note" in group}
    devices = {name: device["reason"] for name, device in body["devices"].items()}
    return {**found, **devices}


@cache
def all_runs() -> tuple[Run, ...]:
    """Every run of the data files, in order."""
    return (*_listed(), *_llm_foundry())


@cache
def _runs_yaml() -> Mapping[str, Any]:
    body: Mapping[str, Any] = yaml.safe_load((FOLDER / "runs.yaml").read_text(encoding="utf-8"))
    return body


@cache
def _models() -> Mapping[str, ModelSpec]:
    composer = Composer()
    named = ("llama_8b", "llama_70b", "llama_405b")
    found = {name: composer.compose([f"model={name}"]).model for name in named}
    for name, shape in _runs_yaml()["models"].items():
        found[name] = ModelSpec(name=name, **shape)
    return found


@cache
def _accelerators() -> Mapping[str, AcceleratorSpec]:
    found = {one.name: one for one in load_accelerators()}
    known = {field.name for field in fields(AcceleratorSpec)}
    for name, device in _runs_yaml()["devices"].items():
        changed = {key: value for key, value in device.items() if key in known}
        if "memory_bytes" in changed:
            changed["memory_bytes"] = int(changed["memory_bytes"])
        found[name] = replace(found[device["base"]], name=name, **changed)
    return found


def _listed() -> Iterator[Run]:
    for group in _runs_yaml()["groups"]:
        for row in group["runs"]:
            about = {"source": group["source"], **group["common"], **row}
            yield _run(group["name"], about)


def _llm_foundry() -> Iterator[Run]:
    body = yaml.safe_load((FOLDER / "llm_foundry.yaml").read_text(encoding="utf-8"))
    for table in body["tables"]:
        for model, length, gpus, micro, accumulation, recompute, speed in table["rows"]:
            about = {
                "source": body["source"],
                "name": f"{model}, {length:,}, {gpus} GPUs",
                "model": f"mpt_{model}",
                "device": table["device"],
                "gpus": gpus,
                "sequence_length": length,
                "micro_batch": micro,
                "micro_batches": accumulation,
                "recompute": recompute,
                "fp8": table.get("fp8", False),
                "tokens_per_s": speed,
            }
            yield _run(f"llm-foundry, {table['name']}", about)


def _run(group: str, about: Mapping[str, Any]) -> Run:
    model = _models()[about["model"]]
    gpus, length = about["gpus"], about["sequence_length"]
    pp, cp, tp = (about.get(axis, 1) for axis in ("pp", "cp", "tp"))
    mesh = Mesh(pp=pp, dp_shard=gpus // (pp * cp * tp), cp=cp, tp=tp)
    micro_batches = about.get("micro_batches", 1)
    if "global_batch" in about:
        micro_batches = about["global_batch"] // (mesh.dp_shard * about["micro_batch"])
    parallelism = ParallelismSpec(
        name="published",
        pp=pp,
        cp=cp,
        tp=tp,
        recompute=about.get("recompute", "none"),
        reshard_after_forward=about.get("reshard", True),
        pp_schedule=about.get("schedule", "1f1b"),
        pp_stages_per_rank=about.get("stages_per_rank", "auto"),
        cp_method=about.get("cp_method", "ulysses"),
    )
    job = Job(
        model=model,
        mesh=mesh,
        parallelism=parallelism,
        sequence_length=length,
        micro_batch_size=about["micro_batch"],
        micro_batches=micro_batches,
        compile=about.get("compile", False),
        fp8=about.get("fp8", False),
        fp8_gathers=about.get("fp8", False),
        overlapped_tp=about.get("overlapped_tp", False),
    )
    stages = None
    if about.get("one_layer_stages"):
        stages = ((), *((layer,) for layer in range(model.layers)), ())
    accelerator = _accelerators()[about["device"]]
    return Run(
        group=group,
        name=about["name"],
        source=about["source"],
        fit=about.get("fit", False),
        gpus=gpus,
        job=job,
        accelerator=accelerator,
        stages=stages,
        tokens_per_s=_measured(about, job, model, gpus),
    )


def _measured(about: Mapping[str, Any], job: Job, model: ModelSpec, gpus: int) -> float:
    if "tokens_per_s" in about:
        return float(about["tokens_per_s"])
    if "tflops" in about:
        flops = flops_per_token(model, job.sequence_length)
        return float(1e12 * about["tflops"] / getattr(flops, about["convention"]))
    sequences = job.micro_batch_size * job.micro_batches * job.mesh.data_parallel_size
    return float(sequences * job.sequence_length / about["step_s"] / gpus)
