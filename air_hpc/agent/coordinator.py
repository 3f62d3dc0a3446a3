"""The first node's extra part: agrees the members, owns the token, decides, writes the ledger.

An attempt goes through these phases:

    registering   every node of the allocation says hello before `launch.start_timeout_s`
    running       a token is claimed, the checkpoints to resume from are fixed, workers run
    ending        workers have ended or are being killed; what ended them is being gathered
    over          the class, the verdict and the intent are written; everyone may leave

It reacts to messages, signals and time, and acts through its channel, the ledger and (at the start
and the end) one question to the scheduler. The decisions are `recovery`'s pure functions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from air_hpc.agent.channel import CoordinatorSocket, Message
from air_hpc.agent.ending import Ask, Ending, Outcome, ThreadQuestion
from air_hpc.agent.environment import JobContext
from air_hpc.agent.members import Member, problems_of
from air_hpc.agent.scheduler import Scheduler
from air_hpc.agent.workers import GenerationStart
from air_hpc.errors import EXIT_DO_NOT_RESTART, EXIT_OK, EnvironmentFailure
from air_hpc.placement.ranks import RankPlace, assign_ranks
from air_hpc.plan.frozen import FrozenRun
from air_hpc.recovery.decide import decide
from air_hpc.recovery.evidence import Classified, GenerationEnd, WorkerEnd
from air_hpc.recovery.stop import Action, StopAgreement
from air_hpc.rundir.atomic import make_dir
from air_hpc.rundir.commit import find_candidates, inheritable, mark_bad
from air_hpc.rundir.events import Kind, LedgerWriter, read_ledger
from air_hpc.rundir.fence import (
    Fenced,
    Token,
    claim_next_attempt,
    record_inherited,
    require_newest,
)
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.retention import sweep_leftovers
from air_hpc.rundir.state import End, RunStatus, fold
from air_hpc.rundir.words import FailureClass, RunState, Verdict
from air_hpc.runs.process import boot_id, start_time
from air_hpc.session.messages import RECORDED

GATHER_S = 2.0
"""After a first failed worker: how long the others' ends are awaited before they are killed."""
LEAVE_S = 300.0
"""After a first worker that left as agreed: how long the others may take. They all end together,
but a process can hang in its teardown, and would hold the nodes until the time limit."""
KILL_WAIT_S = 10.0
"""After the kill: how long ends are awaited before the nodes that send none are passed over."""


class Coordinator:
    """One attempt of a run. `outcome` is None until it is over."""

    def __init__(
        self,
        context: JobContext,
        run: RunDir,
        frozen: FrozenRun,
        socket: CoordinatorSocket,
        scheduler: Scheduler,
        *,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        ask: Ask = ThreadQuestion,
    ) -> None:
        self._context = context
        self._run = run
        self._frozen = frozen
        self._spec, self._plan = frozen.spec, frozen.plan
        self._socket = socket
        self._scheduler = scheduler
        self._say = say
        self._clock = clock
        self._wall_clock = wall_clock
        self._members: dict[str, Member] = {}
        self._left: set[str] = set()
        self._ends: dict[int, WorkerEnd] = {}
        self._places: tuple[RankPlace, ...] = ()
        self._starts: dict[str, Message] = {}
        self._resume_steps: tuple[int, ...] = ()
        self._signal: str | None = None
        self._kill_at: float | None = None
        self._killed_at: float | None = None
        self._save_deadline: float | None = None
        self._limit_at: float | None = None
        self._last_tick = clock()
        self._phase = "registering"
        self._register_deadline = clock() + self._spec.launch.start_timeout_s
        self.outcome: Outcome | None = None
        self._stop = StopAgreement.among((), self._spec.recovery.stop_timeout_s)
        self._status = fold(read_ledger(run).events)
        self._committed = self._status.committed_step
        self.token: Token | None = None
        self._ledger: LedgerWriter | None = None
        self._bad_steps: set[int] = set()
        self._open(ask)
        self.dismissed = self.outcome is not None
        """Whether this start found that there is nothing to do."""

    # -- the start ---------------------------------------------------------------------------------

    def _open(self, ask: Ask) -> None:
        if self._status.terminal:
            self._dismiss_finished(self._status)
            return
        self.token = claim_next_attempt(self._run)
        self._ledger = LedgerWriter(self._run, f"attempt-{self.token.attempt}")
        self._ending = self._make_ending(self._status.ends, ask)
        context = self._context
        self._record(
            Kind.ATTEMPT_STARTED,
            job_id=context.job_id,
            array_job_id=context.array_job_id,
            array_task_id=context.array_task_id,
            restart_count=context.restart_count,
            nodes=list(context.nodes),
            node_count=len(context.nodes),
            scheduler=context.scheduler,
            node=context.node,
            pid=os.getpid(),
            pid_start=start_time(os.getpid()),
            boot_id=boot_id(),
        )
        if self._stopped_by_silence(ask):
            return
        if self._status.cancel_requested:
            self._end_attempt(FailureClass.CANCELLED, "cancelled before this start")
            return
        end = self._scheduler.end_time()
        if end is not None:
            self._limit_at = self._clock() + (end - self._wall_clock()) - self._plan.lead_s

    def _make_ending(
        self,
        history: tuple[End, ...],
        ask: Ask,
    ) -> Ending:
        assert self.token is not None
        return Ending(
            self._context,
            self._run,
            self._frozen,
            self._scheduler,
            self.token,
            history,
            record=self._record,
            say=self._say,
            ask=ask,
        )

    def _stopped_by_silence(self, ask: Ask) -> bool:
        """Count an attempt before that ended without a word; whether it exhausts the budget."""
        ends = fold(read_ledger(self._run).events).ends
        if len(ends) == len(self._status.ends):
            return False
        silent = ends[-1]
        budget = self._spec.recovery
        decision = decide(silent.failure_class, self._committed, self._status.ends, budget)
        if decision.verdict is Verdict.STOP:
            self._end_attempt(silent.failure_class, silent.evidence)
            return True
        self._ending = self._make_ending(ends, ask)
        return False

    def _dismiss_finished(self, status: RunStatus) -> None:
        """A start that finds a terminal verdict exits at once."""
        finished = status.state is RunState.FINISHED
        self.outcome = Outcome(
            EXIT_OK if finished else EXIT_DO_NOT_RESTART,
            f"the run is {status.state} already ({status.evidence or 'no evidence recorded'}): "
            "nothing to do",
        )
        self._phase = "over"

    def _record(self, kind: str, **facts: Any) -> None:
        if self._ledger is not None:
            try:
                self._ledger.append(kind, self.token, **facts)
            except OSError as error:
                self._say(f"the ledger could not be written ({error}); lost: {kind} {facts}")

    def _register(self, node: str, message: Message, now: float) -> None:
        if self.outcome is not None:
            self._send_leave(node)
            return
        if node not in self._context.nodes:
            self._socket.send(node, {"type": "leave", "exit_code": 1, "reason": "not a member"})
            return
        if node not in self._members:
            self._members[node] = Member.from_hello(node, message, now)
        self._members[node].heard = now
        self._socket.send(node, {"type": "welcome"})
        if self._phase == "registering" and len(self._members) == len(self._context.nodes):
            self._start_generation()

    def _start_generation(self) -> None:
        assert self.token is not None
        ordered = sorted(self._members.values(), key=lambda member: member.index)
        per_node = self._plan.devices_per_node
        found = problems_of(ordered, per_node, allow_mixed=self._spec.cluster.allow_mixed_devices)
        if len(ordered) * per_node != self._plan.world_size:
            found.append(
                f"{len(ordered)} nodes × {per_node} devices are not the plan's world of "
                f"{self._plan.world_size}"
            )
        if found:
            self._end_attempt(FailureClass.ENVIRONMENT, "; ".join(found))
            return
        try:
            usable = self._fix_checkpoints(self.token)
        except Fenced as fenced:
            self._over(self._ending.fenced(str(fenced)))
            return
        if usable is None:
            return
        self._places = assign_ranks([member.node for member in ordered], per_node)
        self._resume_steps = usable
        self._phase = "running"
        self._stop = StopAgreement.among(self._members, self._spec.recovery.stop_timeout_s)
        first = self._members[self._places[0].node]
        log_dir = self._run.generation_dir(self.token.attempt, self.token.generation)
        make_dir(log_dir.parent, exist_ok=True)
        make_dir(log_dir, exist_ok=True)
        self._record(
            Kind.GENERATION_STARTED,
            world_size=self._plan.world_size,
            nodes=[member.node for member in ordered],
            devices=sorted({str(d["model"]) for member in ordered for d in member.devices}),
            resume_step=usable[0] if usable else None,
            master=f"{first.address}:{first.ports[0]}",
        )
        ranks: dict[str, list[int]] = {}
        for place in self._places:
            ranks.setdefault(place.node, []).append(place.rank)
        for node_rank, member in enumerate(ordered):
            start = GenerationStart(
                token=self.token,
                ranks=tuple(ranks[member.node]),
                world_size=self._plan.world_size,
                node_rank=node_rank,
                master_address=first.address,
                master_port=first.ports[0],
                resume_steps=usable,
                stop_timeout_s=self._spec.recovery.stop_timeout_s,
                threads=self._plan.threads_per_worker,
            )
            self._starts[member.node] = {"type": "start", "start": start.to_json()}
            self._socket.send(member.node, self._starts[member.node])

    def _fix_checkpoints(self, token: Token) -> tuple[int, ...] | None:
        """What to resume from, newest first, inherited from now on; None when the run must end."""
        require_newest(self._run, token)
        sweep_leftovers(self._run, token)
        found = find_candidates(self._run)
        for step, reason in found.rejected:
            self._condemn(step, reason)
        newest = found.usable[0].step if found.usable else -1
        unread = [reason for step, reason in found.unreadable if step > newest]
        if unread:
            # Nothing is written down yet: the next start may find it whole, and inherit it.
            self._end_attempt(FailureClass.STORAGE, f"cannot read what to resume from: {unread[0]}")
            return None
        record_inherited(self._run, token, inheritable(found.usable))
        if not found.usable and self._status.committed_step is not None:
            self._end_attempt(
                FailureClass.CHECKPOINT,
                f"a checkpoint of step {self._status.committed_step} was recorded and none can be "
                "used now: the run does not train from scratch in silence",
                unrecoverable=True,
            )
            return None
        self._committed = found.usable[0].step if found.usable else None
        return tuple(checkpoint.step for checkpoint in found.usable)

    # -- messages ----------------------------------------------------------------------------------

    def on_message(self, node: str, message: Message) -> None:
        """React to one message of a node."""
        now = self._clock()
        member = self._members.get(node)
        if member is not None:
            member.heard = now
        kind = message["type"]
        if kind == "hello":
            self._register(node, message, now)
        elif member is None and kind not in ("signal", "agent_failed", "bye"):
            return
        elif kind == "heartbeat" and member is not None:
            member.done_step = message.get("done_step", member.done_step)
            member.phases = tuple(message.get("phases", ()))
            self._on_ended(node, message.get("ended", []), now)
            self._socket.send(node, {"type": "ack", "sequence": message["sequence"]})
            if self.outcome is not None:
                self._send_leave(node)
            else:
                self._remind(node, started=message.get("started", True))
        elif kind == "worker":
            self._on_worker(message["message"])
        elif kind == "begun":
            self._act(self._stop.report(node, message["step"]))
        elif kind == "ended":
            self._on_ended(node, message["workers"], now)
        elif kind == "signal":
            self.on_signal(message["name"], node)
        elif kind == "bye":
            self._left.add(node)
        elif kind == "agent_failed":
            self._kill_workers()
            self._end_attempt(
                FailureClass.UNKNOWN, f"the agent on {node} failed: {message['reason']}"
            )
        elif kind == "start_failed":
            self._kill_workers()
            self._end_attempt(
                FailureClass.ENVIRONMENT, f"{node} could not start workers: {message['reason']}"
            )

    def _on_worker(self, message: dict[str, Any]) -> None:
        kind = RECORDED.get(message["kind"])
        if kind is None:
            return
        facts = {key: value for key, value in message.items() if key not in ("kind", "rank")}
        if kind is Kind.CHECKPOINT_BAD:
            self._condemn(int(facts["step"]), str(facts.get("reason", "")))
            return
        if kind is Kind.RESUMED:
            facts["lost_steps"] = max(0, (self._status.step or 0) - int(facts["step"]))
        self._record(kind, **facts)
        if kind is Kind.CHECKPOINT_COMMITTED:
            self._committed = max(int(facts["step"]), self._committed or 0)

    def _on_ended(self, node: str, workers: list[dict[str, Any]], now: float) -> None:
        new = [facts for facts in workers if facts["rank"] not in self._ends]
        if not new:  # every heartbeat repeats them
            return
        for facts in new:
            killed = self._killed_at is not None
            end = WorkerEnd.from_report(facts, node, now, killed_by_agent=killed)
            self._ends[end.rank] = end
            kill_at = now + (GATHER_S if end.failed else LEAVE_S)
            self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        self._check_over()

    # -- stops -------------------------------------------------------------------------------------

    def on_signal(self, name: str, node: str) -> None:
        """A signal reached an agent, or our own timer rang: agree on a step, save it, leave."""
        if self.outcome is not None or self._signal is not None or self._ending.started:
            return
        self._signal = name
        self._record(Kind.SIGNAL, name=name, node=node)
        if self._phase == "registering":
            self._phase = "ending"
            self._ending.start_signalled(name, self._committed)
            self._poll_ending()
            return
        self._act(self._stop.request(name, self._clock()))

    def _act(self, action: Action | None) -> None:
        if action is Action.SET_FLAG:
            self._broadcast({"type": "stop"})
        elif action is Action.SET_TARGET:
            self._save_deadline = self._clock() + self._spec.recovery.stop_timeout_s
            self._record(Kind.STOP_AGREED, target_step=self._stop.target, reason=self._stop.reason)
            self._say(f"stop agreed: all run to step {self._stop.target}, save it and leave")
            self._broadcast({"type": "target", "step": self._stop.target})
        elif action is Action.GIVE_UP:
            self._say(f"no stop agreed: {', '.join(self._stop.missing)} did not report")
            self._kill_workers()

    # -- time --------------------------------------------------------------------------------------

    def tick(self) -> None:
        """React to time. A stall of our own is not held against the others."""
        now = self._clock()
        stalled = max(0.0, now - self._last_tick - 1.0)
        self._last_tick = now
        if self.outcome is not None:
            return
        if stalled:
            for member in self._members.values():
                member.heard += stalled
        self._poll_ending()
        if self._phase == "registering":
            self._tick_registering(now)
        elif self._phase == "running":
            self._tick_running(now)

    def _tick_running(self, now: float) -> None:
        if self._limit_at is not None and now >= self._limit_at:
            self._limit_at = None
            self.on_signal("timer", self._context.node)
        self._act(self._stop.tick(now))
        self._find_lost(now)
        if self._kill_at is not None and now >= self._kill_at and self._killed_at is None:
            self._kill_workers()
        if self._save_deadline is not None and now >= self._save_deadline:
            self._save_deadline = None
            self._say("the agreed step was not saved before the deadline")
            self._kill_workers()
        if self._killed_at is not None and now >= self._killed_at + KILL_WAIT_S:
            self._give_up_silent_nodes()
            self._finish_generation()

    def _tick_registering(self, now: float) -> None:
        if now < self._register_deadline:
            return
        missing = [node for node in self._context.nodes if node not in self._members]
        per_node = self._plan.devices_per_node
        ranks = [
            f"{node} (ranks {index * per_node}-{(index + 1) * per_node - 1})"
            for index, node in enumerate(self._context.nodes)
            if node in missing
        ]
        self._end_attempt(
            FailureClass.NOT_ARRIVED,
            f"did not arrive within launch.start_timeout_s="
            f"{self._spec.launch.start_timeout_s:g}: {', '.join(ranks)}",
        )

    def _find_lost(self, now: float) -> None:
        timeout_s = self._spec.recovery.heartbeat_timeout_s
        for member in self._members.values():
            if not member.lost and now - member.heard > timeout_s:
                member.lost = True
                self._say(f"node {member.node} was not heard for {now - member.heard:.1f} s")
                self._kill_workers()
                self._check_over()

    def _kill_workers(self) -> None:
        if self._killed_at is None:
            self._killed_at = self._clock()
            self._broadcast({"type": "kill"})

    # -- the end -----------------------------------------------------------------------------------

    def _give_up_silent_nodes(self) -> None:
        """A node that did not report the end of its killed workers is lost, heard or not."""
        for place in self._places:
            if place.rank not in self._ends:
                self._members[place.node].lost = True

    def _check_over(self) -> None:
        lost = sum(member.lost for member in self._members.values())
        if self._phase != "running" or len(self._ends) < len(self._places) - (
            lost * self._plan.devices_per_node
        ):
            return  # with a thousand nodes the look below is not for every message
        awaited = {place.rank for place in self._places if not self._members[place.node].lost}
        if awaited <= self._ends.keys():
            self._finish_generation()

    def _finish_generation(self) -> None:
        if self._phase != "running":
            return
        self._phase = "ending"
        end = GenerationEnd(
            workers=tuple(self._ends.values()),
            silent={m.node: m.done_step for m in self._members.values() if m.lost},
            signal_name=self._signal,
            target=self._stop.target,
            committed=self._committed,
        )
        self._ending.start(end, self._committed, self._blame_checkpoint)
        self._poll_ending()

    def _blame_checkpoint(self, found: Classified) -> Classified:
        """A crash while loading makes the checkpoint suspect: the next start takes an older one."""
        failure = found.failure
        if failure is None or failure.failure_class is not found.failure_class:
            return found
        blamable = failure.failure_class in (FailureClass.UNKNOWN, FailureClass.CHECKPOINT)
        loading = [step for step in self._resume_steps if step not in self._bad_steps]
        if failure.phase != "load" or not loading or not blamable:
            return found
        reason = f"its load crashed: {failure.evidence}"
        self._condemn(loading[0], reason)
        evidence = f"step-{loading[0]}: {reason}"
        return Classified(FailureClass.CHECKPOINT, evidence, failure)

    def _condemn(self, step: int, reason: str) -> None:
        """Never resume from this checkpoint again."""
        self._bad_steps.add(step)
        mark_bad(self._run, step, reason, token=self.token)
        self._record(Kind.CHECKPOINT_BAD, step=step, reason=reason)

    def fail(self, error: Exception) -> None:
        """End the attempt for an error of the coordinator's own process."""
        if isinstance(error, EnvironmentFailure):
            failure_class = FailureClass.ENVIRONMENT
        elif isinstance(error, OSError):
            failure_class = FailureClass.STORAGE
        else:
            failure_class = FailureClass.UNKNOWN
        self._kill_workers()
        self._end_attempt(
            failure_class,
            f"the agent on {self._context.node} failed: {type(error).__name__}: {error}",
        )

    def _end_attempt(
        self, failure_class: FailureClass, evidence: str, *, unrecoverable: bool = False
    ) -> None:
        if self.outcome is not None:
            return
        self._phase = "ending"
        self._ending.start_known(
            failure_class, evidence, self._committed, unrecoverable=unrecoverable
        )
        self._poll_ending()

    def _poll_ending(self) -> None:
        if self.outcome is None and (outcome := self._ending.poll()) is not None:
            self._over(outcome)

    def _over(self, outcome: Outcome) -> None:
        self._phase = "over"
        self.outcome = outcome
        for node in self._context.nodes:
            self._send_leave(node)

    def _send_leave(self, node: str) -> None:
        assert self.outcome is not None
        self._socket.send(
            node,
            {
                "type": "leave",
                "exit_code": self.outcome.exit_code,
                "reason": self.outcome.reason,
            },
        )

    @property
    def everyone_left(self) -> bool:
        """Whether every node that is not lost has said that it leaves."""
        lost = {member.node for member in self._members.values() if member.lost}
        return self._left | lost >= set(self._context.nodes)

    def _remind(self, node: str, *, started: bool) -> None:
        """Repeat what a node may not have heard: a broken connection loses what was on its way.

        Each of these words may come any number of times.
        """
        if self._killed_at is not None:
            self._socket.send(node, {"type": "kill"})
        elif not started and node in self._starts:
            self._socket.send(node, self._starts[node])
        elif self._stop.target is not None:
            self._socket.send(node, {"type": "target", "step": self._stop.target})
        elif self._stop.requested and node in self._stop.missing:
            self._socket.send(node, {"type": "stop"})

    def _broadcast(self, message: Message) -> None:
        for member in self._members.values():
            if not member.lost:
                self._socket.send(member.node, message)

    def close(self) -> None:
        """Close the ledger."""
        if self._ledger is not None:
            self._ledger.close()
