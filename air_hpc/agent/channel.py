"""The agents' own control channel: signed JSON messages over ZeroMQ, a deadline on everything.

The coordinator binds one of a few ports that follow from the run and this start of its job, so
nobody has to be told it and nothing waits for a file. An agent says hello to all of them until one
answers with the right signature. Every message carries an HMAC-SHA256 under the run's own key
(`submit/channel.key`, readable by its owner only) over this start's id, the node, the direction and
the body: another user's process on the port, or an agent of an earlier start, is not heard, nor can
it send a hello back to its sender as an answer, or on in the name of another node. Nothing is
pickled.

ZeroMQ reconnects by itself; silence is found by the heartbeats of `node` and `coordinator`.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import resource
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import zmq

from air_hpc.errors import EnvironmentFailure
from air_hpc.probes.ports import spread

Message = dict[str, Any]

PORT_RANGE = (20_000, 32_000)
"""Below the kernel's ephemeral range (32768 on by default). Fixed, not read from the kernel: every
node must come to the same ports, and binding shows which of them is free."""
CANDIDATE_PORTS = 6
MAX_FILES = 65_536


class Signer:
    """Signs and checks messages of one start of a run.

    `way` says between whom: `to_coordinator(node)` or `to_node(node)`.
    """

    def __init__(self, key: bytes, start_id: str) -> None:
        self._key = key
        self._context = start_id.encode() + b"\0"

    @classmethod
    def from_file(cls, path: Path, start_id: str) -> Signer:
        """The signer with the run's key."""
        try:
            return cls(path.read_bytes(), start_id)
        except OSError as error:
            raise EnvironmentFailure(
                f"cannot read the run's channel key: {error.strerror}",
                tried=str(path),
                next_step="check that the run directory is shared with this node",
            ) from None

    def _mac(self, way: bytes, body: bytes) -> bytes:
        return hmac.digest(self._key, self._context + way + b"\0" + body, hashlib.sha256)

    def seal(self, message: Message, way: bytes) -> list[bytes]:
        """The frames of a message."""
        body = json.dumps(message, separators=(",", ":"), default=str).encode()
        return [self._mac(way, body), body]

    def open(self, frames: Sequence[bytes], way: bytes) -> Message | None:
        """The message in signed frames, or None when they are not of this start of this run."""
        if len(frames) != 2 or not hmac.compare_digest(frames[0], self._mac(way, frames[1])):
            return None
        message = json.loads(frames[1])
        return message if isinstance(message, dict) and "type" in message else None


def to_coordinator(node: bytes) -> bytes:
    """The way of what a node's agent says."""
    return b">" + node


def to_node(node: bytes) -> bytes:
    """The way of what the coordinator says to a node."""
    return b"<" + node


def candidate_ports(run_id: str, start_id: str) -> list[int]:
    """The ports a coordinator may bind, the same on every node."""
    return list(islice(spread(f"{run_id}/{start_id}", range(*PORT_RANGE)), CANDIDATE_PORTS))


def allow_connections() -> None:
    """Raise the soft limit of open files where it may be: each node of the job is a connection, and
    the usual 1,024 would leave the last ones of a thousand nodes outside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class CoordinatorSocket:
    """The coordinator's end: talks to agents by their node names."""

    INPROC = "inproc://coordinator"

    def __init__(self, context: zmq.Context[Any], signer: Signer, ports: Sequence[int]) -> None:
        """Bind the first free port; raises EnvironmentFailure when all are taken."""
        self._signer = signer
        allow_connections()
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self.socket.bind(self.INPROC)
            self.port = self._bind(ports)
        except BaseException:
            # A socket left open would hold the context's end for ever.
            self.socket.close()
            raise

    def _bind(self, ports: Sequence[int]) -> int:
        for port in ports:
            try:
                self.socket.bind(f"tcp://*:{port}")
            except zmq.ZMQError:
                continue
            return port
        raise EnvironmentFailure(
            "the coordinator found none of its ports free",
            tried=", ".join(map(str, ports)),
            next_step="start the job again: another start takes other ports",
        )

    def send(self, node: str, message: Message) -> None:
        """Send to one agent; dropped when it is not connected (its heartbeat tells)."""
        name = node.encode()
        self.socket.send_multipart([name, *self._signer.seal(message, to_node(name))])

    def receive(self) -> Iterator[tuple[str, Message]]:
        """All messages that have arrived, with their senders; what is not signed is dropped."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._signer.open(frames[1:], to_coordinator(frames[0]))
            if message is not None:
                yield frames[0].decode(errors="replace"), message

    def close(self) -> None:
        """Send what is queued (at most a second) and close."""
        self.socket.close()


class AgentSocket:
    """An agent's end: several candidate connections until one answers, then that one."""

    def __init__(
        self, context: zmq.Context[Any], signer: Signer, node: str, endpoints: Sequence[str]
    ) -> None:
        self._signer = signer
        self._name = node.encode()
        self.sockets: list[zmq.Socket[bytes]] = []
        for endpoint in endpoints:
            candidate = context.socket(zmq.DEALER)
            candidate.setsockopt(zmq.IDENTITY, self._name)
            candidate.setsockopt(zmq.LINGER, 1000)
            candidate.setsockopt(zmq.RECONNECT_IVL, 200)
            candidate.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
            candidate.connect(endpoint)
            self.sockets.append(candidate)

    @property
    def settled(self) -> bool:
        """Whether the coordinator has answered."""
        return len(self.sockets) == 1

    def send(self, message: Message) -> None:
        """Send to the coordinator (before it answered: to every candidate)."""
        frames = self._signer.seal(message, to_coordinator(self._name))
        for candidate in self.sockets:
            try:
                candidate.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                continue

    def receive(self) -> Iterator[Message]:
        """All messages that have arrived; the first valid one settles which connection is right."""
        for candidate in list(self.sockets):
            for message in self._receive_from(candidate):
                if not self.settled:
                    self._settle(candidate)
                yield message
            if self.settled:
                return

    def _receive_from(self, candidate: zmq.Socket[bytes]) -> Iterator[Message]:
        while True:
            try:
                frames = candidate.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._signer.open(frames, to_node(self._name))
            if message is not None:
                yield message

    def _settle(self, chosen: zmq.Socket[bytes]) -> None:
        for candidate in self.sockets:
            if candidate is not chosen:
                candidate.close(linger=0)
        self.sockets = [chosen]

    def close(self) -> None:
        """Send what is queued (at most a second) and close."""
        for candidate in self.sockets:
            candidate.close()
        self.sockets = []
