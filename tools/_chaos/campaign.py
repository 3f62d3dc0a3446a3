"""One campaign: its own cluster, the undisturbed references, several disturbed runs at once, and an
end that leaves nothing, also when it is interrupted."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from _chaos.check import exact_until, loss_problems
from _chaos.drive import Drive, Outcome, Surroundings, model_words
from _chaos.mlflow import MlflowServer, Proxy
from _chaos.plan import RunPlan
from _chaos.processes import left_of
from air_hpc.rundir.events import read_ledger
from air_hpc.rundir.layout import RunDir, list_runs
from tests.acceptance.runs import air_hpc, losses
from tests.slurm_cluster import DevCluster

SITE = Path(__file__).resolve().parent / "site"
NODES_A_RUN = 3
"""Two that train and a spare one."""


@dataclass(frozen=True)
class Options:
    """How a campaign runs."""

    runs_at_once: int
    nodes: int
    steps: int
    mlflow_server: bool
    patience_s: float
    keep: Path | None
    references: Path | None
    """Where undisturbed losses are kept for the next campaign of the same code."""


def execute(
    plans: Sequence[RunPlan],
    options: Options,
    on_end: Callable[[list[Outcome]], None] = lambda _: None,
    make_up: Callable[[list[Outcome]], Sequence[RunPlan]] = lambda _: (),
) -> list[Outcome]:
    """Run all plans, and then those that make up for what they missed; the outcomes in their order.

    An interrupted campaign ends its runs, leaves nothing behind, and has the outcomes up to there.
    `on_end` gets those known after each end.
    """
    folder = Path(tempfile.mkdtemp(prefix="air_hpc-chaos-", dir="/tmp"))
    folder.chmod(0o755)
    stop, outcomes = threading.Event(), list[Outcome]()
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, folder, options.keep, outcomes)
        server = stack.enter_context(MlflowServer(folder)) if options.mlflow_server else None
        cluster = stack.enter_context(DevCluster())
        cluster.up(nodes=options.nodes, devices_per_node=2)
        references = _references(plans, options, folder)
        if server is not None:
            server.wait()
        around = Surroundings(
            cluster, folder, SITE, references, server.port if server else None, options.steps,
            options.patience_s, stop, _sync, _sayer(),
        )  # fmt: skip
        further = plans
        while further and not stop.is_set():
            outcomes += _all(further, around, options.runs_at_once, outcomes, on_end)
            further = make_up(outcomes)
    return outcomes


def _sayer() -> Callable[[str], None]:
    """Says what happens, with the seconds since now."""
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {text}", file=sys.stderr, flush=True)

    return say


def _all(
    plans: Sequence[RunPlan],
    around: Surroundings,
    at_once: int,
    before: Sequence[Outcome],
    on_end: Callable[[list[Outcome]], None],
) -> list[Outcome]:
    ended = list(before)
    lock = threading.Lock()

    def live(plan: RunPlan) -> Outcome | None:
        if around.stop.is_set():
            return None
        outcome = Drive(plan, around).execute()
        around.say(
            f"run {plan.number} ({plan.policy}) ended after {outcome.wall_s:.0f} s: "
            + ("; ".join(outcome.violations)[:300] or "well")
        )
        with lock:
            ended.append(outcome)
            on_end(sorted(ended, key=lambda each: each.plan.number))
        return outcome

    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(live, plan) for plan in plans]
        try:
            wait(futures)
        except KeyboardInterrupt:
            around.say("interrupted: ending what runs")
            around.stop.set()
    return [outcome for future in futures if (outcome := future.result()) is not None]


def _references(
    plans: Sequence[RunPlan], options: Options, folder: Path
) -> dict[str, dict[int, float]]:
    """The undisturbed losses for each policy; computed once where two train the same."""
    found: dict[tuple[str, ...], dict[int, float]] = {}
    by_policy = {}
    for policy in sorted({plan.policy for plan in plans}):
        words = model_words(policy, options.steps)
        if words not in found:
            found[words] = _reference(words, options.references or folder, folder)
        by_policy[policy] = found[words]
    return by_policy


def _reference(words: tuple[str, ...], kept: Path, folder: Path) -> dict[int, float]:
    """The losses of a run of four workers that nobody disturbs, on this machine."""
    name = hashlib.sha256(" ".join(words).encode()).hexdigest()[:12]
    path = kept / f"reference-{name}.json"
    if not path.exists():
        runs_dir = folder / f"reference-{name}"
        air_hpc(
            *words, f"runs_dir={runs_dir}", "launch.devices_per_node=4",
            "tracking.uri=null", f"data.cache_dir={folder}/data",
            timeout_s=900,
        )  # fmt: skip
        (run,) = list_runs(runs_dir)
        kept.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(losses(run)))
    return {int(step): loss for step, loss in json.loads(path.read_text()).items()}


_SYNC = threading.Lock()
"""One at a time: each is a process that imports MLflow."""


def _sync(run: RunDir, folder: Path, proxy: Proxy | None) -> list[str]:
    """Ship what was not shipped, and look for exactly one MLflow run with each step once."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{folder / 'mlflow.db'}" if proxy is None else proxy.uri
    with _SYNC:
        words = ["--uri", uri] if proxy is None else []
        told = json.loads(air_hpc("sync", str(run.path), *words, "--json"))
        problems = [f"sync: {row['error']}" for row in told["runs"] if row.get("error")]
        client = MlflowClient(uri)
        found = client.search_runs(
            [each.experiment_id for each in client.search_experiments()],
            filter_string=f"tags.`air_hpc.run_id` = '{run.run_id}'",
        )
        if len(found) != 1:
            return [*problems, f"{len(found)} MLflow runs instead of one"]
        if found[0].info.status != "FINISHED":
            problems.append(f"the MLflow run is {found[0].info.status}")
        history = client.get_metric_history(found[0].info.run_id, "train/loss")
        points = {point.step: point.value for point in history}
        if len(points) < len(history):
            problems.append(f"MLflow has {len(history) - len(points)} losses more than steps")
        # A step is shipped once: of one that was trained again in a smaller world, MLflow keeps the
        # first loss, and the ledger's count is the last.
        exact_to = exact_until(read_ledger(run).events)
        problems += [f"MLflow: {each}" for each in loss_problems(points, losses(run), exact_to)]
    return problems


def _remove(folder: Path, keep: Path | None, outcomes: list[Outcome]) -> None:
    """Remove the campaign's folder and whoever still works in it (an interrupted reference); what
    tells of violations goes to `keep` first."""
    for process in left_of(folder):
        process.send(signal.SIGKILL)
    for outcome in outcomes:
        kept = folder / f"run-{outcome.plan.number}" / "kept"
        if keep is not None and kept.is_dir():
            shutil.copytree(kept, keep / f"run-{outcome.plan.number}", dirs_exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
