"""Ranks of a gloo world that reduce in every step: in pairs, then all together.

`BEHAVIOUR` in the environment, as JSON: `store` (the rendezvous file) and `sleeps`, as
[rank, step]: who falls asleep in Python before its collectives, and when.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from air_hpc.session.session import Session


def main() -> None:
    behaviour = json.loads(os.environ["BEHAVIOUR"])
    session = Session.attach()
    rank, size = session.rank, session.world_size
    torch.set_num_threads(1)
    with session.phase("init"):
        store = dist.FileStore(behaviour["store"], size)
        dist.init_process_group(
            "gloo", rank=rank, world_size=size, store=store, timeout=timedelta(seconds=120)
        )
        pairs = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("rows", "columns"))
    value = torch.ones(1)
    step = 0
    while session.begin_step(step := step + 1):
        if [rank, step] == behaviour["sleeps"]:
            oversleep()
        dist.all_reduce(value, group=pairs.get_group("columns"))
        dist.all_reduce(value)
        session.end_step(step)


def oversleep() -> None:
    time.sleep(10_000)


if __name__ == "__main__":
    main()
