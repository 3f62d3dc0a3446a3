"""A worker without torch: a real client of the session that counts instead of training.

`BEHAVIOUR` in its environment says what it does, as JSON: `steps` (None: without end), `at_end`
(one of the keys of `ENDS`), `prints`, and `hangs`: the step that the last rank hangs in, `asleep`
or, with `holds_lock`, in C with the interpreter's lock held.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from typing import Any

from air_hpc.session.messages import Message
from air_hpc.session.session import Session

FOREVER = 10**9


def main() -> None:
    behaviour = json.loads(os.environ.get("BEHAVIOUR", "{}"))
    session = Session.attach()
    session.note(
        Message.MEASURED,
        pid=os.getpid(),
        parent=os.getppid(),
        cpus=sorted(os.sched_getaffinity(0)),
        **{
            name: os.environ.get(name)
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
        },
    )
    for line in behaviour.get("prints", ()):
        print(line, flush=True)
    at_end = behaviour.get("at_end", "finish")
    if at_end == "leave_a_child":
        child = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
        session.note(Message.PHASE, child=child.pid)
    try:
        last = train(session, behaviour.get("steps") or FOREVER, behaviour)
        if at_end == "raise":
            raise KeyError("the model has no such layer")
    except Exception as error:
        session.failed(error, traceback=traceback.format_exc(), failure_class="user_error")
        raise
    if at_end == "exit_text":
        sys.exit("no such file")
    if at_end == "exit_3":
        sys.exit(3)
    if at_end == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if last is None:
        session.finished(behaviour["steps"])
    else:
        session.stopped(last, saved=True)


def train(session: Session, steps: int, behaviour: dict[str, Any]) -> int | None:
    """The step it stopped at, or None when it did them all."""
    hangs = behaviour.get("hangs") if session.rank == session.world_size - 1 else None
    for step in range(1, steps + 1):
        if not session.begin_step(step):
            return step - 1
        if step == hangs:
            hold_the_lock() if behaviour.get("holds_lock") else fall_asleep()
        time.sleep(0.001)
        session.end_step(step)
    return None


def fall_asleep() -> None:
    time.sleep(10_000)


def hold_the_lock() -> None:
    with_lock = ctypes.PyDLL(None)
    while True:  # a signal ends a sleep
        with_lock.sleep(10_000)


if __name__ == "__main__":
    main()
