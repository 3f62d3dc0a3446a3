"""A template process: it imports an engine's modules once, and forks workers on request.

`python -m air_hpc.session.template FD MODULE`: the engine's module names what to import beforehand
in `PRELOAD` (module names, imported and nothing more). A process that forks must have one thread,
and must not have run an operation, opened a group or loaded user code: its children would hang
for ever. So the template only imports, and counts its threads before each fork. What it imported
is taken out of the garbage collector's sight: a worker would look through all of it again and
again, and copy its memory by that.

Requests and answers are packets of JSON over the socket FD; a worker's file descriptors (page,
socket, output) come along as SCM_RIGHTS.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from typing import Any

from air_hpc.session.process import become_worker

FORK_CHUNK_BYTES = 32 * 1024


def thread_count() -> int:
    """How many threads this process has."""
    return len(os.listdir("/proc/self/task"))


def serve(channel: socket.socket, module: str) -> None:
    """Say that all is imported, and fork workers until the agent closes the channel."""
    channel.send(json.dumps({"ready": True}).encode())
    children: set[int] = set()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = select.poll()  # an agent of a thousand nodes has descriptors that select cannot take
    waiting.register(channel, select.POLLIN)
    waiting.register(wake_read, select.POLLIN)
    while True:
        ready = {fd for fd, _ in waiting.poll()}
        if wake_read in ready:
            os.read(wake_read, 4096)
            _report_exits(channel, children)
        if channel.fileno() in ready:
            request = _receive_request(channel)
            if request is None:
                return
            pid = _fork(channel, module, *request)
            if pid:
                children.add(pid)


def _report_exits(channel: socket.socket, children: set[int]) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            children.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            channel.send(json.dumps({"exited": pid, "status": code}).encode())


def _receive_request(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    header, fds, _, _ = socket.recv_fds(channel, 4, 8)
    if not header:
        return None
    left = int.from_bytes(header, "big")
    payload = b""
    while len(payload) < left:
        chunk = channel.recv(FORK_CHUNK_BYTES)
        if not chunk:  # the agent died in the middle of its request
            return None
        payload += chunk
    return json.loads(payload), list(fds)


def _fork(channel: socket.socket, module: str, request: dict[str, Any], fds: list[int]) -> int:
    """The pid of the new worker, or 0 when this process must not fork (the agent is told why)."""
    threads = thread_count()
    if threads != 1:
        text = f"the template has {threads} threads and cannot fork; use launch.starter=exec"
        channel.send(json.dumps({"error": text}).encode())
        pid = 0
    else:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _run_worker(channel, module, request, fds, parent)
        channel.send(json.dumps({"pid": pid}).encode())
    for fd in fds:
        os.close(fd)
    return pid


def _run_worker(
    channel: socket.socket, module: str, request: dict[str, Any], fds: list[int], parent: int
) -> None:
    """The child: becomes a worker of its own and never returns."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        channel.close()
        os.setsid()
        become_worker(parent, request["affinity"])
        page, session, output = fds
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ.clear()
        os.environ.update(request["environ"])
        os.environ["AIR_HPC_PAGE_FD"] = str(page)
        os.environ["AIR_HPC_SOCKET_FD"] = str(session)
        sys.argv = [module]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):  # as the interpreter does
            print(leaving.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Import what the engine preloads, then serve."""
    fd, module = int(sys.argv[1]), sys.argv[2]
    for name in getattr(importlib.import_module(module), "PRELOAD", ()):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=fd), module)


if __name__ == "__main__":
    main()
