#!/usr/bin/env python3
"""Stands in for `python -m air_hpc.agent RUN_DIR`: tests what the batch script does around it.

FAKE_AGENT is the behaviour: `finish`; `fail`; `hold` (until a signal, then exits 3 after a second);
a word for the first start, `requeue`, `resubmit`, `stop` or any other, left as the intent;
`hold-requeue`: the same after a signal; `killed`: claims a generation and is killed, `killed-early`
before it could claim one. In a word a bar begins the intent's next line. A start that finds the
file `done` exits at once.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

received: list[int] = []
for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGCONT):
    signal.signal(number, lambda number, frame: received.append(number))

run_dir = Path(sys.argv[-1])
rank = int(os.environ.get("SLURM_PROCID", "0"))
restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
job = os.environ.get("SLURM_JOB_ID", "none")
behaviour = os.environ.get("FAKE_AGENT", "finish")
start = f"{job}.{restarts}"
seen, left = run_dir / "attempts" / "seen", run_dir / "attempts" / "left"


def note(**facts: object) -> None:
    whole = {"rank": rank, "job": job, "restarts": restarts, "time": time.time(), **facts}
    with seen.open("a") as file:
        file.write(json.dumps(whole) + "\n")


def leave(word: str) -> None:
    if rank == 0:
        (run_dir / "attempts" / "intents" / start).write_text(word.replace("|", "\n") + "\n")
    left.write_text(start)


names = (
    "PYTHONPATH",
    "PYTHONSAFEPATH",
    "AIR_HPC_SCRIPT",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_JOB_NODELIST",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_CPUS_PER_TASK",
    "CUDA_VISIBLE_DEVICES",
    "LEAKED",
    "SITE",
)
environ = {name: os.environ.get(name) for name in names}
note(event="start", argv=sys.argv[1:], cwd=os.getcwd(), environ=environ)
first = not left.exists() or left.read_text() in ("", start)
if (run_dir / "done").exists() or behaviour == "finish" or not first:
    note(event="finish")
    sys.exit(0)
if behaviour == "fail":
    sys.exit(5)
if behaviour.startswith("hold"):
    while not {signal.SIGTERM, signal.SIGUSR2} & set(received):
        time.sleep(0.05)
    note(event="signal", received=received)
    time.sleep(1)
    if behaviour == "hold-requeue":
        leave("requeue")
    sys.exit(3)
if behaviour.startswith("killed"):
    if behaviour == "killed" and rank == 0:
        (run_dir / "tokens" / f"{1 + int(restarts)}.1").mkdir(parents=True)
    left.write_text(start)
    os.kill(os.getpid(), signal.SIGKILL)
leave(behaviour)
sys.exit(3)
