"""How long a plan takes, and the search for a layout of the largest model on the largest machine.

    python tools/bench/plan.py [--rounds 5]

Prints the CPU seconds of `plan` as a process of its own, and of the search for Llama 3.1 405B on
2,048 nodes of 8 devices on one core: medians, with what each may take. CPU seconds, since the
machine is shared.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time

from air_hpc.config.compose import Composer
from air_hpc.plan.search import given_keys, search

LARGEST = [
    "cluster=slurm",
    "model=llama_405b",
    "parallelism=auto",
    "accelerator=h100_sxm",
    "launch.nodes=2048",
    "launch.devices_per_node=8",
    "data.sequence_length=8192",
    "train.precision=bf16",
    "train.compile=true",
    "train.global_batch_size=2048",
]
PLAN = ["plan", "cluster=slurm", "model=llama_70b", "parallelism=fsdp", "parallelism.tp=8"]
PLAN += ["parallelism.pp=4", "accelerator=h100_sxm", "launch.nodes=64", "train.precision=bf16"]
PLAN += ["launch.devices_per_node=8", "train.global_batch_size=1024"]


def plan_s() -> float:
    """CPU seconds of the verb, its start among them."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "air_hpc", *PLAN],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def search_s() -> tuple[float, int]:
    """CPU seconds of a search in this process, caches empty the first time, and layouts."""
    spec = Composer().compose(LARGEST)
    start = time.process_time()
    found = search(spec, given_keys(spec, LARGEST))
    return time.process_time() - start, found.tried


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    first, layouts = search_s()
    plan = statistics.median(plan_s() for _ in range(rounds))
    print(f"`plan`, Llama 70B on 64 nodes        {plan:6.2f} CPU s (at most 1)")
    print(
        f"search, Llama 405B on 2,048 nodes    {first:6.2f} CPU s (at most 5), {layouts:,} layouts"
    )
    return 0 if plan <= 1 and first <= 5 else 1


if __name__ == "__main__":
    sys.exit(main())
