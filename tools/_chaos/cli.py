"""The command line. Exit codes: 0 nothing was violated, 1 something was, 2 bad input."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from _chaos.campaign import NODES_A_RUN, Options, execute
from _chaos.drive import Outcome
from _chaos.plan import MLFLOW, POLICIES, Kind, RunPlan, make_up_for, plans_for
from _chaos.report import Circumstances, injected, render, violations
from tests.slurm_cluster import why_no_cluster

ROOT = Path(__file__).resolve().parents[2]
STEPS = 600
MOST_RUNS = 3
"""With --make-up: so many times the planned runs at most."""


def main(arguments: list[str]) -> int:
    """Run a campaign and write its report."""
    parser = argparse.ArgumentParser(
        prog="chaos",
        description="Runs under random faults on a real Slurm of this machine, compared with "
        "undisturbed ones. A seed gives the same plan each time; what comes of it depends on the "
        "machine's timing.",
    )
    parser.add_argument("--faults", type=int, required=True, metavar="N")
    parser.add_argument("--seed", type=int, required=True, metavar="S")
    parser.add_argument("--runs-at-once", type=int, default=3, metavar="R")
    parser.add_argument("--nodes", type=int, metavar="N",
                        help="of the cluster (default: 3 a run at once, and 2)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help="of each run")
    parser.add_argument("--policies", default=",".join(POLICIES), metavar="P,P",
                        help="recovery.restart of the runs in turn (%(default)s)")  # fmt: skip
    parser.add_argument("--kinds", metavar="K,K", help="only these: " + ", ".join(
        kind.name.lower() for kind in Kind))  # fmt: skip
    parser.add_argument("--mlflow", choices=("server", "none"), default="server",
                        help="none: no server, and no faults of one")  # fmt: skip
    parser.add_argument("--patience", type=float, default=240, metavar="SECONDS",
                        help="for a new step after a fault (default %(default)s)")  # fmt: skip
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="markdown, written anew after each run (default: stdout)",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER",
                        help="copy the ledgers and logs of runs with violations there")  # fmt: skip
    parser.add_argument("--references", type=Path, metavar="FOLDER",
                        help="keep the losses of undisturbed runs there, and take those that are "
                        "there: for several campaigns of the same code")  # fmt: skip
    parser.add_argument("--make-up", action="store_true",
                        help="further runs until N faults were injected: some planned ones find no "
                        "moment")  # fmt: skip
    parser.add_argument("--plan", action="store_true", help="print the plan and run nothing")
    options = parser.parse_args(arguments)
    names = [kind.name.lower() for kind in Kind]
    wanted = options.kinds.split(",") if options.kinds else names
    policies = options.policies.split(",")
    for word, given, allowed in (
        ("--kinds", wanted, names),
        ("--policies", policies, list(POLICIES)),
    ):
        if unknown := sorted(set(given) - set(allowed)):
            parser.error(f"{word}: {', '.join(unknown)}: must be of {', '.join(allowed)}")
    if options.faults < 1 or options.runs_at_once < 1:
        parser.error("--faults and --runs-at-once must be at least 1")
    kinds = [kind for kind in Kind if kind.name.lower() in wanted]
    if options.mlflow == "none":
        kinds = [kind for kind in kinds if kind not in MLFLOW]
    if not kinds:
        parser.error("--kinds: nothing is left of them with --mlflow none")
    plans = plans_for(options.faults, options.seed, kinds=kinds, policies=policies)
    if options.plan:
        for plan in plans:
            for batch in plan.batches:
                for fault in batch.faults:
                    print(plan.number, plan.policy, batch.when, fault)
        return 0
    if reason := why_no_cluster():
        print(f"chaos: no test cluster: {reason}", file=sys.stderr)
        return 1
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Ctrl-C and a plain kill both unwind, so that nothing is left.
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, _interrupt)
    begun = time.monotonic()
    date = datetime.now(UTC).date().isoformat()
    commit = _commit()

    def report(outcomes: list[Outcome]) -> str:
        about = Circumstances(
            seed=options.seed,
            faults=options.faults,
            runs_at_once=options.runs_at_once,
            commit=commit,
            date=date,
            machine=f"{os.cpu_count()} cores, {platform.machine()}",
            took_s=time.monotonic() - begun,
            command="tools/chaos " + " ".join(arguments),
        )
        text = render(outcomes, about)
        if options.report is not None:
            options.report.write_text(text)
        return text

    def make_up(outcomes: list[Outcome]) -> list[RunPlan]:
        done = [outcome.plan for outcome in outcomes]
        missing = options.faults - len(injected(outcomes))
        if missing <= 0 or len(done) >= MOST_RUNS * len(plans) or not options.make_up:
            return []
        return make_up_for(missing, options.seed, done, kinds=kinds, policies=policies)

    try:
        outcomes = execute(
            plans,
            Options(
                runs_at_once=options.runs_at_once,
                nodes=options.nodes or NODES_A_RUN * options.runs_at_once + 2,
                steps=options.steps,
                mlflow_server=options.mlflow == "server",
                patience_s=options.patience,
                keep=options.keep,
                references=options.references,
            ),
            report,
            make_up,
        )
    except KeyboardInterrupt:
        print("chaos: interrupted; everything it had started has been ended", file=sys.stderr)
        return 130
    text = report(outcomes)
    if options.report is None:
        print(text)
    bad = violations(outcomes)
    print(f"chaos: {len(injected(outcomes))} faults, {bad} runs with violations", file=sys.stderr)
    return 1 if bad else 0


def _interrupt(*_: object) -> None:
    """Once: the clean end is not to be interrupted."""
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, signal.SIG_IGN)
    raise KeyboardInterrupt


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"
