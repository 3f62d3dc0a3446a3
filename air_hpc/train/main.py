"""What a worker process does, and what it says when it fails.

Exit code 0: all steps done, or stopped as agreed with the state saved. Everything else is a
failure, told to the agent with its facts before the process leaves; the agent finds its class (but
for errors of this project's own, which have one) and decides what comes of it. A failing worker
leaves by `os._exit`: a background save may be waiting for a rank that will not answer, and must
not hold the process.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

from air_hpc.errors import EXIT_ENVIRONMENT, EXIT_OK, AirHpcError, BadInput, EnvironmentFailure
from air_hpc.plan.frozen import FrozenRun, read_run_yaml
from air_hpc.plan.resize import plan_for_world
from air_hpc.rundir.commit import CheckpointUnreadable
from air_hpc.rundir.fence import Fenced
from air_hpc.rundir.words import FailureClass
from air_hpc.session.messages import Message
from air_hpc.session.session import Session
from air_hpc.train.guard import LossDiverged

_OF_TORCH_MODULES: tuple[tuple[str, str, FailureClass | None], ...] = (
    ("air_hpc.checkpoint.saver", "SavesFail", FailureClass.STORAGE),
    ("air_hpc.checkpoint.loader", "NoUsableCheckpoint", FailureClass.CHECKPOINT),
    ("air_hpc.data.shards", "ShardUnreadable", FailureClass.DATA),
    ("air_hpc.parallel.failures", "CollectiveFailed", None),
    ("air_hpc.parallel.world", "RanksMissing", FailureClass.NETWORK),
    ("air_hpc.probes.ranks", "DeviceUnfit", FailureClass.DEVICE),
    ("air_hpc.probes.ranks", "LinkUnfit", FailureClass.NETWORK),
)
"""Errors whose modules import torch. Named, not imported: torch itself may be what is missing, and
an error can only be of a module that is loaded. None leaves the class to the table of failures:
what a collective library raised may be a device's fault, or one the user has a rule for."""


def main() -> int:
    """Train the run that the environment names; returns the exit code or leaves with it."""
    try:
        session = Session.attach()
    except AirHpcError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ENVIRONMENT
    try:
        return _work(session)
    except BaseException as error:
        _leave(session, error)


def _work(session: Session) -> int:
    with session.phase("init"):
        frozen = read_run_yaml(
            session.run.run_yaml.read_text(encoding="utf-8"), str(session.run.run_yaml)
        )
        _import_torch()
        return _train(session, frozen)


def _import_torch() -> None:
    try:
        import torch
    except ImportError as error:
        raise EnvironmentFailure(
            f"torch cannot be imported: {error}",
            tried=sys.executable,
            next_step="install air_hpc[train], or set cluster.venv, cluster.modules or "
            "cluster.container to an environment that has torch",
        ) from error
    from air_hpc.train.setup import torch_warning

    warning = torch_warning(torch.__version__)
    if warning is not None:
        print(f"warning: {warning}", file=sys.stderr)


def _train(session: Session, frozen: FrozenRun) -> int:
    import torch

    from air_hpc.parallel.failures import naming_collectives
    from air_hpc.parallel.world import start_world, stop_world
    from air_hpc.train.loop import train

    spec, plan, env = frozen.spec, frozen.plan, session.env
    if env.world_size != plan.world_size:
        plan = plan_for_world(spec, plan, env.world_size)
    torch.set_num_threads(plan.threads_per_worker)
    world = start_world(
        plan.mesh,
        rank=env.rank,
        local_rank=env.local_rank,
        world_size=env.world_size,
        kind=spec.accelerator.kind,
        timeout_s=spec.train.collective_timeout_s,
        cpu_offload=spec.parallelism.cpu_offload,
    )
    with naming_collectives(world.rank, _host(), world.axes_of_groups()):
        if env.preflight:
            try_device_and_links(session, frozen, world)
        peak = tell_peak(session, frozen, world)
        ended = train(session, spec, plan, world, peak)
    stop_world()
    return EXIT_OK if ended.saved else EXIT_ENVIRONMENT


def _host() -> str:
    return os.environ.get("SLURMD_NODENAME", "local")


def try_device_and_links(session: Session, frozen: FrozenRun, world: object) -> None:
    """The worker's pre-flight, told to the agent. Collective.

    Raises DeviceUnfit or LinkUnfit for what failed on this rank.
    """
    from air_hpc.parallel.world import World
    from air_hpc.probes.ranks import Here, RanksAsked, check_ranks, raise_if_unfit
    from air_hpc.train.setup import set_determinism

    assert isinstance(world, World)
    spec = frozen.spec
    floors = spec.recovery.preflight
    # cuBLAS reads its workspace's setting at its first call, which is here.
    set_determinism(spec.train.deterministic, world.device)
    with session.phase("preflight"):
        checks = check_ranks(
            Here(
                world.rank,
                world.world_size,
                session.env.local_world_size,
                _host(),
                world.device,
                world.control,
            ),
            RanksAsked(
                spec.train.precision,
                floors.min_matmul_ratio,
                floors.max_all_reduce_s,
                min(floors.timeout_s, spec.train.collective_timeout_s),
            ),
        )
    session.note(Message.PREFLIGHT, checks=[check.to_json() for check in checks])
    raise_if_unfit(checks)


def tell_peak(session: Session, frozen: FrozenRun, world: object) -> float | None:
    """Find the peak of a device on rank 0, tell the agent and the other ranks. Collective."""
    import torch

    from air_hpc.checkpoint.ranks import Ranks
    from air_hpc.config.accelerators import load_accelerators
    from air_hpc.parallel.world import World
    from air_hpc.train.peak import Peak, find_peak

    assert isinstance(world, World)
    spec = frozen.spec
    ranks = Ranks(world.rank, world.world_size, world.device, world.control)
    workers = session.env.local_world_size
    # The ranks of a node are consecutive, so the first of them share a node with rank 0.
    cores: set[int] = set().union(*ranks.hear(os.sched_getaffinity(0))[:workers])
    peak: Peak | None = None
    if world.rank == 0:
        peak = find_peak(
            spec.accelerator,
            () if world.device.type == "cpu" else load_accelerators(),
            spec.train.precision,
            world.device,
            workers,
            len(cores),
            session.run.shared_dir / "calibrations",
            # All wait for rank 0 here; a restart inside the allocation does not measure anew.
            again=session.token.generation == 1,
        )
        if peak.note:
            print(peak.note, file=sys.stderr)
        session.note(
            Message.MEASURED,
            peak_flops_per_device=peak.flops_per_device,
            peak_source=peak.source,
            peak_note=peak.note,
            device_name=peak.device,
            precision=spec.train.precision,
            threads=torch.get_num_threads(),
            world_size=world.world_size,
            torch_version=torch.__version__,
        )
    told: float | None = ranks.tell(None if peak is None else peak.flops_per_device)
    return told


def _leave(session: Session, error: BaseException) -> NoReturn:
    text = "".join(traceback.format_exception(error))
    expected = isinstance(error, AirHpcError)
    print(f"error: {error}" if expected else text, file=sys.stderr)
    code = error.exit_code if isinstance(error, AirHpcError) else 1
    try:
        facts = error.facts if isinstance(error, LossDiverged) else None
        session.failed(error, traceback=text, failure_class=own_class(error), facts=facts)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 1)


def own_class(error: BaseException) -> FailureClass | None:
    """The failure class of an error of this project's own; None for any other.

    What others raise is classified by the agent, by the run's table of failures.
    """
    for module, name, failure_class in _OF_TORCH_MODULES:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(error, kind):
            return failure_class
    by_type: list[tuple[type[BaseException], FailureClass]] = [
        (Fenced, FailureClass.FENCED),
        (LossDiverged, FailureClass.DIVERGED),
        (CheckpointUnreadable, FailureClass.STORAGE),
        (BadInput, FailureClass.USER_ERROR),
        (EnvironmentFailure, FailureClass.ENVIRONMENT),
    ]
    return next((found for kind, found in by_type if isinstance(error, kind)), None)
