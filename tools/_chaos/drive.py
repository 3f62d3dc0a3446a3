"""Drives one run through its plan: submits it, waits for each batch's moment, injects, waits until
it trains again, and looks at what is left at its end."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from _chaos import check
from _chaos.faults import TIME_LIMIT_MIN, Target, inject
from _chaos.mlflow import Proxy
from _chaos.plan import ENDS_GENERATION, Batch, Fault, Kind, RunPlan, When
from air_hpc.errors import AirHpcError
from air_hpc.rundir.events import read_ledger
from air_hpc.rundir.fence import Token, newest_token
from air_hpc.rundir.layout import RunDir, list_runs
from air_hpc.rundir.spool import read_spool, spool_files
from tests.acceptance.runs import SMALL, air_hpc, events_of, losses, status_of, story
from tests.slurm_cluster import DevCluster

POLL_S = 0.25
INJECTABLE_S = 90.0
"""How long a fault may wait for a moment at which it can be done."""
MOMENT_S = 60.0
"""How long a batch waits for its moment."""
LEFTOVER_S = 75.0
"""How long an isolated node's processes may take to notice that they are alone."""
STEADY_S = 3.0
HANG_FLOORS_S = {
    "start": 60, "init": 45, "compile": 45, "preflight": 30, "first_step": 30,
    "step": 20, "save": 20, "load": 20, "data": 20, "eval": 20, "finish": 30,
}  # fmt: skip
"""A stopped worker may be in any phase; starting takes seconds where two cores hold three runs."""
DISK_KIB = 96 * 1024
T = TypeVar("T")


class Stopped(Exception):
    """The campaign was interrupted."""


class TooLong(Exception):
    """Something did not happen in its time; the text says what."""


@dataclass
class Injected:
    """One fault as it was done."""

    fault: Fault
    done: str | None
    """What was done; None: there was no moment for it."""
    alone: bool
    when: When
    recovered_s: float | None = None
    """From the batch's last fault to the first new step that was seen."""
    lost_steps: int | None = None
    """Steps that the batch cost, by the ledger."""


@dataclass
class Outcome:
    """How one run went."""

    plan: RunPlan
    run_id: str = ""
    injected: list[Injected] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    story: str = ""
    wall_s: float = 0.0


@dataclass(frozen=True)
class Surroundings:
    """What all runs of a campaign share."""

    cluster: DevCluster
    folder: Path
    site: Path
    references: Mapping[str, Mapping[int, float]]
    """Undisturbed losses by policy."""
    mlflow_port: int | None
    steps: int
    patience_s: float
    stop: threading.Event
    sync: Callable[[RunDir, Path, Proxy | None], list[str]]
    say: Callable[[str], None]


def model_words(policy: str, steps: int) -> tuple[str, ...]:
    """What decides the losses. Dropout differs with the world's size, so elastic runs have none."""
    more = ("model.dropout=0.0",) if policy == "elastic" else ()
    return (*SMALL, f"train.steps={steps}", *more)


def run_words(plan: RunPlan, around: Surroundings, runs_dir: Path, clocks: Path) -> list[str]:
    """The words that submit a run of two nodes with two workers each."""
    policy = {
        "spare": ["recovery.spare_nodes=1"],
        "elastic": ["recovery.min_nodes=1"],
    }.get(plan.policy, [])
    return [
        *model_words(plan.policy, around.steps),
        "cluster=slurm", "launch.nodes=2", "launch.devices_per_node=2", "launch.partition=low",
        f"launch.time_limit_min={TIME_LIMIT_MIN}", "launch.lead_s=150", "cluster.grace_s=15",
        "launch.start_timeout_s=60", f"runs_dir={runs_dir}", f"data.cache_dir={around.folder}/data",
        f"cluster.node_local_dir={around.folder}/local", "checkpoint.keep_last=3",
        "cluster.env={" + f"PYTHONPATH: '{around.site}', AIR_HPC_CHAOS_CLOCK: '{clocks}'" + "}",
        f"recovery.restart={plan.policy}", *policy,
        "recovery.max_failures=1000", "recovery.max_unknown=1000", "recovery.max_no_progress=1000",
        "recovery.exclusion.enabled=false", "recovery.stop_timeout_s=30",
        "recovery.preflight.min_disk_bytes=0", "recovery.preflight.max_clock_skew_s=null",
        "recovery.heartbeat_timeout_s=8", "recovery.lease_s=15", "train.collective_timeout_s=60",
        *[f"recovery.hang.{phase}_s={floor_s}" for phase, floor_s in HANG_FLOORS_S.items()],
    ]  # fmt: skip


class Drive:
    """One run of the campaign."""

    def __init__(self, plan: RunPlan, around: Surroundings) -> None:
        self.plan, self.around = plan, around
        self.outcome = Outcome(plan)
        self.folder = around.folder / f"run-{plan.number}"
        self.runs_dir, self.clocks = self.folder / "runs", self.folder / "clocks"
        self.target: Target | None = None
        self._mark: Token | None = None
        self._must_exceed: Token | None = None
        """A next step of this token or an older one is no recovery; None: any step is one."""
        self._injected_at = 0.0
        self._lost = 0
        """Steps lost until now, by the ledger."""
        self._submit_s = 0.0
        self._starts = 0
        """Attempts and generations that had started at the last batch."""

    def execute(self) -> Outcome:
        """The whole life of the run. What goes wrong is a violation in the outcome."""
        for folder in (self.runs_dir, self.clocks):
            folder.mkdir(parents=True)
        proxy = None if self.around.mlflow_port is None else Proxy(self.around.mlflow_port)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_KIB}k", "tmpfs", str(self.runs_dir)]
        subprocess.run(mount, check=True)
        try:
            self._live(proxy)
        except TooLong as error:
            self.outcome.violations.append(str(error))
        except Stopped:
            self.outcome.violations.append("interrupted before its end")
        except AssertionError as error:
            self.outcome.violations.append(f"a command failed: {str(error)[-2000:]}")
        except (subprocess.TimeoutExpired, OSError, AirHpcError) as error:
            # The other runs of the campaign, and its report, do without this one.
            self.outcome.violations.append(f"a command failed: {str(error)[:2000]}")
        finally:
            self._clean_up(proxy)
        return self.outcome

    # -- the run's life ----------------------------------------------------------------------------

    def _live(self, proxy: Proxy | None) -> None:
        words = run_words(self.plan, self.around, self.runs_dir, self.clocks)
        uri = "null" if proxy is None else proxy.uri
        started = time.monotonic()
        air_hpc(*words, f"tracking.uri={uri}", cluster=self.around.cluster)
        self._submit_s = time.monotonic() - started
        (run,) = list_runs(self.runs_dir)
        self.outcome.run_id = run.run_id
        self.target = Target(self.around.cluster, run, self.runs_dir, self.clocks, proxy)
        pending: list[Injected] = []
        """What the run has not recovered from yet."""
        for batch in self.plan.batches:
            if batch.when is not When.STARTING:
                if not self._trains_again(run, pending):
                    break
                pending = []
            if not self._moment(run, batch):
                break
            pending += self._inject_all(batch)
            for entry in pending:
                entry.alone = len(pending) == 1
        if self._trains_again(run, pending):
            self._wait(lambda: status_of(run).terminal, "the run's end", 4 * self._patience_s)
        self.outcome.wall_s = time.monotonic() - started
        self._examine(run, proxy)

    @property
    def _patience_s(self) -> float:
        return self.around.patience_s

    def _wait(self, look: Callable[[], T], what: str, timeout_s: float) -> T:
        """The first true value of `look`; undoes what is due meanwhile."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self.around.stop.is_set():
                raise Stopped
            assert self.target is not None
            self.target.settle()
            if value := look():
                return value
            if time.monotonic() > deadline:
                raise TooLong(f"waited {timeout_s:.0f} s for {what}")
            time.sleep(POLL_S)

    def _moment(self, run: RunDir, batch: Batch) -> bool:
        """Wait for what the batch waits for; False where the run has ended.

        A start is the first one, or the one after the faults of the batch before.
        """

        def starts() -> int:
            return sum(len(events_of(run, f"{kind}_started")) for kind in ("attempt", "generation"))

        def starting() -> bool:
            return starts() > self._starts

        begun = len(events_of(run, "checkpoint_begun"))

        def saving() -> bool:
            return len(events_of(run, "checkpoint_begun")) > begun

        looks = {When.TRAINING: lambda: True, When.STARTING: starting, When.SAVING: saving}
        look = looks[batch.when]
        with contextlib.suppress(TooLong):  # then the batch comes at another moment
            self._wait(lambda: look() or status_of(run).terminal, f"{batch.when}", MOMENT_S)
        self._starts = starts()
        return not status_of(run).terminal

    def _inject_all(self, batch: Batch) -> list[Injected]:
        """Inject a batch; what the run has to recover from."""
        found = []
        for fault in batch.faults:
            self._pause(fault.delay_s * (0.1 if batch.when is When.SAVING else 1.0))
            entry = Injected(fault, self._try(fault), False, batch.when)
            self.outcome.injected.append(entry)
            self._say(f"{batch.when}: {entry.done or f'no moment for {fault.kind}'}")
            if entry.done is not None:
                found.append(entry)
        return found

    def _try(self, fault: Fault) -> str | None:
        """Inject as soon as it can be done."""
        assert self.target is not None
        target = self.target
        found: list[str] = []

        def attempt() -> bool:
            self._mark = newest_token(target.run)
            with contextlib.suppress(OSError):
                if (done := inject(fault, target)) is not None:
                    found.append(done)
            return bool(found) or status_of(target.run).terminal

        with contextlib.suppress(TooLong):
            self._wait(attempt, f"a moment for {fault.kind}", INJECTABLE_S)
        if found and fault.kind in ENDS_GENERATION and not target.hit_idle:
            self._must_exceed = self._mark
        self._injected_at = time.monotonic()
        return found[0] if found else None

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with contextlib.suppress(TooLong):
            self._wait(lambda: time.monotonic() >= deadline, "a pause", seconds + 1)

    def _trains_again(self, run: RunDir, pending: list[Injected]) -> bool:
        """Wait for a new step; False where the run has ended instead."""
        seen: list[tuple[Token, int]] = []

        def look() -> bool:
            if status_of(run).terminal:
                return True
            newest = self._newest_samples(run)
            if newest is None:
                return False
            if self._must_exceed is not None:
                return newest[0] > self._must_exceed
            if pending and time.monotonic() < self._injected_at + STEADY_S:
                return False
            seen.append(newest)
            return not pending or seen[-1] != seen[0]

        self._wait(look, f"a new step (newest token {newest_token(run)})", self._patience_s)
        self._must_exceed = None
        took_s = time.monotonic() - self._injected_at
        lost = sum(int(e.facts.get("lost_steps") or 0) for e in events_of(run, "resumed"))
        for entry in pending:
            entry.recovered_s = took_s
        if pending:
            pending[-1].lost_steps = lost - self._lost
            self._say(f"goes on after {took_s:.1f} s, {lost - self._lost} steps lost")
        self._lost = lost
        return not status_of(run).terminal

    @staticmethod
    def _newest_samples(run: RunDir) -> tuple[Token, int] | None:
        for path in reversed(spool_files(run)):
            if samples := read_spool(path)[0]:
                return samples[-1].token, len(samples)
        return None

    def _say(self, text: str) -> None:
        self.around.say(f"run {self.plan.number} ({self.plan.policy}): {text}")

    # -- its end -----------------------------------------------------------------------------------

    def _examine(self, run: RunDir, proxy: Proxy | None) -> None:
        assert self.target is not None
        self.target.settle(everything=True)
        events, status = read_ledger(run).events, status_of(run)
        clocks = any(i.done and i.fault.kind is Kind.CLOCK_STEP for i in self.outcome.injected)
        problems = check.state_problems(status)
        reference = self.around.references[self.plan.policy]
        if not problems:
            problems += check.loss_problems(losses(run), reference, check.exact_until(events))
            problems += self.around.sync(run, self.around.folder, proxy)
        wall_s = self.outcome.wall_s
        seen_s = None if clocks else (wall_s - self._submit_s, wall_s)
        problems += check.time_problems(events, status, seen_s)
        problems += [] if clocks else check.fence_problems(events)
        problems += self._leftovers(run)
        self.outcome.violations += problems

    def _leftovers(self, run: RunDir) -> list[str]:
        def look() -> list[str]:
            events = read_ledger(run).events
            return [
                *check.leftover_processes(run),
                *check.leftover_files(run),
                *check.leftover_ports(run, events),
            ]

        with contextlib.suppress(TooLong):
            self._wait(lambda: not look(), "the run to leave nothing behind", LEFTOVER_S)
        return look()

    def _clean_up(self, proxy: Proxy | None) -> None:
        target = self.target
        if target is not None:
            target.settle(everything=True)
            with contextlib.suppress(OSError):
                self.outcome.story = story(target.run)
            for thread in target.revivals:
                thread.join(0 if self.around.stop.is_set() else 180)
            if not status_of(target.run).terminal:
                with contextlib.suppress(AssertionError):
                    air_hpc("cancel", str(target.run.path), cluster=self.around.cluster)
            if self.outcome.violations and not self.around.stop.is_set():
                self._keep(target.run)
        if proxy is not None:
            proxy.close()
        subprocess.run(["umount", "--lazy", str(self.runs_dir)], check=False)

    def _keep(self, run: RunDir) -> None:
        """Copy what tells of a violation off the small file system."""
        kept = self.folder / "kept"
        kept.mkdir()
        for name in ("ledger", "attempts", "metrics", "run.yaml"):
            words = ["cp", "-a", str(run.path / name), str(kept)]
            subprocess.run(words, check=False, capture_output=True)
        logs = [str(path) for path in (run.shared_dir / "submissions").glob("*/*.log")]
        subprocess.run(["cp", *logs, str(kept)], check=False, capture_output=True)
