"""The workers of one node in one generation: started, listened to, stopped and reaped.

Each worker shares a page (steps, flag, target, lease) and a packet socket (what happens between
steps) with the agent, and writes its output to a pipe. This module keeps those together and knows
nothing of the coordinator.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from air_hpc.agent.environment import thread_affinity
from air_hpc.agent.logs import LineBuffer, NodeLog, node_log_path
from air_hpc.agent.oom import oom_kills
from air_hpc.agent.silence import SilenceWatch, stacks_path
from air_hpc.agent.starters import Started, Starter, WorkerStart
from air_hpc.config.spec import HangSpec
from air_hpc.recovery.hang import PhaseDurations, RankReport
from air_hpc.recovery.rules import SEARCHED_CHARS, RuleTable
from air_hpc.rundir.fence import Token
from air_hpc.rundir.layout import RunDir
from air_hpc.session.messages import MAX_BYTES, Message, decode, socket_pair
from air_hpc.session.page import NONE, PHASES, Page, Word
from air_hpc.session.session import WorkerEnv

FLAG_SETTLE_S = 0.01
"""After the flags are set and before the begun steps are read. A worker publishes its step and then
reads the flag; a processor may let that read overtake the store by some nanoseconds. This pause is
what makes the published step visible before it is read here."""

_F_SETPIPE_SZ = 1031
_PIPE_BYTES = 1024 * 1024
_READS_A_PUMP = 4
"""A worker that prints without end must not keep its agent from its heartbeats."""

TAIL_LINES = 40
"""Of a worker's output: what is kept in memory, and searched when it has failed."""


@dataclass(frozen=True)
class GenerationStart:
    """What the coordinator tells a node to start. Ranks are this node's, in local order."""

    token: Token
    ranks: tuple[int, ...]
    world_size: int
    node_rank: int
    master_address: str
    master_port: int
    resume_steps: tuple[int, ...]
    stop_timeout_s: float
    threads: int
    skipped_batches: tuple[tuple[int, int], ...] = ()
    preflight: bool = False

    def to_json(self) -> dict[str, Any]:
        """For the channel."""
        return {**self.__dict__, "token": str(self.token)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> GenerationStart:
        """Read back `to_json`."""
        return cls(
            token=Token.parse(body["token"]),
            ranks=tuple(body["ranks"]),
            world_size=body["world_size"],
            node_rank=body["node_rank"],
            master_address=body["master_address"],
            master_port=body["master_port"],
            resume_steps=tuple(body["resume_steps"]),
            stop_timeout_s=body["stop_timeout_s"],
            threads=body["threads"],
            skipped_batches=tuple((first, last) for first, last in body["skipped_batches"]),
            preflight=body["preflight"],
        )


@dataclass
class Worker:
    """One worker process and its ends of the page, socket and pipe."""

    rank: int
    process: Started
    page: Page
    channel: socket.socket
    output_fd: int
    lines: LineBuffer
    last_words: dict[str, Any] | None = None
    exit_status: int | None = None
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    oom_killed: bool | None = None
    xids: list[Any] = field(default_factory=list)
    """Xids that the driver logged while it ran: numbers, or {xid, device}; for who watches them."""

    told_steps: int = 0
    """Of the compute time that the last heartbeat told."""

    def take_output(self, data: bytes) -> list[bytes]:
        """The whole lines that `data` completes; empty data ends the output."""
        lines = self.lines.feed(data) if data else self.lines.end()
        self.tail.extend(line[:SEARCHED_CHARS] for line in lines[-TAIL_LINES:])
        return lines

    @property
    def phase(self) -> str:
        """What the worker said it is at."""
        return PHASES[self.page.read(Word.PHASE)]

    def end(self, rules: RuleTable | None = None) -> dict[str, Any]:
        """How it ended, for the coordinator. A traceback stays in the node's log: a thousand nodes
        would send theirs with every heartbeat. Of the log's last lines only those travel that a
        pattern of `rules` is found in."""
        words = self.last_words
        found = (
            rules.search_log(self._tail_text()) if rules is not None and self.exit_status else ()
        )
        return {
            "rank": self.rank,
            "exit_status": self.exit_status,
            "phase": self.phase,
            "done_step": self.page.read(Word.DONE_STEP),
            "last_words": words and {k: v for k, v in words.items() if k != "traceback"},
            "log_match": [[match.rule, match.line] for match in found],
            "oom_killed": self.oom_killed,
            "xids": list(self.xids),
        }

    def _tail_text(self) -> list[str]:
        return [line.decode("utf-8", errors="replace") for line in self.tail]


class WorkerGroup:
    """All workers of this node in one generation."""

    def __init__(
        self,
        run: RunDir,
        node: str,
        start: GenerationStart,
        starter: Starter,
        argv: Sequence[str],
        environ: Mapping[str, str],
        lease_until_ns: int,
        *,
        rules: RuleTable | None = None,
        hang: HangSpec | None = None,
        durations: PhaseDurations | None = None,
    ) -> None:
        """Start them all; raises OSError when one cannot be started (the others are killed).

        `durations` is what the node has learned of how long phases take; it learns more here.
        """
        self.token = start.token
        self._rules = rules
        self._oom_kills = oom_kills()
        log_dir = run.generation_dir(start.token.attempt, start.token.generation)
        self.silence = SilenceWatch(
            node, stacks_path(log_dir, node), hang or HangSpec(), durations or PhaseDurations()
        )
        self._log = NodeLog(node_log_path(log_dir, node))
        self.workers: list[Worker] = []
        try:
            for local_rank, rank in enumerate(start.ranks):
                self.workers.append(
                    self._start_one(
                        run, start, starter, argv, environ, rank, local_rank, lease_until_ns
                    )
                )
        except OSError:
            self.close()
            raise

    def _start_one(
        self,
        run: RunDir,
        start: GenerationStart,
        starter: Starter,
        argv: Sequence[str],
        environ: Mapping[str, str],
        rank: int,
        local_rank: int,
        lease_until_ns: int,
    ) -> Worker:
        page = Page.create()
        page.write(Word.LEASE_NS, lease_until_ns)
        ours, theirs = socket_pair()
        ours.setblocking(False)
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(read_end, _F_SETPIPE_SZ, _PIPE_BYTES)
        env = WorkerEnv(
            run=run,
            token=start.token,
            rank=rank,
            local_rank=local_rank,
            world_size=start.world_size,
            local_world_size=len(start.ranks),
            node_rank=start.node_rank,
            resume_steps=start.resume_steps,
            stop_timeout_s=start.stop_timeout_s,
            skipped_batches=start.skipped_batches,
            preflight=start.preflight,
            page_fd=page.fd,
            socket_fd=theirs.fileno(),
        )
        affinity = thread_affinity(local_rank, len(start.ranks))
        try:
            process = starter.start(
                WorkerStart(
                    argv=argv,
                    environ={
                        **environ,
                        **env.to_environ(),
                        "MASTER_ADDR": start.master_address,
                        "MASTER_PORT": str(start.master_port),
                        "OMP_NUM_THREADS": str(start.threads),
                    },
                    inherited_fds=(page.fd, theirs.fileno()),
                    output_fd=write_end,
                    affinity=None if affinity is None else frozenset(affinity),
                )
            )
        except OSError:
            page.close()
            ours.close()
            os.close(read_end)
            raise
        finally:
            theirs.close()
            os.close(write_end)
        return Worker(rank, process, page, ours, read_end, LineBuffer())

    # -- listening ---------------------------------------------------------------------------------

    def fds(self) -> list[int]:
        """What to wait on: sockets, pipes and ends of workers that are still there."""
        found = []
        for worker in self.workers:
            if worker.process.fd >= 0:
                found.append(worker.process.fd)
            if worker.channel.fileno() >= 0:
                found.append(worker.channel.fileno())
            if worker.output_fd >= 0:
                found.append(worker.output_fd)
        return found

    def pump(self, on_message: Callable[[int, dict[str, Any]], None]) -> None:
        """Read everything that has arrived; messages go to `on_message(rank, message)`."""
        for worker in self.workers:
            self._pump_output(worker)
            self._pump_messages(worker, on_message)

    def _pump_output(self, worker: Worker) -> None:
        for _ in range(_READS_A_PUMP):
            if worker.output_fd < 0:
                return
            try:
                data = os.read(worker.output_fd, _PIPE_BYTES)
            except BlockingIOError:
                return
            lines = worker.take_output(data)
            if lines:
                self._log.write(worker.rank, lines)
            if not data:
                os.close(worker.output_fd)
                worker.output_fd = -1

    def _pump_messages(
        self, worker: Worker, on_message: Callable[[int, dict[str, Any]], None]
    ) -> None:
        while worker.channel.fileno() >= 0:
            try:
                data = worker.channel.recv(MAX_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                worker.channel.close()
                return
            message = decode(data)
            if message is None:
                continue
            if message["kind"] == Message.INSPECTED:
                self.silence.heard(worker.rank, message)
                continue
            if message["kind"] in (Message.STOPPED, Message.FINISHED, Message.ERROR):
                worker.last_words = message
            on_message(worker.rank, message)

    # -- telling -----------------------------------------------------------------------------------

    def set_stop_flag(self) -> int:
        """Set every worker's flag; returns the largest step that any has begun (-1: none)."""
        for worker in self.workers:
            worker.page.write(Word.STOP_FLAG, 1)
        time.sleep(FLAG_SETTLE_S)
        return max((w.page.read(Word.BEGUN_STEP) for w in self.workers), default=NONE)

    def set_target(self, step: int) -> None:
        """Tell the agreed step."""
        for worker in self.workers:
            worker.page.write(Word.TARGET_STEP, step)

    def extend_lease(self, until_ns: int) -> None:
        """Let the workers write until then (CLOCK_MONOTONIC)."""
        for worker in self.workers:
            worker.page.write(Word.LEASE_NS, until_ns)

    def kill(self) -> None:
        """SIGKILL to every worker that is still there, and its children."""
        for worker in self.workers:
            if worker.exit_status is None:
                worker.process.kill()

    # -- watching ----------------------------------------------------------------------------------

    def progress(self) -> dict[str, Any]:
        """The node's part of a heartbeat: the least step done, the phases, who has ended and, where
        there is one, who is overdue.

        Ends are said with every beat, since the message of an end may be lost with its connection.
        """
        overdue = [late.to_json() for late in self.silence.overdue]
        compute = self._new_compute()
        return {
            "done_step": min((w.page.read(Word.DONE_STEP) for w in self.workers), default=NONE),
            "phases": sorted({w.phase for w in self.workers}),
            "ended": self.ends(),
            **({"overdue": overdue} if overdue else {}),
            **({"compute": compute} if compute else {}),
        }

    def watch(self, now: float, stalled_s: float = 0.0) -> None:
        """Look for signs of progress; see `SilenceWatch.look`."""
        self.silence.look(self.workers, now, stalled_s)

    def inspect(self, now: float) -> None:
        """Begin to find out what every worker is doing; see `SilenceWatch.inspect`."""
        self.silence.inspect(self.workers, now)

    def inspected(self) -> list[RankReport] | None:
        """The reports of `inspect`, once; None before they are there."""
        return self.silence.inspected()

    def _new_compute(self) -> dict[str, list[int]]:
        """By rank the totals [ns, steps] of its compute, where they changed since the last beat."""
        changed = {}
        for worker in self.workers:
            steps = worker.page.read(Word.COMPUTE_STEPS)
            if steps != worker.told_steps:
                worker.told_steps = steps
                changed[str(worker.rank)] = [worker.page.read(Word.COMPUTE_NS), steps]
        return changed

    def ends(self) -> list[dict[str, Any]]:
        """How those that have ended did."""
        return [
            worker.end(self._rules) for worker in self.workers if worker.exit_status is not None
        ]

    def reap(self) -> list[Worker]:
        """Workers that ended since the last call, and their children with them.

        Call `pump` afterwards: it has the last words.
        """
        ended = []
        for worker in self.workers:
            if worker.exit_status is None and (status := worker.process.poll()) is not None:
                worker.exit_status = status
                worker.process.kill()
                worker.process.close()
                ended.append(worker)
        if ended:
            self._count_oom_kills(ended)
        return ended

    def _count_oom_kills(self, ended: Sequence[Worker]) -> None:
        """Say of those that ended whether the oom-killer struck since the ends before."""
        before, now = self._oom_kills, oom_kills()
        self._oom_kills = now
        for worker in ended:
            worker.oom_killed = None if before is None or now is None else now > before

    @property
    def running(self) -> bool:
        """Whether any worker is still there."""
        return any(worker.exit_status is None for worker in self.workers)

    def close(self) -> int:
        """Kill what is left and release everything; how many bytes of their logs were lost."""
        self.kill()
        for worker in self.workers:
            worker.process.close()
            if worker.channel.fileno() >= 0:
                worker.channel.close()
            if worker.output_fd >= 0:
                os.close(worker.output_fd)
                worker.output_fd = -1
            worker.page.close()
        self._log.close()
        return self._log.lost_bytes


def worker_command(engine: str, python: str) -> list[str]:
    """The command of an engine's worker. The engine is a process, never an import."""
    return [python, "-m", {"native": "air_hpc.train"}[engine]]


def worker_environment(
    environ: Mapping[str, str], run: RunDir, node_local_dir: str
) -> dict[str, str]:
    """What every worker of the run gets: caches on the node's own disk, code from the snapshot."""
    cache = Path(node_local_dir) / f"air_hpc-{os.getuid()}"
    chosen = {
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",
        "TORCH_FR_BUFFER_SIZE": environ.get("TORCH_FR_BUFFER_SIZE", "2000"),
    }
    kept = {key: value for key, value in environ.items() if key not in ("NOTIFY_SOCKET",)}
    if run.code_dir.is_dir() and str(run.code_dir) not in kept.get("PYTHONPATH", "").split(":"):
        rest = kept.get("PYTHONPATH")
        chosen["PYTHONPATH"] = f"{run.code_dir}:{rest}" if rest else str(run.code_dir)
    return {**kept, **chosen}
