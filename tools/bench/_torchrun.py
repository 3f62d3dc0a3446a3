"""Tuned torchrun as a job of the test cluster: the baseline of `recovery.py`.

Tuned as far as its options go: the members' heartbeats and the last call are short, the workers'
store is a fresh one each time, and the first node hosts the rendezvous. Slurm keeps the job alive
(`--no-kill`) when a node or a task dies.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _chaos.processes import node_of
from _devcluster.processes import Process, process_table

from tests.slurm_cluster import DevCluster

ROOT = Path(__file__).resolve().parents[2]
CONF = "keep_alive_interval=2,keep_alive_max_attempt=2,last_call_timeout=3,join_timeout=3600"
SCRIPT = """#!/bin/bash
srun --no-kill --kill-on-bad-exit=0 --ntasks-per-node=1 bash -c '
exec "{python}" -m torch.distributed.run --nnodes={nnodes} --nproc-per-node={workers} \\
  --max-restarts=1000 --monitor-interval={monitor_s} --local-addr=127.0.0.1 \\
  --rdzv-id=$SLURM_JOB_ID --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} \\
  --rdzv-conf="is_host=$(( SLURM_NODEID == 0 )),{conf}" \\
  "{trainer}" "{run_yaml}" "{data}" "{out}"'
"""


@dataclass
class Torchrun:
    """One torchrun job; its steps are read from the file that rank 0 writes."""

    cluster: DevCluster
    out: Path
    job: str
    _read: int = 0

    @classmethod
    def submit(
        cls,
        cluster: DevCluster,
        run_yaml: Path,
        data: Path,
        out: Path,
        *,
        nodes: int,
        nnodes: str,
        workers: int,
        port: int,
        monitor_s: float = 0.1,
    ) -> Torchrun:
        """Submit a job of `nodes` nodes; `nnodes` is torchrun's own word for how many it needs."""
        out.mkdir(parents=True)
        script = out / "job.sh"
        script.write_text(
            SCRIPT.format(
                python=sys.executable, nnodes=nnodes, workers=workers, port=port, conf=CONF,
                monitor_s=monitor_s, trainer=Path(__file__).with_name("_torchrun_train.py"),
                run_yaml=run_yaml, data=data, out=out,
            )
        )  # fmt: skip
        env = {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        words = ["sbatch", "--parsable", f"-N{nodes}", "--exclusive", "--no-kill", "--no-requeue"]
        done = cluster.run([*words, f"--output={out}/log", str(script)], env={**os.environ, **env})
        return cls(cluster, out, done.stdout.strip())

    def steps(self, newer: bool = False) -> list[dict[str, Any]]:
        """What rank 0 has written so far; with `newer` only since the last call without it."""
        try:
            with (self.out / "steps.jsonl").open("rb") as file:
                file.seek(self._read if newer else 0)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        if not newer:
            self._read = len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def workers(self) -> dict[str, list[Process]]:
        """The training processes by node."""
        found: dict[str, list[Process]] = {}
        for process in process_table().values():
            words = process.command()
            if words[-1:] == [str(self.out)] and "torch.distributed.run" not in words:
                found.setdefault(node_of(process), []).append(process)
        return found

    def first_node(self) -> str:
        """Where the rendezvous is hosted."""
        return self.cluster.job(self.job)["BatchHost"]
