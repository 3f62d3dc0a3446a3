"""What composing a sweep costs a task, against composing each task alone with Hydra.

    python tools/bench/compose.py [--tasks 500] [--options 4]

Prints milliseconds a task and their ratio, both measured in this run, alternating.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from hydra import compose, initialize_config_dir

from air_hpc.config.compose import Composer
from air_hpc.resources import conf_dir

MODELS = ["tiny", "llama_160m", "llama_1b", "llama_8b", "llama_70b", "llama_405b"]


def ours(tasks: int, options: int) -> float:
    """Seconds a task, the composition of the options among them."""
    seeds = max(1, tasks // options)
    start = time.perf_counter()
    made = Composer().compose_sweep(
        [f"train.seed=range(0,{seeds})", f"model={','.join(MODELS[:options])}", "optimizer.lr=3e-4"]
    )
    return (time.perf_counter() - start) / len(made)


def hydras(tasks: int, options: int) -> float:
    """Seconds a task when Hydra composes each, without types or checks."""
    start = time.perf_counter()
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        for index in range(tasks):
            model = MODELS[index % options]
            compose(
                "config", overrides=[f"train.seed={index}", f"model={model}", "optimizer.lr=3e-4"]
            )
    return (time.perf_counter() - start) / tasks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--options", type=int, default=4, choices=range(1, len(MODELS) + 1))
    arguments = parser.parse_args()
    few = max(4, arguments.tasks // 25)
    rounds = [
        (ours(arguments.tasks, arguments.options), hydras(few, arguments.options)) for _ in range(3)
    ]
    mine = statistics.median(pair[0] for pair in rounds) * 1e3
    theirs = statistics.median(pair[1] for pair in rounds) * 1e3
    print(f"a sweep of {arguments.tasks} tasks over {arguments.options} models")
    print(f"  composed once, values on top   {mine:8.2f} ms a task (goal: at most 5)")
    print(f"  Hydra composing each           {theirs:8.2f} ms a task")
    print(f"  ratio                          {theirs / mine:8.1f}")
    return 0 if mine <= 5 else 1


if __name__ == "__main__":
    sys.exit(main())
