"""What one rank of a run computes, sends and holds, by building its engine and running a step.

    python -m air_hpc.parallel.trace RUN.yaml [--rank R]

prints one JSON object. RUN.yaml is a frozen run (`-`: on standard input). Nothing of the run's size
is needed: no device, no other rank, no memory for the weights (`traced`). It takes seconds to a
minute, and a process for each rank, since torch makes one world in a process.

    rank, pp_rank, world_size, mesh, micro_batches
    parameters      that the rank keeps, by number
    memory          bytes of tensors at the fullest moment: `peak_bytes`, and by what holds them:
                    weights, gathered_weights (FSDP's), gradients, optimizer, activations,
                    buffers (of collectives), temporary (of the backward pass and the optimizer)
    in_flight       in a pipeline: by stage, the micro-batches held at a time, and bytes of each
    flops           of a step on this rank: `forward`, and `backward` with what is computed again;
                    attention as in `plan.flops`' palm convention
    traffic         of a step: axis, collective, ranks, calls, tensor_bytes (`counting.Moved`)

Two micro-batches are run, and what each adds is multiplied. The peak of a pipeline is that of one
micro-batch in each of the rank's stages, and for each further one in flight what it leaves there
(`plan.pipeline_time`).

Kernels are the CPU's: no allocator's fragmentation, no workspaces, no communicator's own buffers.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from air_hpc.config.spec import OptimizerSpec, RunSpec
from air_hpc.errors import EXIT_OK, AirHpcError, BadInput
from air_hpc.parallel.counting import Flops, Moved, Watch
from air_hpc.parallel.holding import ACTIVATIONS
from air_hpc.parallel.options import EngineOptions
from air_hpc.parallel.traced import TracedEngine, fake_world
from air_hpc.plan.frozen import read_run_yaml
from air_hpc.plan.pipeline_time import in_flight
from air_hpc.plan.schedule import stages_per_rank
from air_hpc.plan.types import Mesh, Plan


@dataclass(frozen=True)
class Held:
    """A stage of the rank: how many micro-batches it holds at a time, and the bytes of each."""

    stage: int
    micro_batches: int
    bytes_each: int


@dataclass(frozen=True)
class Trace:
    """What was counted; the module says what each part is."""

    rank: int
    pp_rank: int
    world_size: int
    mesh: Mesh
    micro_batches: int
    parameters: int
    peak_bytes: int
    memory: dict[str, int]
    in_flight: tuple[Held, ...]
    flops: dict[str, int]
    traffic: tuple[Moved, ...]

    def to_json(self) -> dict[str, object]:
        """As it is printed."""
        body = asdict(self)
        body["memory"] = {"peak_bytes": body.pop("peak_bytes"), **body["memory"]}
        for name in ("in_flight", "traffic"):
            body[name] = list(body[name])
        return body


def trace(spec: RunSpec, plan: Plan, rank: int) -> Trace:
    """Count a step of `rank`. Once in a process.

    Raises BadInput for a rank that the mesh has not, and for what cannot be traced.
    """
    _check(spec, plan, rank)
    world = fake_world(plan.mesh, rank)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    count = plan.accumulation_steps
    engine = TracedEngine(
        fake,
        spec.model,
        spec.data.sequence_length,
        0,
        world,
        EngineOptions.of(spec),
        count,
        plan.micro_batch_size,
    )
    run = min(count, 2)
    flops = Flops()
    with fake:
        optimizer = _with_state(engine, spec.optimizer)
        shape = (run, plan.micro_batch_size, spec.data.sequence_length + 1)
        with engine.memory, Watch(flops, engine.traffic, engine.memory) as watch:
            engine.watch = watch
            engine.label_state(optimizer)
            engine.traced_step(torch.zeros(shape, dtype=torch.long), optimizer)
    pipelined = plan.mesh.pp > 1
    often = _often(run, count, pipelined=pipelined)
    held = _in_flight(spec, plan, engine) if pipelined else ()
    peak, by_label = _peak(engine, held, run)
    return Trace(
        rank=rank,
        pp_rank=world.mesh.get_local_rank("pp"),
        world_size=plan.world_size,
        mesh=plan.mesh,
        micro_batches=count,
        parameters=sum(_local_numel(p) for p in engine.parameters()),
        peak_bytes=peak,
        memory=by_label,
        in_flight=held,
        flops={
            way: sum(n * flops.segments[i][way] for i, n in enumerate(often))
            for way in ("forward", "backward")
        },
        traffic=engine.traffic.total(often),
    )


def _check(spec: RunSpec, plan: Plan, rank: int) -> None:
    if not 0 <= rank < plan.world_size:
        raise BadInput.single("rank", rank, "no such rank", allowed=f"0 to {plan.world_size - 1}")
    if spec.parallelism.recompute == "budget":
        raise BadInput.single(
            "parallelism.recompute",
            "budget",
            "a trace runs nothing compiled, and it is the compiler that keeps to a budget",
            allowed="none, full, ops",
        )


def _with_state(engine: TracedEngine, spec: OptimizerSpec) -> torch.optim.Optimizer:
    """An optimizer whose state is there, as it is from the second step on."""
    parameters = engine.parameters()
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(parameters, momentum=spec.momentum, foreach=False)
        if spec.name == "sgd"
        else torch.optim.AdamW(parameters, foreach=False)
    )
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def _often(run: int, count: int, *, pipelined: bool) -> list[int]:
    """How often a step of `count` micro-batches has what each segment of a run of `run` has.

    Before, the micro-batches, what comes after. The last one may reduce what the others do not; in
    a pipeline the first may gather what the others find.
    """
    micro_batches = [1] * run
    if run > 1:
        micro_batches[-1 if pipelined else 0] = count - 1
    return [1, *micro_batches, 1, *([1] if pipelined else [])]


def _in_flight(spec: RunSpec, plan: Plan, engine: TracedEngine) -> tuple[Held, ...]:
    mesh = plan.mesh
    each = stages_per_rank(spec.parallelism)
    weights = [0.0] * (mesh.pp * each)
    for stage in engine.stages:
        weights[stage.number] = float(stage.held_bytes)
    counts = in_flight(
        spec.parallelism.pp_schedule, mesh.pp, each, plan.accumulation_steps, weights
    )[engine.world.mesh.get_local_rank("pp")]
    return tuple(
        Held(stage.number, counts[stage.number], stage.held_bytes) for stage in engine.stages
    )


def _peak(engine: TracedEngine, held: Sequence[Held], run: int) -> tuple[int, dict[str, int]]:
    """The peak while micro-batches run, with all that are in flight, or of what comes after."""
    further = sum((one.micro_batches - 1) * one.bytes_each for one in held)
    running, after = engine.memory.peak(0, 1 + run), engine.memory.peak(1 + run)
    if running.total_bytes + further < after.total_bytes:
        return after.total_bytes, after.by_label
    by_label = dict(running.by_label)
    by_label[ACTIVATIONS] = by_label.get(ACTIVATIONS, 0) + further
    return running.total_bytes + further, by_label


def _local_numel(parameter: torch.Tensor) -> int:
    local = getattr(parameter, "to_local", lambda: parameter)()
    return int(local.numel())


def main(arguments: Sequence[str] | None = None) -> int:
    """Trace a rank of the run that the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m air_hpc.parallel.trace")
    parser.add_argument("run", help="a run.yaml, or - for standard input")
    parser.add_argument("--rank", type=int, default=0)
    asked = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    try:
        text = sys.stdin.read() if asked.run == "-" else Path(asked.run).read_text("utf-8")
        frozen = read_run_yaml(text, asked.run)
        found = trace(frozen.spec, frozen.plan, asked.rank)
    except OSError as error:
        print(f"error: {asked.run} cannot be read: {error.strerror}", file=sys.stderr)
        return BadInput.exit_code
    except AirHpcError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(found.to_json()))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
