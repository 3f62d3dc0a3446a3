"""One node's part: says hello, starts the workers it is told to, reports them, obeys, leaves.

The node agent decides nothing about the run. It renews its workers' lease with every heartbeat that
the coordinator acknowledges; when none was for `lease_s`, the coordinator is gone or this node is
cut off: the workers are killed and the agent leaves.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from air_hpc.agent.channel import Message
from air_hpc.agent.environment import JobContext
from air_hpc.agent.keeper import EXIT_STAND_BY
from air_hpc.agent.preflight import Preflight
from air_hpc.agent.starters import Starter
from air_hpc.agent.workers import GenerationStart, WorkerGroup
from air_hpc.agent.xids import hand_out
from air_hpc.config.spec import RecoverySpec
from air_hpc.errors import EXIT_ENVIRONMENT
from air_hpc.probes.result import Check, worst
from air_hpc.probes.xid import XidWatch
from air_hpc.recovery.hang import PhaseDurations
from air_hpc.recovery.rules import RuleTable
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.words import FailureClass
from air_hpc.session.messages import RECORDED
from air_hpc.session.messages import Message as MessageKind

HELLO_INTERVAL_S = 0.5
TURN_S = 5.0
"""Where the coordinator is gone, each further node waits so much longer before it asks Slurm for
the requeue: by then the one before it has, or is gone too."""
TURNS = 16
"""So many nodes take their turn; the others leave at once."""
STALL_S = 1.0
"""Ticks further apart than this are a stall of this process."""


_OUT_OF_MEMORY = (errno.EAGAIN, errno.ENOMEM)
_NO_COMMAND = (
    None,
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.ENOEXEC,
    errno.ENOTDIR,
    errno.E2BIG,
)
"""Errors of a start that would come again anywhere; a starter's own words have no number."""


def _class_of(error: OSError) -> FailureClass:
    """What it means that workers could not be started."""
    if error.errno in _OUT_OF_MEMORY:
        return FailureClass.HOST_MEMORY
    return FailureClass.ENVIRONMENT if error.errno in _NO_COMMAND else FailureClass.UNKNOWN


class Uplink(Protocol):
    """Where a node's messages go."""

    def send(self, message: Message) -> None:
        """Send one message to the coordinator."""
        ...


class NodeAgent:
    """The state of one node. `exit_code` is None until the agent may leave."""

    def __init__(
        self,
        context: JobContext,
        run: RunDir,
        recovery: RecoverySpec,
        uplink: Uplink,
        hello: Message,
        starter: Starter,
        worker_argv: Sequence[str],
        worker_environ: Mapping[str, str],
        *,
        start_timeout_s: float,
        say: Callable[[str], None],
        on_coordinator_lost: Callable[[], bool],
        preflight: Preflight | None = None,
        xids: XidWatch | None = None,
        disowned: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._run = run
        self._recovery = recovery
        self._rules = RuleTable.of(recovery.rules)
        self._uplink = uplink
        self._hello = hello
        self._starter = starter
        self._argv = worker_argv
        self._environ = worker_environ
        self._say = say
        self._on_coordinator_lost = on_coordinator_lost
        self._preflight = preflight
        self._preflight_request: str | None = None
        self._preflight_awaited = False
        self._rank_checks: dict[int, list[dict[str, Any]]] = {}
        if preflight is not None:
            preflight.start()
        self._xids = xids
        self._disowned = disowned
        self._clock = clock
        self._start_timeout_s = start_timeout_s
        self._deadline = clock() + start_timeout_s
        """For the coordinator's first word; after it for the starter, at each start."""
        self._next_hello = clock()
        self._next_heartbeat = clock()
        self._heard = clock()
        self._last_tick = clock()
        self._stalled_s = 0.0
        self._sent: dict[int, float] = {}
        self._sequence = 0
        self._welcomed = False
        self._durations = PhaseDurations()
        self._void: set[str] = set()
        """Tokens of generations that were killed before they were started here."""
        self._pending: GenerationStart | None = None
        self._orphaned: float | None = None
        self.group: WorkerGroup | None = None
        self.exit_code: int | None = None

    # -- from the coordinator ----------------------------------------------------------------------

    def on_message(self, message: Message) -> None:
        """Obey one message of the coordinator."""
        handler = getattr(self, f"_on_{message['type']}", None)
        if handler is not None:
            handler(message)

    def _on_welcome(self, message: Message) -> None:
        if not self._welcomed:
            self._welcomed = True
            self._heard = self._clock()
            self._orphaned = None  # late, but there

    def _on_ack(self, message: Message) -> None:
        sent = self._sent.pop(message["sequence"], None)
        if sent is not None:
            if sent > self._heard:
                self._heard, self._stalled_s = sent, 0.0
            if self.group is not None:
                self.group.extend_lease(self._lease_until_ns())

    def _lease_until_ns(self) -> int:
        """The lease counts from when the acknowledged heartbeat was *sent*, by our clock."""
        return int((self._heard + self._recovery.lease_s) * 1e9)

    def _on_start(self, message: Message) -> None:
        start = GenerationStart.from_json(message["start"])
        if str(start.token) in self._void:
            return
        if self._pending is not None and self._pending.token >= start.token:
            return
        if self.group is not None:
            if self.group.token >= start.token:
                return  # said again to a heartbeat that was on its way
            self.group.close()
            self.group = None
        self._rank_checks = {}
        self._starter.renew()
        self._pending, self._deadline = start, self._clock() + self._start_timeout_s
        self._start_pending()

    def _start_pending(self) -> None:
        """Start what was asked for, once it needs no waiting: a template may have to import."""
        start = self._pending
        if start is None:
            return
        if not self._starter.ready:
            if self._clock() > self._deadline:
                self._pending = None
                reason = "the process that workers are forked from was not ready in time"
                self._say_start_failed(start, reason, FailureClass.UNKNOWN)
            return
        self._pending = None
        try:
            self.group = WorkerGroup(
                self._run,
                self._context.node,
                start,
                self._starter,
                self._argv,
                self._environ,
                self._lease_until_ns(),
                rules=self._rules,
                hang=self._recovery.hang,
                durations=self._durations,
            )
        except OSError as error:
            self._say_start_failed(start, str(error), _class_of(error))

    def _say_start_failed(
        self, start: GenerationStart, reason: str, failure_class: FailureClass
    ) -> None:
        self._uplink.send(
            {
                "type": "start_failed",
                "token": str(start.token),
                "reason": reason,
                "failure_class": failure_class,
            }
        )

    def _on_stop(self, message: Message) -> None:
        group = self._group_of(message)
        if group is not None:
            self._say_of(message, "begun", step=group.set_stop_flag())

    def _on_target(self, message: Message) -> None:
        group = self._group_of(message)
        if group is not None:
            group.set_target(message["step"])

    def _on_kill(self, message: Message) -> None:
        """Kill the workers of a generation; where it has none here, none will be started either."""
        group = self._group_of(message)
        if group is not None:
            group.kill()
        else:
            self._void.add(message["token"])
            if self._pending is not None and str(self._pending.token) == message["token"]:
                self._pending = None
            self._say_of(message, "none_here")

    def _group_of(self, message: Message) -> WorkerGroup | None:
        """The workers of the generation that a message is about."""
        group = self.group
        return group if group is not None and str(group.token) == message["token"] else None

    def _say_of(self, message: Message, kind: str, **facts: Any) -> None:
        self._uplink.send({"type": kind, "token": message["token"], **facts})

    def _on_preflight(self, message: Message) -> None:
        """Check this node anew; the same `request` said again is answered with what was found."""
        if self._preflight is None:
            self._uplink.send({"type": "preflight", "request": message["request"], "checks": []})
            return
        if message["request"] != self._preflight_request:
            self._preflight_request = message["request"]
            self._preflight.start()
        self._preflight_awaited = True

    def _tell_preflight(self) -> None:
        found = None if self._preflight is None else self._preflight.poll()
        if found is not None and self._preflight_awaited:
            self._preflight_awaited = False
            self._uplink.send(
                {
                    "type": "preflight",
                    "request": self._preflight_request,
                    "checks": [check.to_json() for check in found.checks],
                    "seconds": found.seconds,
                }
            )

    def _tell_rank_checks(self) -> None:
        """What this node's ranks showed of their devices and links, as one word for the node."""
        told = (Check.from_json(body) for checks in self._rank_checks.values() for body in checks)
        checks = [check.to_json() for check in worst(told)]
        self._send_of_group("rank_checks", checks=checks)

    def _on_inspect(self, message: Message) -> None:
        """Find out what the workers of a generation are doing; `_watch` sends what came of it."""
        group = self._group_of(message)
        if group is not None:
            group.inspect(self._clock())
        else:
            self._say_of(message, "inspected", reports=[])

    def _on_leave(self, message: Message) -> None:
        self._uplink.send({"type": "bye"})
        self._leave(message["exit_code"], message.get("reason", ""))

    def _leave(self, exit_code: int, reason: str) -> None:
        if reason:
            self._say(reason)
        if self.group is not None:
            lost = self.group.close()
            self.group = None
            if lost:
                self._say(f"{lost} bytes of the workers' log could not be written")
        self.exit_code = exit_code

    def fds(self) -> list[int]:
        """What the loop waits on for this node's workers."""
        return [] if self.group is None else [*self.group.fds(), *self._starter.fds()]

    def close(self) -> None:
        """Kill what is left of the workers and release everything."""
        if self.group is not None:
            self.group.close()
            self.group = None
        if self._preflight is not None:
            self._preflight.close()
        if self._xids is not None:
            self._xids.stop()
        self._starter.close()

    # -- from the outside and from the workers -----------------------------------------------------

    def on_signal(self, name: str) -> None:
        """Pass a signal of this node on: the coordinator answers it for the whole run."""
        self._uplink.send({"type": "signal", "name": name})

    def pump(self) -> None:
        """Listen to the workers and report those that ended."""
        if self.group is None:
            return
        self.group.pump(self._on_worker_message)
        if self._xids is not None:
            hand_out(self._xids.take(), self.group.workers)
        ended = self.group.reap()
        if ended:
            self.group.pump(self._on_worker_message)
            self._send_of_group("ended", workers=self.group.ends())

    def _send_of_group(self, kind: str, **facts: Any) -> None:
        if self.group is not None:
            self._uplink.send({"type": kind, "token": str(self.group.token), **facts})

    def _on_worker_message(self, rank: int, message: dict[str, Any]) -> None:
        if message["kind"] == MessageKind.PREFLIGHT:
            self._rank_checks[rank] = message.get("checks", [])
            if self.group is not None and len(self._rank_checks) == len(self.group.workers):
                self._tell_rank_checks()
        if message["kind"] in RECORDED:
            self._send_of_group("worker", rank=rank, message=message)

    # -- as time passes ----------------------------------------------------------------------------

    def tick(self) -> None:
        """Say hello until welcomed, then beat; leave when the coordinator is silent.

        The first hello waits until workers can be started without delay: after it this node is
        expected to beat, and a template's imports may take longer than that. It also waits for the
        node's own checks, whose results it carries.

        A stall of our own (a suspended job, a file system that hangs) ends the lease, but is not
        held against the coordinator: it has not been asked meanwhile.
        """
        now = self._clock()
        stalled_s = max(0.0, now - self._last_tick - STALL_S)
        self._stalled_s += stalled_s
        self._last_tick = now
        if self.exit_code is not None:
            return
        if self._orphaned is not None:
            self._tick_orphaned(now, self._orphaned)
            return
        if not self._welcomed:
            self._tick_hello(now)
            return
        self._start_pending()
        if self._preflight_awaited:
            self._tell_preflight()
        self._watch(now, stalled_s)
        if now >= self._next_heartbeat:
            self._beat(now)
        silent_s = now - self._heard - self._stalled_s
        if silent_s > self._recovery.lease_s:
            self._say(
                f"no word from the coordinator for {silent_s:.1f} s "
                f"(recovery.lease_s={self._recovery.lease_s:g}): leaving"
            )
            if self.group is not None:
                self.group.kill()
            self._orphaned = now
            self._tick_orphaned(now, now)

    def _tick_orphaned(self, now: float, since: float) -> None:
        """Somebody must ask for the requeue, once: the lowest survivor, by waiting for its turn."""
        turn = self._context.node_index - 1
        if turn >= TURNS:
            self._leave(EXIT_ENVIRONMENT, "")
        elif now >= since + turn * TURN_S:
            done = self._on_coordinator_lost()
            self._leave(EXIT_ENVIRONMENT if done else EXIT_STAND_BY, "")

    def _watch(self, now: float, stalled_s: float) -> None:
        """Look at the workers' progress; report an inspection that is over."""
        if self.group is None:
            return
        self.group.watch(now, stalled_s)
        reports = self.group.inspected()
        if reports is not None:
            self._send_of_group("inspected", reports=[report.to_json() for report in reports])

    def _tick_hello(self, now: float) -> None:
        if self._disowned():
            self._leave(EXIT_ENVIRONMENT, "Slurm has lost this node")
            return
        checked = self._preflight is None or self._preflight.poll() is not None
        if now >= self._next_hello and self._starter.ready and checked:
            filled = self._hello if self._preflight is None else self._preflight.fill(self._hello)
            self._uplink.send(filled)
            self._next_hello = now + HELLO_INTERVAL_S
        if now > self._deadline:
            late = f"the coordinator on {self._context.nodes[0]} did not answer"
            if not self._starter.ready:
                late = "the process that workers are forked from was not ready"
            late += " within launch.start_timeout_s"
            if self._starter.ready and self._context.node_index > 0:
                # Lost before it welcomed anybody. One that waited in vain for others has the same
                # deadline, and goes first.
                self._say(late)
                self._orphaned = now + TURN_S
            else:
                self._leave(EXIT_ENVIRONMENT, late)

    def _beat(self, now: float) -> None:
        self._next_heartbeat = now + self._recovery.heartbeat_interval_s
        self._sequence += 1
        self._sent[self._sequence] = now
        if len(self._sent) > 1000:
            self._sent.pop(next(iter(self._sent)))
        if self._disowned():  # said again until the answer is to leave
            self._uplink.send({"type": "disowned"})
        progress = {} if self.group is None else self.group.progress()
        # What is about to be started needs no telling again.
        holds = self._pending or self.group
        token = None if holds is None else str(holds.token)
        self._uplink.send(
            {
                "type": "heartbeat",
                "sequence": self._sequence,
                "wall_time": time.time(),
                "token": token,
                **progress,
            }
        )
