"""Whether a node's machine lives: a port that its kernel answers, and many connects at once.

Node side: `Listener` listens on a port of its own, told in the hello. Nobody serves it. The kernel
completes a connect by itself, so the port answers also while the agent is starved, stopped, or
waits for a file system; and it refuses as soon as the agent's process is gone. The agent's loop
takes the finished connects from the queue now and then (`drain`); while it cannot, at most
`detector.PROBES_IN_PATIENCE` come before its node is given up, fewer than the queue holds.

Coordinator side: `Prober` begins connects that do not block and collects what they came to. Its
`fileno` is ready when there is an answer, so that the loop need not wait for its next tick.

What may go wrong. The port of a dead agent may be taken by somebody else's listener: the answer is
CONNECTED, which buys the node's patience and no more (`recovery.detector`); a banner would be no
help, since the starved agent that the port is there for could not send it. A connect may meet
itself where the port lies in the kernel's range for outgoing connections: it is found and counts as
REFUSED, and the port is taken from outside that range. A full queue would look like a dead machine:
hence the bound above. A firewall between the nodes: the detector trusts only ports that answered.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

from air_hpc.errors import EnvironmentFailure
from air_hpc.probes.ports import spread, usable_ports
from air_hpc.recovery.detector import Answer

BACKLOG = 1024
"""Cut by the kernel to net.core.somaxconn: 4096, or 128 before Linux 5.4."""
_PORTS_TRIED = 1000
_NO_LINGER = struct.pack("ii", 1, 0)
"""Closing resets the connection: nothing stays in TIME_WAIT for a probe."""
_NO_MACHINE = frozenset(
    {errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ETIMEDOUT, errno.ENETDOWN}
)


class Listener:
    """A port of this agent that answers for its machine. Not inherited by workers."""

    def __init__(self, seed: str) -> None:
        """Listen on a free port, found on a walk that `seed` begins.

        Raises EnvironmentFailure when none of many is free.
        """
        self._socket = _listen(seed)
        self.port = int(self._socket.getsockname()[1])

    def fileno(self) -> int:
        """Ready when there is something to drain."""
        return self._socket.fileno()

    def drain(self) -> int:
        """Take the finished connects from the queue and close them; how many there were."""
        count = 0
        # As many as a queue holds: a stranger who connects without end must not keep the loop.
        for _ in range(BACKLOG):
            try:
                taken, _ = self._socket.accept()
            except OSError:
                break
            taken.close()
            count += 1
        return count

    def close(self) -> None:
        """Refuse from now on."""
        self._socket.close()


def _listen(seed: str) -> socket.socket:
    ports = usable_ports()
    for _, port in zip(range(_PORTS_TRIED), spread(f"{seed}/liveness", ports), strict=False):
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            # Not SO_REUSEADDR: this port is to be nobody else's.
            made.bind(("", port))
            made.listen(BACKLOG)
        except OSError:
            made.close()
            continue
        made.setblocking(False)
        return made
    raise EnvironmentFailure(
        f"none of {_PORTS_TRIED} TCP ports from {ports[0]} to {ports[-1]} is free on this node",
        tried="listening on all addresses",
        next_step="look at what listens on the node (ss -tln)",
    )


@dataclass
class _Connect:
    node: str
    socket: socket.socket
    deadline: float


class Prober:
    """Connects to many nodes' ports at once; nothing blocks. Not for use from several threads."""

    def __init__(
        self, timeout_s: float = 0.5, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._epoll = select.epoll()
        self._open: dict[int, _Connect] = {}
        self._answers: list[tuple[str, Answer]] = []

    def fileno(self) -> int:
        """Ready when a connect has ended; time-outs are found by `poll` alone."""
        return self._epoll.fileno()

    def begin(self, node: str, address: str, port: int) -> None:
        """Begin a connect to a node's port; `poll` has the answer."""
        try:
            family = socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET
            made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except (OSError, ValueError):
            self._answers.append((node, Answer.UNKNOWN))
            return
        with contextlib.suppress(OSError):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        code = made.connect_ex((address, port))
        if code == errno.EINPROGRESS:
            connect = _Connect(node, made, self._clock() + self._timeout_s)
            self._open[made.fileno()] = connect
            self._epoll.register(made.fileno(), select.EPOLLOUT)
        else:
            self._answers.append((node, _answer(made, code)))
            made.close()

    def poll(self) -> list[tuple[str, Answer]]:
        """The answers that came since the last call.

        What has ended is looked at before the deadlines: an observer that stood still meanwhile
        must not take an answer that waits for it for silence.
        """
        for fd, _ in self._epoll.poll(0, max(1, len(self._open))):
            connect = self._open[fd]
            code = connect.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self._end(fd, _answer(connect.socket, code))
        now = self._clock()
        for fd in [fd for fd, connect in self._open.items() if now >= connect.deadline]:
            self._end(fd, Answer.SILENT)
        answers, self._answers = self._answers, []
        return answers

    def _end(self, fd: int, answer: Answer) -> None:
        connect = self._open.pop(fd)
        self._answers.append((connect.node, answer))
        self._epoll.unregister(fd)
        connect.socket.close()

    def close(self) -> None:
        """Give up what is under way."""
        for connect in self._open.values():
            connect.socket.close()
        self._open.clear()
        self._epoll.close()


def _answer(made: socket.socket, code: int) -> Answer:
    """What a connect that ended with `code` says of the other side."""
    if code == 0:
        try:
            met_itself = made.getsockname() == made.getpeername()
        except OSError:  # reset as soon as it was made: somebody is there
            return Answer.CONNECTED
        return Answer.REFUSED if met_itself else Answer.CONNECTED
    if code == errno.ECONNREFUSED:
        return Answer.REFUSED
    return Answer.SILENT if code in _NO_MACHINE else Answer.UNKNOWN
