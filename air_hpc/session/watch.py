"""How a worker answers while its training thread cannot: a daemon thread, and a signal handler.

The thread blocks on the session's socket and answers the agent's `inspect` with the collectives in
flight (torch's flight recorder, where torch is loaded; this module never imports it) and the stacks
of all Python threads. It takes no part in a step: it holds no lock and the hot path knows nothing
of it.

What may go wrong: a thread that holds the interpreter's lock in C keeps the answer from coming. For
that case `DUMP_SIGNAL` makes the faulthandler write the stacks without the lock, to the page's file
(see `session.page`). A stopped process answers neither. Both are evidence in themselves.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import select
import signal
import socket
import struct
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from air_hpc.session.messages import INSPECT, Message, decode, encode

DUMP_SIGNAL = signal.SIGRTMIN + 9
"""Slurm, glibc and Python use no real-time signal of this number."""

THREAD_NAME = "air_hpc-watch"
MOST_GROUPS = 12
"""Process groups in an answer, the latest used first."""
NEWEST_OPERATIONS = 3
"""Operations of each group in an answer."""
_MOST_STACK_BYTES = 24 * 1024
_MOST_FRAMES = 100
_REQUEST_BYTES = 4096
_NAMED_MEMBERS = 8
_PR_SET_PTRACER = 0x59616D61


def start_watch(channel: socket.socket, rank: int, dump_fd: int) -> threading.Thread:
    """Answer the agent at the other end of `channel` until it closes; call it once, in the worker.

    Never before a fork: a template that has a second thread must not fork any more.
    """
    with suppress(OSError, ValueError, RuntimeError):
        faulthandler.register(DUMP_SIGNAL, file=dump_fd, all_threads=True, chain=False)
    _let_agent_attach(channel)
    thread = threading.Thread(target=_serve, args=(channel, rank), name=THREAD_NAME, daemon=True)
    thread.start()
    return thread


def _let_agent_attach(channel: socket.socket) -> None:
    """Let the agent and its children (py-spy) trace this process where Yama restricts it.

    Yama lets a process name one tracer, which its descendants are too (Linux, Yama.rst). The agent
    is who made the socket pair: SO_PEERCRED, unix(7). Without Yama the call fails, and is not
    needed.
    """
    with suppress(OSError, AttributeError):
        size = struct.calcsize("3i")
        credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        agent_pid: int = struct.unpack("3i", credentials)[0]
        if agent_pid > 0:
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(agent_pid), 0, 0, 0)


def _serve(channel: socket.socket, rank: int) -> None:
    # The socket has a time-out for those who send. Waiting has none: an idle run costs nothing.
    waiting = select.poll()
    waiting.register(channel, select.POLLIN)
    with suppress(OSError, ValueError):
        while True:
            waiting.poll()
            data = channel.recv(_REQUEST_BYTES)
            if not data:
                return
            request = decode(data)
            if request is not None and request["kind"] == INSPECT:
                channel.send(_answer(rank, request.get("question")))


def _answer(rank: int, question: Any) -> bytes:
    facts = {"groups": collectives(), "stacks": stacks()}
    return encode(Message.INSPECTED, {"rank": rank, "question": question, **facts})


def stacks() -> str:
    """The Python stacks of all threads but this one: the main one first, its innermost frame first.

    No source lines: to read them may hang on the very file system that the worker hangs on.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, this = threading.main_thread().ident, threading.get_ident()
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != this}
    parts = []
    for ident in sorted(frames, key=lambda ident: (ident != main, ident)):
        lines = "".join(_frame_lines(frames[ident]))
        parts.append(f"Thread {names.get(ident, ident)} (most recent call first):\n{lines}")
    return "\n".join(parts)[:_MOST_STACK_BYTES]


def _frame_lines(frame: FrameType | None) -> Iterator[str]:
    """In the faulthandler's notation."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        code = frame.f_code
        yield f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}\n'
        frame = frame.f_back


def collectives() -> list[dict[str, Any]]:
    """The process groups of this worker, the latest used first; empty where torch tells nothing."""
    try:
        return _from_flight_recorder()
    except Exception:  # torch's own and half imported: whatever it raises must not end the thread
        return []


def _from_flight_recorder() -> list[dict[str, Any]]:
    return reduce_trace(recorded(), memberships())


def recorded() -> list[dict[str, Any]]:
    """The flight recorder's operations, the oldest first; empty without torch or its recorder.

    It records where TORCH_FR_BUFFER_SIZE is set; whatever torch raises goes through.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    dump = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())
    return list(dump.get("entries", ()))


@dataclass(frozen=True)
class Membership:
    """A process group that this rank is in: what it is for, and the ranks of its members.

    `sequence` is how many collectives it has entered by the group's own count; None: not told.
    """

    description: str
    ranks: tuple[int, ...] = ()
    sequence: int | None = None


def memberships() -> dict[str, Membership]:
    """The process groups of this process, by the name that torch gives the group."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None:
        return {}
    world = module._world
    found = {}
    for group, name in list(world.pg_names.items()):
        sequence = None
        with suppress(Exception):  # not every backend counts
            sequence = int(group._get_sequence_number_for_group())
        ranks = tuple(sorted(world.pg_group_ranks.get(group, ())))
        found[str(name)] = Membership(str(getattr(group, "group_desc", "")), ranks, sequence)
    return found


def reduce_trace(
    entries: Iterable[Mapping[str, Any]], memberships: Mapping[str, Membership]
) -> list[dict[str, Any]]:
    """The flight recorder's operations, by group.

    Each: `group`, `sequence` of the newest collective entered (0: none yet), `in_flight` (the
    oldest operation that is not complete, or None) and the `newest` operations. An operation that
    is `retired` is complete, whatever its state says: gloo leaves it at "scheduled" (torch 2.13).
    A point-to-point operation is shown but not counted: its number belongs to a pair of ranks.

    The recorder forgets its oldest operations, and so may hold none of a group that is seldom
    used: the group's own count stands in. Without that either, the group is left out.
    """
    by_name: dict[str, list[Mapping[str, Any]]] = {name: [] for name in memberships}
    known = dict(memberships)
    for entry in entries:
        name, description = entry["process_group"]
        by_name.setdefault(name, []).append(entry)
        known.setdefault(name, Membership(description))
    found = []
    for name in sorted(by_name, key=lambda name: _last_used(by_name[name]), reverse=True):
        operations, group = by_name[name], known[name]
        counted = [int(e["collective_seq_id"]) for e in operations if not e.get("is_p2p")]
        sequence = max(counted, default=group.sequence)
        waiting = [e for e in operations if not e.get("retired") and e["state"] != "completed"]
        if sequence is None and not waiting:
            continue
        found.append(
            {
                "group": _label(group.description or name, group.ranks),
                "sequence": sequence,
                "in_flight": _operation(waiting[0]) if waiting else None,
                "newest": [_operation(entry) for entry in operations[-NEWEST_OPERATIONS:]],
            }
        )
    return found[:MOST_GROUPS]


def _last_used(operations: list[Mapping[str, Any]]) -> int:
    return max((int(entry.get("time_created_ns", 0)) for entry in operations), default=0)


def _label(description: str, ranks: tuple[int, ...]) -> str:
    """A name that is equal on all members and on no others.

    torch's own names and descriptions are shared by the parallel groups of a mesh axis.
    """
    if not ranks:
        return description
    if len(ranks) <= _NAMED_MEMBERS:
        return f"{description}({','.join(map(str, ranks))})"
    return f"{description}({len(ranks)} ranks, {zlib.crc32(str(ranks).encode()):08x})"


def _operation(entry: Mapping[str, Any]) -> str:
    """As `all_reduce #412`."""
    name = str(entry.get("profiling_name", "?")).rpartition(":")[2]
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    return f"{name} #{number}"
