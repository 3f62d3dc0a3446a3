#!/usr/bin/env python3
"""How long the light verbs take to start, over the time of `python -c "import hydra"`.

    python tools/bench/startup.py [--runs N] [--json]

Each command is run in turn, round by round, so that a busy moment of the machine falls on all of
them. Printed are medians of the process's wall time and of its CPU time, and their ratios to
Hydra's. The target for `--help` and `plan` is a ratio of at most 2.5.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    "import hydra": ["-c", "import hydra"],
    "--help": ["-m", "air_hpc", "--help"],
    "plan --help": ["-m", "air_hpc", "plan", "--help"],
    "plan": ["-m", "air_hpc", "plan"],
    "--cfg job": ["-m", "air_hpc", "--cfg", "job"],
    "status": ["-m", "air_hpc", "status"],
    "--complete": ["-m", "air_hpc", "--complete", "model=llama"],
    "--dry-run": ["-m", "air_hpc", "--dry-run"],
}
BASE = "import hydra"
TARGET = 2.5


def measure(words: list[str], folder: str) -> tuple[float, float]:
    """Wall and CPU seconds of one process."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wall_s = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)} failed:\n{done.stderr}")
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=7, help="rounds (default: 7)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for words in COMMANDS.values():
            measure(words, folder)  # byte code and the page cache
        for _ in range(options.runs):
            for name, words in COMMANDS.items():
                times[name].append(measure(words, folder))
    wall = {name: statistics.median(t[0] for t in found) for name, found in times.items()}
    cpu = {name: statistics.median(t[1] for t in found) for name, found in times.items()}
    rows = {
        name: {
            "wall_s": round(wall[name], 4),
            "cpu_s": round(cpu[name], 4),
            "wall_ratio": round(wall[name] / wall[BASE], 2),
            "cpu_ratio": round(cpu[name] / cpu[BASE], 2),
        }
        for name in COMMANDS
    }
    if options.json:
        print(json.dumps({"rounds": options.runs, "target_ratio": TARGET, "commands": rows}))
        return
    print(f"{'command':<14}{'wall s':>9}{'cpu s':>9}{'wall ratio':>12}{'cpu ratio':>11}")
    for name, row in rows.items():
        print(
            f"{name:<14}{row['wall_s']:>9.3f}{row['cpu_s']:>9.3f}"
            f"{row['wall_ratio']:>12.2f}{row['cpu_ratio']:>11.2f}"
        )
    print(f"median of {options.runs} rounds; target for --help and plan: at most {TARGET}")


if __name__ == "__main__":
    main()
