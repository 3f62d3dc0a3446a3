"""The worker's side of the contract with its agent.

    session = Session.attach()
    with session.phase("load"):
        ...
    for step in range(first, last + 1):
        if not session.begin_step(step):
            break                       # the agreed stop: the step before was the last
        ...                             # train it
        session.end_step(step, {"train/loss": loss})
    session.stopped(step) or session.finished(step)

The stop agreement (rule 2 of the design), as this side sees it: `begin_step` publishes the step,
*then* reads the flag. Without a flag it returns at once, which costs two loads and a store. Under
the flag the begun steps of all workers stand still, since nobody begins another; the coordinator
takes the largest of them as the target, and each worker runs every step up to it and none after.
So nobody waits in a collective for a step that another never begins.

What may go wrong: the target may not come before the deadline (the coordinator died); then
`StopNotAgreed` is raised and the worker leaves without a save. The agent may fall silent; then the
lease runs out, and every write of a checkpoint raises `Fenced`.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from air_hpc.errors import AirHpcError
from air_hpc.rundir.commit import (
    Checkpoint,
    FileRecord,
    abort_save,
    begin_save,
    checkpoint_path,
    commit_save,
    find_candidates,
    inheritable,
)
from air_hpc.rundir.fence import Fenced, Token, claim_next_attempt, record_inherited
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.retention import retire
from air_hpc.rundir.spool import SpoolWriter
from air_hpc.session.failure import error_facts
from air_hpc.session.messages import Message, encode
from air_hpc.session.page import NONE, PHASES, Page, Word
from air_hpc.session.watch import start_watch

POLL_S = 0.001
ENV_PREFIX = "AIR_HPC_"


class StopNotAgreed(AirHpcError):
    """A stop was asked for and no common step was agreed on before the deadline."""


@dataclass(frozen=True)
class WorkerEnv:
    """What the agent tells a worker through its environment."""

    run: RunDir
    token: Token
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    resume_steps: tuple[int, ...] = ()
    """Committed checkpoints to resume from, newest first; empty: from scratch."""
    stop_timeout_s: float = 120.0
    skipped_batches: tuple[tuple[int, int], ...] = ()
    """Ranges of the run's batches (first, last; 0 is the first) that rollbacks stepped over."""
    preflight: bool = False
    """Whether the device and the links are tried before the model is built."""
    page_fd: int = NONE
    socket_fd: int = NONE

    def to_environ(self) -> dict[str, str]:
        """As environment variables; RANK and its kin are torch's names."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "NODE_RANK": str(self.node_rank),
            f"{ENV_PREFIX}RUN_DIR": str(self.run.path),
            f"{ENV_PREFIX}TOKEN": str(self.token),
            f"{ENV_PREFIX}RESUME_STEPS": json.dumps(list(self.resume_steps)),
            f"{ENV_PREFIX}STOP_TIMEOUT_S": str(self.stop_timeout_s),
            f"{ENV_PREFIX}SKIPPED_BATCHES": json.dumps(self.skipped_batches),
            f"{ENV_PREFIX}PREFLIGHT": str(int(self.preflight)),
            f"{ENV_PREFIX}PAGE_FD": str(self.page_fd),
            f"{ENV_PREFIX}SOCKET_FD": str(self.socket_fd),
        }

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """Read back `to_environ`; raises AirHpcError in a process that no agent started."""
        try:
            return cls(
                run=RunDir(Path(environ[f"{ENV_PREFIX}RUN_DIR"])),
                token=Token.parse(environ[f"{ENV_PREFIX}TOKEN"]),
                rank=int(environ["RANK"]),
                local_rank=int(environ["LOCAL_RANK"]),
                world_size=int(environ["WORLD_SIZE"]),
                local_world_size=int(environ["LOCAL_WORLD_SIZE"]),
                node_rank=int(environ["NODE_RANK"]),
                resume_steps=tuple(json.loads(environ[f"{ENV_PREFIX}RESUME_STEPS"])),
                stop_timeout_s=float(environ[f"{ENV_PREFIX}STOP_TIMEOUT_S"]),
                skipped_batches=tuple(
                    (int(first), int(last))
                    for first, last in json.loads(environ[f"{ENV_PREFIX}SKIPPED_BATCHES"])
                ),
                preflight=environ[f"{ENV_PREFIX}PREFLIGHT"] == "1",
                page_fd=int(environ[f"{ENV_PREFIX}PAGE_FD"]),
                socket_fd=int(environ[f"{ENV_PREFIX}SOCKET_FD"]),
            )
        except (KeyError, ValueError, TypeError) as error:
            raise AirHpcError(
                f"a worker is started by its agent, which sets its environment; missing: {error}"
            ) from None


class Session:
    """One worker's session. Not for use from several threads, but for `commit_save` and `note`."""

    def __init__(self, env: WorkerEnv, page: Page, channel: socket.socket | None) -> None:
        self.env = env
        self._page = page
        self._channel = channel
        self._spool = SpoolWriter(env.run, env.token) if env.rank == 0 else None
        self._training = False

    @classmethod
    def attach(cls, environ: Mapping[str, str] | None = None) -> Self:
        """The session of a worker that its agent started."""
        env = WorkerEnv.from_environ(os.environ if environ is None else environ)
        channel = socket.socket(fileno=env.socket_fd)
        channel.settimeout(30)
        start_watch(channel, env.rank, env.page_fd)
        return cls(env, Page.attach(env.page_fd), channel)

    @classmethod
    def standalone(
        cls,
        run: RunDir,
        *,
        rank: int = 0,
        world_size: int = 1,
        token: Token | None = None,
        resume_steps: tuple[int, ...] = (),
    ) -> Self:
        """A session without an agent, for tests and benchmarks: no lease, and nobody stops it.

        Without a `token` the next attempt is claimed, inheriting `resume_steps` and no others.
        """
        if token is None:
            token = claim_next_attempt(run)
            usable = [c for c in find_candidates(run).usable if c.step in resume_steps]
            record_inherited(run, token, inheritable(usable))
        env = WorkerEnv(run, token, rank, rank, world_size, world_size, 0, resume_steps)
        page = Page.create()
        page.write(Word.LEASE_NS, 2**62)
        return cls(env, page, None)

    @property
    def run(self) -> RunDir:
        """The run directory."""
        return self.env.run

    @property
    def token(self) -> Token:
        """The token that this worker writes under."""
        return self.env.token

    @property
    def rank(self) -> int:
        """This worker's rank in the world."""
        return self.env.rank

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return self.env.world_size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0: the one that logs, begins and commits saves."""
        return self.env.rank == 0

    def resume_candidates(self) -> list[Path]:
        """Committed checkpoints to resume from, newest first, as the coordinator found them."""
        return [checkpoint_path(self.run, step) for step in self.env.resume_steps]

    # -- steps -----------------------------------------------------------------------------------

    def begin_step(self, step: int) -> bool:
        """Say that `step` begins; False when the agreed stop lies before it.

        Raises StopNotAgreed when a stop is asked for and no target comes in time.
        """
        page = self._page
        page.write(Word.BEGUN_STEP, step)
        if page.read(Word.STOP_FLAG) and step > self._await_target():
            return False
        if not self._training:
            self._training = True
            self._enter("step")
            if self.is_first:
                self.note(Message.TRAINING_STARTED, step=step)
        return True

    def end_step(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Say that `step` is done; rank 0's metrics go to the spool."""
        self._page.write(Word.DONE_STEP, step)
        if metrics and self._spool is not None:
            self._spool.log(step, metrics)

    def computed(self, compute_ns: int, steps: int) -> None:
        """Running totals of this rank: nanoseconds of its own compute, and over how many steps.

        Told where a step logs. The two words may be read between their writes: then one report has
        the compute of an interval more, and the next one is right again.
        """
        self._page.write(Word.COMPUTE_NS, compute_ns)
        self._page.write(Word.COMPUTE_STEPS, steps)

    def stop_requested(self) -> bool:
        """Whether a stop was asked for (a hint for long phases; `begin_step` is what decides)."""
        return bool(self._page.read(Word.STOP_FLAG))

    def _await_target(self) -> int:
        deadline = time.monotonic() + self.env.stop_timeout_s
        while (target := self._page.read(Word.TARGET_STEP)) == NONE:
            if time.monotonic() > deadline:
                raise StopNotAgreed(
                    f"rank {self.rank}: no common step was agreed on within "
                    f"{self.env.stop_timeout_s:g} s of the stop"
                )
            time.sleep(POLL_S)
        return target

    # -- phases and messages ---------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What the worker is at, one of PHASES; the phase before is entered again afterwards."""
        before = PHASES[self._page.read(Word.PHASE)]
        self._enter(name)
        try:
            yield
        finally:
            self._enter(before)

    def _enter(self, name: str) -> None:
        self._page.write(Word.PHASE, PHASES.index(name))

    def note(self, kind: str, **facts: Any) -> None:
        """Tell the agent; lost without harm when there is no agent any more."""
        channel = self._channel  # another thread may find at the same time that the agent is gone
        if channel is not None:
            try:
                channel.send(encode(kind, {"rank": self.rank, **facts}))
            except OSError:
                self._channel = None

    # -- checkpoints (rank 0; collectives among the ranks are the engine's) -----------------------

    def require_lease(self) -> None:
        """Raise Fenced when the agent has not heard from the coordinator for a lease."""
        if time.monotonic_ns() > self._page.read(Word.LEASE_NS):
            raise Fenced(f"rank {self.rank}: the lease ran out, another attempt may own the run")

    def begin_save(self, step: int) -> Path:
        """Make the folder that all ranks write their shards of `step` to.

        Rank 0 calls it in its training thread, after `end_step(step)`.
        """
        self.require_lease()
        if self._spool is not None:
            self._spool.flush()
        folder = begin_save(self.run, self.token, step)
        self.note(Message.SAVE_BEGUN, step=step)
        return folder

    def commit_save(
        self,
        step: int,
        files: Mapping[str, FileRecord],
        *,
        facts: Mapping[str, Any],
        started: float,
        blocking_s: float,
        duration_s: float,
        told: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Commit what all ranks wrote (rank 0 calls, from any thread).

        The metrics up to this step, written by `begin_save`, become durable first.

        `started` is the wall-clock time of the state saved, `blocking_s` how long training stood
        still, `duration_s` how long the save took; `told` goes with them to the ledger. Raises as
        `rundir.commit.commit_save`.
        """
        self.require_lease()
        if self._spool is not None:
            self._spool.sync()
        checkpoint = commit_save(self.run, self.token, step, files, facts)
        self.note(
            Message.COMMITTED,
            step=step,
            bytes=checkpoint.total_bytes,
            started=started,
            blocking_s=blocking_s,
            duration_s=duration_s,
            **(told or {}),
        )
        return checkpoint

    def abort_save(self, path: Path, step: int, reason: str) -> None:
        """Give up a save: remove what it left and say so. The run goes on."""
        abort_save(path)
        self.note(Message.SAVE_FAILED, step=step, reason=reason)

    def retire(
        self, *, keep_last: int, keep_every_steps: int | None, verified: int | None
    ) -> list[int]:
        """Apply retention (rank 0 calls); see `rundir.retention.retire`."""
        self.require_lease()
        return retire(
            self.run,
            self.token,
            keep_last=keep_last,
            keep_every_steps=keep_every_steps,
            verified=verified,
        )

    # -- ends --------------------------------------------------------------------------------------

    def stopped(self, step: int, *, saved: bool) -> None:
        """This worker leaves at the agreed `step`; `saved` says whether its state is committed."""
        self._leave(Message.STOPPED, step=step, saved=saved)

    def finished(self, step: int) -> None:
        """This worker did all its steps and its last state is committed."""
        self._leave(Message.FINISHED, step=step)

    def failed(
        self,
        error: BaseException,
        *,
        traceback: str,
        failure_class: str | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """This worker ends with an error, whose facts go to the agent.

        `failure_class` is for errors that know what they mean; of any other the agent finds the
        class, by the run's table of failures. `facts` are what the coordinator needs beside it.
        """
        self._leave(
            Message.ERROR,
            **error_facts(error),
            traceback=traceback,
            failure_class=failure_class,
            step=self._page.read(Word.DONE_STEP),
            **({} if facts is None else {"facts": dict(facts)}),
        )

    def _leave(self, kind: Message, **facts: Any) -> None:
        if self._spool is not None:
            # On a full disk the last metrics are lost; why the worker leaves must not be.
            with suppress(OSError):
                self._spool.close()
        self.note(kind, **facts)
