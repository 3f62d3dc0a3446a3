#!/usr/bin/env python3
"""How long a run stands still after a failure, against tuned torchrun on the same test cluster.

    python tools/bench/recovery.py [--rounds N] [--cases worker,elastic,spare,cpu] [--seed S]
                                   [--markdown]

Starts its own cluster of three nodes with two workers each, and measures from a kill -9 to the end
of the first step that the workers after it take, one run at a time:

    worker    of one of four workers on two nodes; `recovery.restart=same`, torchrun --nnodes=2
    elastic   of one of three nodes; `restart=elastic`, torchrun --nnodes=2:3
    spare     of one of two nodes, a third one idle; `restart=spare`, torchrun --nnodes=2:2, which
              three agents join
    cpu       CPU time of agent and session for each second of training (agent_cpu.py)

Both sides train the same frozen config and save every `checkpoint.interval_steps`. Of ours it also
counts the steps that were trained again: by the ledger, and beside it by the spool. Neither the
first node nor its processes are killed: it hosts torchrun's rendezvous, whose loss torchrun does
not survive. Prints one JSON object, or tables with `--markdown` (then the JSON goes to stderr), and
says on stderr how far it is; the machine should be otherwise idle. Exit code 1 where a run of ours
did not come back, or lost more work than one interval and the save in flight.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(Path(__file__).parent)]
sys.dont_write_bytecode = True

from _chaos.processes import run_processes  # noqa: E402
from _devcluster.faults import kill_nodes  # noqa: E402
from _devcluster.state import open_state  # noqa: E402
from _recovery_report import markdown, problems  # noqa: E402
from _torchrun import Torchrun  # noqa: E402

from air_hpc.rundir.events import Event  # noqa: E402
from air_hpc.rundir.layout import RunDir, list_runs  # noqa: E402
from air_hpc.rundir.spool import iterate_samples, read_spool, spool_files  # noqa: E402
from tests.acceptance.runs import air_hpc, events_of, job_of, status_of, story  # noqa: E402
from tests.slurm_cluster import DevCluster, why_no_cluster  # noqa: E402

WORKERS = 2
INTERVAL_STEPS = 50
BEGUN = time.monotonic()
START_S, NEW_STEP_S = 600.0, 240.0
"""How long a start, and a new step after a kill, are waited for at most."""
MODEL = (
    "model.dim=64", "model.layers=2", "model.ffn_dim=128", "model.heads=2", "model.kv_heads=1",
    "data.sequence_length=64", "train.global_batch_size=24", "train.micro_batch_size=2",
    "train.steps=1000000", f"checkpoint.interval_steps={INTERVAL_STEPS}",
)  # fmt: skip
OURS = (
    "cluster=slurm", "launch.starter=fork", "launch.exclusive=true", "launch.time_limit_min=120",
    f"launch.devices_per_node={WORKERS}", "tracking.uri=null", "cluster.grace_s=15",
    "recovery.max_failures=1000", "recovery.max_unknown=1000", "recovery.max_no_progress=1000",
    "recovery.exclusion.enabled=false",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A way to fail: what is killed, how many nodes train, and each side's words for it."""

    kills: str
    nodes: int
    allocated: int
    words: tuple[str, ...]
    nnodes: str


CASES = {
    "worker": Case("worker", 2, 2, ("recovery.restart=same",), "2:2"),
    "elastic": Case("node", 3, 3, ("recovery.restart=elastic", "recovery.min_nodes=2"), "2:3"),
    "spare": Case("node", 2, 3, ("recovery.restart=spare", "recovery.spare_nodes=1"), "2:2"),
}


@dataclass(frozen=True)
class Round:
    """One kill. Steps are None where the side cannot tell."""

    took_s: float | None
    lost_steps: int | None = None
    rolled_back: int | None = None
    """The same by the fold of the ledger."""
    lost_by_spool: int | None = None
    allowed_steps: int | None = None
    verdicts: tuple[str, ...] = ()
    moments_s: dict[str, float] | None = None
    """After the kill: when what our ledger tells had come."""


class Ours:
    """A run of air_hpc on the cluster."""

    def __init__(self, cluster: DevCluster, case: Case, folder: Path) -> None:
        self.cluster = cluster
        words = (*MODEL, *OURS, *case.words, f"launch.nodes={case.nodes}", f"runs_dir={folder}")
        air_hpc(*words, cluster=cluster)
        (self.run,) = list_runs(folder)

    def samples(self, after: str = "") -> list[tuple[str, int, float]]:
        """Of the newest generation that trained: its token, and step and time of each sample. Of
        generation `after` and older ones nothing is read."""
        for path in reversed(spool_files(self.run)):
            if path.stem == after:
                break
            if found := read_spool(path)[0]:
                return [(path.stem, sample.step, sample.time) for sample in found]
        return []

    def victim(self) -> tuple[str, Callable[[], None]]:
        """The last node that trains, and how to kill one of its workers."""
        nodes = events_of(self.run, "generation_started")[-1].facts["nodes"]
        first = events_of(self.run, "attempt_started")[-1].facts["node"]
        node = [name for name in nodes if name != first][-1]

        def kill_worker() -> None:
            run_processes(self.run.path).workers[node][0].send(signal.SIGKILL)

        return node, kill_worker

    def ready(self) -> bool:
        """Whether this generation trains and has saved since it began."""
        last = max((e.time for e in events_of(self.run, "training_started")), default=1e18)
        commits = [e.time for e in events_of(self.run, "checkpoint_committed")]
        return bool(self.samples()) and any(at > last for at in commits)

    def mark(self) -> str:
        """The workers that train now."""
        return self.samples()[-1][0]

    def first_step_after(self, mark: str, moment: float) -> float | None:
        """When the first step of other workers than `mark` ended."""
        return next((at for _, _, at in self.samples(after=mark) if at > moment), None)

    def round(self, mark: str, moment: float, took_s: float | None) -> Round:
        """What the ledger says about the work that was lost."""
        resumed = [e for e in events_of(self.run, "resumed") if e.time > moment]
        if not resumed:
            return Round(took_s)
        ended = [e for e in events_of(self.run, "generation_ended") if e.time > moment]
        ended += [e for e in events_of(self.run, "attempt_ended") if e.time > moment]
        back = int(resumed[0].facts["step"])
        reached = max(s.step for s in iterate_samples(self.run) if str(s.token) == mark)
        told = [last - first + 1 for first, last in status_of(self.run).rolled_back if first > back]
        return Round(
            took_s,
            lost_steps=int(resumed[0].facts["lost_steps"]),
            lost_by_spool=max(0, reached - back),
            allowed_steps=self._allowed(moment),
            rolled_back=told[-1] if told else 0,
            verdicts=tuple(str(e.facts["verdict"]) for e in ended if "verdict" in e.facts),
            moments_s=self._moments(moment),
        )

    def _moments(self, moment: float) -> dict[str, float]:
        """Of what came after the kill."""
        kinds = ("generation_ended", "generation_started", "resumed", "training_started")
        found = {kind: [e.time for e in events_of(self.run, kind)] for kind in kinds}
        return {
            kind: round(next((at for at in times if at > moment), float("nan")) - moment, 2)
            for kind, times in found.items()
        }

    def _allowed(self, moment: float) -> int:
        """One interval, and another one where a save was in flight at the kill."""
        begun = [e for e in events_of(self.run, "checkpoint_begun") if e.time <= moment]
        done = {_step(e) for e in events_of(self.run, "checkpoint_committed") if e.time <= moment}
        in_flight = bool(begun) and _step(begun[-1]) not in done
        return INTERVAL_STEPS * (2 if in_flight else 1)

    def cancel(self) -> None:
        """End it, and wait until its job is gone."""
        kill_job(self.cluster, job_of(self.run))

    def text(self) -> str:
        """The ledger, for a run that did not come back."""
        return story(self.run)


class Theirs:
    """The same config under torchrun."""

    def __init__(self, cluster: DevCluster, case: Case, folder: Path, run: RunDir) -> None:
        self.job = Torchrun.submit(
            cluster, run.run_yaml, run.shared_dir / "data", folder, nodes=case.allocated,
            nnodes=case.nnodes, workers=WORKERS, port=29_400,
        )  # fmt: skip
        self.cluster = cluster

    def victim(self) -> tuple[str, Callable[[], None]]:
        """The last node that trains, and how to kill one of its workers."""
        found, first = self.job.workers(), self.job.first_node()
        node = sorted(name for name in found if name != first)[-1]
        return node, lambda: found[node][0].send(signal.SIGKILL)

    def ready(self) -> bool:
        """Whether these workers have trained past a save."""
        steps = self.job.steps()
        mine = [entry["step"] for entry in steps if entry["pid"] == steps[-1]["pid"]]
        return bool(mine) and mine[-1] // INTERVAL_STEPS > mine[0] // INTERVAL_STEPS

    def mark(self) -> str:
        """The workers that train now, by rank 0's pid."""
        return str(self.job.steps()[-1]["pid"])

    def first_step_after(self, mark: str, moment: float) -> float | None:
        """When the first step of other workers than `mark` ended."""
        steps = self.job.steps(newer=True)
        return next(
            (e["time"] for e in steps if str(e["pid"]) != mark and e["time"] > moment), None
        )

    def round(self, mark: str, moment: float, took_s: float | None) -> Round:
        """Torchrun counts nothing."""
        return Round(took_s)

    def cancel(self) -> None:
        """End it, and wait until its job is gone."""
        kill_job(self.cluster, self.job.job)

    def text(self) -> str:
        """The end of the job's log."""
        return (self.job.out / "log").read_text()[-4000:]


def kill_job(cluster: DevCluster, job: str) -> None:
    """End a job without its grace, and bring its nodes back."""
    cluster.run(["scancel", "--full", "--signal=KILL", job], check=False)
    cluster.clean()


def _step(event: Event) -> int:
    return int(event.facts["step"])


def wait_for(look: Callable[[], Any], timeout_s: float) -> Any:
    """The first true value of `look`, or None at the end of the time."""
    deadline = time.monotonic() + timeout_s
    while not (value := look()):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.1)
    return value


def say(text: str) -> None:
    """How far it is, with the seconds since the start."""
    print(f"[{time.monotonic() - BEGUN:4.0f} s] {text}", file=sys.stderr, flush=True)


def one_kill(side: Ours | Theirs, case: Case, cluster: DevCluster, chance: random.Random) -> Round:
    """Kill once somewhere between two saves, and wait for the next step."""
    if not wait_for(side.ready, START_S):
        sys.exit(f"the run did not train\n{side.text()}")
    time.sleep(chance.uniform(0.5, 2.5))
    node, kill_worker = side.victim()
    state, mark = open_state(str(cluster.state)), side.mark()
    moment = time.time()
    if case.kills == "worker":
        kill_worker()
    else:
        kill_nodes(state, [node])
    at = wait_for(lambda: side.first_step_after(mark, moment), NEW_STEP_S)
    if at is None:
        say(f"no new step within {NEW_STEP_S:g} s\n{side.text()}")
    return side.round(mark, moment, None if at is None else round(at - moment, 2))


def rounds_of(
    make: Callable[[], Ours | Theirs], case: Case, cluster: DevCluster, count: int, seed: str
) -> list[Round]:
    """`count` kills: of workers in one run, of nodes in a run each."""
    chance, found = random.Random(seed), []
    for kills in [count] if case.kills == "worker" else [1] * count:
        side = make()
        try:
            for _ in range(kills):
                found.append(one_kill(side, case, cluster, chance))
                said = {k: v for k, v in asdict(found[-1]).items() if v not in (None, ())}
                say(f"{type(side).__name__.lower()} {len(found)}/{count}: {said}")
        finally:
            side.cancel()
    return found


def measure(name: str, cluster: DevCluster, folder: Path, rounds: int, seed: int) -> dict[str, Any]:
    """One case on both sides."""
    case, numbers = CASES[name], iter(range(1_000_000))
    frozen = folder / "config"
    air_hpc(
        *MODEL, *OURS, f"launch.nodes={case.nodes}", "launch.sbatch={hold: true}",
        f"runs_dir={frozen}", cluster=cluster,
    )  # fmt: skip
    cluster.clean()
    (run,) = list_runs(frozen)
    sides: dict[str, Callable[[], Ours | Theirs]] = {
        "torchrun": lambda: Theirs(cluster, case, folder / f"torchrun-{next(numbers)}", run),
        "air_hpc": lambda: Ours(cluster, case, folder / f"ours-{next(numbers)}"),
    }
    result: dict[str, Any] = {}
    for side, make in sides.items():
        found = rounds_of(make, case, cluster, rounds, f"{seed}/{name}")
        taken = [each.took_s for each in found if each.took_s is not None]
        result[side] = {
            "median_s": round(statistics.median(taken), 2) if taken else None,
            "worst_s": max(taken, default=None),
            "never": len(found) - len(taken),
            "rounds": [{k: v for k, v in asdict(e).items() if v not in (None, ())} for e in found],
        }
        say(f"{name} {side}: {result[side]['median_s']} s, {taken}")
    return result


def agent_cpu() -> Any:
    """What agent_cpu.py prints."""
    tool = Path(__file__).with_name("agent_cpu.py")
    done = subprocess.run([sys.executable, str(tool)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


@contextlib.contextmanager
def own_cluster() -> Iterator[DevCluster]:
    """Three nodes for this benchmark alone."""
    with DevCluster() as cluster:
        yield cluster.up(nodes=3, devices_per_node=WORKERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--cases", default=",".join([*CASES, "cpu"]))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--markdown", action="store_true", help="print tables instead of JSON")
    options = parser.parse_args()
    cases = options.cases.split(",")
    if unknown := set(cases) - {*CASES, "cpu"}:
        parser.error(f"--cases: {', '.join(sorted(unknown))}: must be of {', '.join(CASES)}, cpu")
    if reason := why_no_cluster():
        sys.exit(f"no test cluster: {reason}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Whoever ends it early must not leave a cluster behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        "load_before": os.getloadavg()[0],
        "rounds": options.rounds,
        "checkpoint_interval_steps": INTERVAL_STEPS,
    }
    # A shared file system is assumed by both sides; other users must be able to reach the script.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        if set(cases) & set(CASES):
            with own_cluster() as cluster:
                for case in (case for case in CASES if case in cases):
                    folder = Path(name) / case
                    result[case] = measure(case, cluster, folder, options.rounds, options.seed)
        if "cpu" in cases:
            result["cpu"] = agent_cpu()
    print(json.dumps(result, indent=1), file=sys.stderr if options.markdown else sys.stdout)
    if options.markdown:
        print(markdown(result))
    if found := problems(result):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
