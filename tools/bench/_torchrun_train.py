"""The other side of `recovery.py`: the same model, data and batch size under a plain torchrun.

    torchrun ... _torchrun_train.py RUN_YAML DATA_DIR OUT_DIR

What a careful user writes by hand: DDP over gloo, a checkpoint of rank 0 written aside and renamed
each `checkpoint.interval_steps`, resumed from at each start. Rank 0 appends a line for each step to
OUT_DIR/steps.jsonl: when it ended, under which restart, in which world.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from air_hpc.data.batches import Batches, BatchShape
from air_hpc.data.corpus import ensure_corpus
from air_hpc.data.shards import TokenStream
from air_hpc.models.decoder import Decoder, next_token_loss
from air_hpc.models.init import initialize
from air_hpc.plan.frozen import read_run_yaml
from air_hpc.train.optimizer import build_optimizer


def main() -> None:
    frozen = read_run_yaml(Path(sys.argv[1]).read_text())
    spec, cache, out = frozen.spec, Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    micro = frozen.plan.micro_batch_size
    shape = BatchShape(
        sequence_length=spec.data.sequence_length,
        global_batch_size=spec.train.global_batch_size,
        accumulation_steps=spec.train.global_batch_size // (micro * world),
        rank=rank,
        ranks=world,
    )
    if rank == 0:
        ensure_corpus(cache)
    dist.barrier()
    folder, index = ensure_corpus(cache)
    batches = Batches(TokenStream(folder, index), shape, spec.train.seed)
    plain = Decoder(spec.model, spec.data.sequence_length)
    initialize(plain, spec.model, spec.train.seed, torch.device("cpu"))
    model = DistributedDataParallel(plain)
    optimizer = build_optimizer(list(plain.parameters()), spec.optimizer, torch.device("cpu"))
    newest, step = out / "newest.pt", 0
    if newest.exists():
        state = torch.load(newest)
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with (out / "steps.jsonl").open("a", buffering=1) as steps:
        while step < spec.train.steps:
            tokens = torch.from_numpy(batches.step_batch(step))
            for number, part in enumerate(tokens):
                model.require_backward_grad_sync = number == len(tokens) - 1
                loss = next_token_loss(model(part[:, :-1]), part[:, 1:]) / len(tokens)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), spec.optimizer.grad_clip or 1e9)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if rank == 0:
                done = {"step": step, "time": time.time(), "restart": restart, "world": world}
                print(json.dumps({**done, "pid": os.getpid()}), file=steps)
                if step % spec.checkpoint.interval_steps == 0:
                    aside = newest.with_suffix(".new")
                    state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**state, "step": step}, aside)
                    aside.replace(newest)


if __name__ == "__main__":
    main()
