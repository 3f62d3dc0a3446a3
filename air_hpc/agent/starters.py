"""How a worker process comes to be: exec of a new interpreter, or fork from a template.

Both give a process that dies with its agent (PDEATHSIG), leads a process group of its own (so that
it can be killed with its children), ignores the signals that Slurm sends to every process of the
step (the agent alone answers them), and writes stdout and stderr to one pipe.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from air_hpc.session.process import kill_group, spawn
from air_hpc.session.template import FORK_CHUNK_BYTES


@dataclass(frozen=True)
class WorkerStart:
    """Everything a starter needs to know. `inherited_fds` keep their numbers in the worker."""

    argv: Sequence[str]
    environ: Mapping[str, str]
    inherited_fds: tuple[int, ...]
    output_fd: int
    affinity: frozenset[int] | None = None


class Started(Protocol):
    """A started worker. `fd` is ready once it has ended; negative where the starter's own tell."""

    pid: int
    fd: int

    def poll(self) -> int | None:
        """The exit status (negative: killed by that signal), or None while it runs."""
        ...

    def kill(self) -> None:
        """SIGKILL to the worker and its children."""
        ...

    def close(self) -> None:
        """Release `fd`."""
        ...


class Starter(Protocol):
    """A way to start workers."""

    @property
    def ready(self) -> bool:
        """Whether a start will not have to wait."""
        ...

    def renew(self) -> None:
        """Replace what a start needs and has ended; called when none of its workers is left."""
        ...

    def start(self, start: WorkerStart) -> Started:
        """Start one; raises OSError."""
        ...

    def fds(self) -> list[int]:
        """What is ready when there is news of a worker: a loop that waits on them need not tick."""
        ...

    def close(self) -> None:
        """Release what the starter holds. Workers end with the agent anyway."""
        ...


class _Executed:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self.fd = -1
        with contextlib.suppress(OSError):  # Linux before 5.3
            self.fd = os.pidfd_open(process.pid)

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        kill_group(self.pid)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class ExecStarter:
    """Starts each worker as a new process of its own."""

    ready = True

    def renew(self) -> None:
        """Nothing to replace."""

    def start(self, start: WorkerStart) -> Started:
        """Start one; raises OSError when the command cannot be run."""
        return _Executed(spawn_helper(start))

    def fds(self) -> list[int]:
        """None: each worker has its own."""
        return []

    def close(self) -> None:
        """Nothing to release."""


def spawn_helper(start: WorkerStart, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """A child as `session.process.spawn` makes it."""
    return spawn(
        start.argv,
        start.environ,
        start.output_fd,
        stdin=stdin,
        inherited_fds=start.inherited_fds,
        affinity=start.affinity,
    )


class ForkStarter:
    """Forks workers from a template process that imported the engine's modules once.

    The template (`air_hpc.session.template`) is this agent's child and the workers' parent: it dies
    with the agent, and they with it. One that dies itself is replaced, a few times. It refuses to
    fork when it is not single-threaded; that is an OSError here, as a failed exec would be.
    """

    REPLY_TIMEOUT_S = 10.0
    TEMPLATES = 4
    """So many templates in the life of a starter; what kills each of them will kill the next."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start the template for workers of `argv` (`python -m module`); it imports meanwhile."""
        self._python, _, self._module = argv
        self._environ = dict(environ)
        self._templates = 0
        self._begin_template()

    def _begin_template(self) -> None:
        self._templates += 1
        self._ready = False
        self._silent = False
        self._exits: dict[int, int] = {}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        words = [self._python, "-m", "air_hpc.session.template", str(theirs.fileno()), self._module]
        single = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        try:
            self._template = spawn_helper(
                WorkerStart(words, {**self._environ, **single}, (theirs.fileno(),), 2)
            )
        finally:
            theirs.close()

    def renew(self) -> None:
        """Replace a template that has ended, between two generations."""
        if self._template.poll() is not None and self._templates < self.TEMPLATES:
            self._channel.close()
            self._begin_template()

    @property
    def ready(self) -> bool:
        """Whether the template has imported what it preloads, or has ended."""
        self._listen()
        return self._ready or self._template.poll() is not None

    def start(self, start: WorkerStart) -> Started:
        """Fork one; raises OSError when the template refuses or is gone."""
        request = {
            "environ": dict(start.environ),
            "affinity": sorted(start.affinity) if start.affinity else None,
        }
        fds = [*start.inherited_fds, start.output_fd]
        payload = json.dumps(request).encode()
        self._channel.settimeout(self.REPLY_TIMEOUT_S)
        try:
            socket.send_fds(self._channel, [len(payload).to_bytes(4, "big")], fds)
            for offset in range(0, len(payload), FORK_CHUNK_BYTES):
                self._channel.send(payload[offset : offset + FORK_CHUNK_BYTES])
            while (reply := self._receive()) is not None:
                if "error" in reply:
                    raise OSError(str(reply["error"]))
                if "pid" in reply:
                    return _Forked(self, int(reply["pid"]))
        except TimeoutError:
            kill_group(self._template.pid)  # stopped, or stuck: the next start takes a new one
            text = f"the template process did not answer in {self.REPLY_TIMEOUT_S:g} s"
            raise OSError(errno.EAGAIN, text) from None
        except ConnectionError:
            pass
        raise self._template_ended()

    def _template_ended(self) -> OSError:
        """What a start says of a template that is gone. One that was killed may do better the next
        time; one that ended by itself before it got ready cannot import, nor could another."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._template.wait(self.REPLY_TIMEOUT_S)
        killed = (self._template.poll() or 0) < 0
        code = errno.EAGAIN if self._ready or killed else errno.ENOEXEC
        return OSError(code, "the template process ended")

    def _receive(self) -> dict[str, int | str] | None:
        """The next word of the template; exits are noted on the way."""
        data = self._channel.recv(FORK_CHUNK_BYTES)
        if not data:
            self._silent = True
            return None
        reply: dict[str, int | str] = json.loads(data)
        if "ready" in reply:
            self._ready = True
        if "exited" in reply:
            self._exits[int(reply["exited"])] = int(reply["status"])
        return reply

    def exit_of(self, pid: int) -> int | None:
        """The exit status of a worker, or None while it runs. A dead template killed them all."""
        self._listen()
        if pid not in self._exits and self._template.poll() is not None:
            self._exits[pid] = -signal.SIGKILL
        return self._exits.get(pid)

    def _listen(self) -> None:
        """Take in what the template has said."""
        self._channel.setblocking(False)
        with contextlib.suppress(OSError):
            while self._receive() is not None:
                pass

    def fds(self) -> list[int]:
        """The template's channel, which tells of ended workers, until the template is gone."""
        return [] if self._silent or self._channel.fileno() < 0 else [self._channel.fileno()]

    def close(self) -> None:
        """End the template, and with it what is left of the workers."""
        self._channel.close()
        kill_group(self._template.pid)
        self._template.wait()


class _Forked:
    fd = -1

    def __init__(self, starter: ForkStarter, pid: int) -> None:
        self._starter = starter
        self.pid = pid

    def poll(self) -> int | None:
        return self._starter.exit_of(self.pid)

    def kill(self) -> None:
        kill_group(self.pid)

    def close(self) -> None:
        pass


def make_starter(name: str, argv: Sequence[str], environ: Mapping[str, str]) -> Starter:
    """The starter that `launch.starter` names."""
    return ForkStarter(argv, environ) if name == "fork" else ExecStarter()
