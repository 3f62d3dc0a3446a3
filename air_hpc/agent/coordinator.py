"""The first node's extra part: agrees the members, owns the token, decides, writes the ledger.

It turns messages, signals and time into events of the restart machine (`recovery.restart`), and the
machine's actions into messages, claims and ledger events. An attempt goes on generation after
generation while the machine and the budget allow; its end is `ending`'s.

Everything a message says of a generation carries that generation's token: what a node still has to
say of an older one is not taken for the present one's.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from air_hpc.agent import generation as generations
from air_hpc.agent.avoiding import Avoiding
from air_hpc.agent.channel import CoordinatorSocket, Message
from air_hpc.agent.ending import Ask, Ending, Outcome, ThreadQuestion
from air_hpc.agent.environment import JobContext
from air_hpc.agent.generation import CannotStart, Generation
from air_hpc.agent.keeper import EXIT_STAND_BY
from air_hpc.agent.limit import LIMIT_SIGNAL, LimitTimer
from air_hpc.agent.liveness import Prober
from air_hpc.agent.members import Member
from air_hpc.agent.opening import (
    STORAGE_PATIENCE_S,
    STORAGE_RETRY_S,
    attempt_facts,
    claim_attempt,
)
from air_hpc.agent.record import BackgroundRecord, Record
from air_hpc.agent.roster import Roster
from air_hpc.agent.scheduler import Scheduler
from air_hpc.errors import EXIT_DO_NOT_RESTART, EXIT_OK, EnvironmentFailure
from air_hpc.plan.frozen import FrozenRun
from air_hpc.plan.resize import plan_for, sizes
from air_hpc.recovery import restart
from air_hpc.recovery.decide import Decision, decide
from air_hpc.recovery.evidence import (
    Classified,
    Failure,
    GenerationEnd,
    WorkerEnd,
    first_failure,
)
from air_hpc.recovery.restart import Phase, RestartMachine, RestartPolicy
from air_hpc.recovery.rules import RuleTable, rule_action
from air_hpc.recovery.stragglers import Change
from air_hpc.rundir.atomic import make_dir
from air_hpc.rundir.commit import mark_bad
from air_hpc.rundir.events import Kind, read_ledger
from air_hpc.rundir.fence import Fenced, Token, claim
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.state import RunStatus, fold
from air_hpc.rundir.words import FailureClass, RunState, Verdict
from air_hpc.session.messages import RECORDED

STALL_S = 1.0
"""Ticks further apart than this are a stall of this process."""


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
        prober: Prober | None = None,
        record: Callable[..., Record] = BackgroundRecord,
    ) -> None:
        self._context = context
        self._run = run
        self._frozen = frozen
        self._rules = RuleTable.of(frozen.spec.recovery.rules)
        self._spec, self._plan = frozen.spec, frozen.plan
        self._socket = socket
        self._scheduler = scheduler
        self._say = say
        self._clock = clock
        self._wall_clock = wall_clock
        self._machine = RestartMachine(context.nodes, self._policy(), clock())
        self._roster = Roster(
            context, frozen, record=self._record, say=say, clock=clock, prober=prober
        )
        self._live: Generation | None = None
        self._signal: str | None = None
        self._limit = LimitTimer(self._spec, self._plan, ask)
        self._going_on: Decision | None = None
        self._refused_since: float | None = None
        """Since when a generation cannot be started for the file system's sake."""
        self._last_tick = clock()
        self.outcome: Outcome | None = None
        self._past = read_ledger(run).events
        self._status = fold(self._past)
        self._committed = self._status.committed_step
        self.token: Token | None = None
        self._ledger: Record | None = None
        self._open(ask, record)
        self.dismissed = self.outcome is not None
        """Whether this start found that there is nothing to do."""

    def _policy(self) -> RestartPolicy:
        recovery = self._spec.recovery
        return RestartPolicy(
            sizes=sizes(self._spec, self._plan) or (self._plan.nodes,),
            restarts_inside=recovery.restart != "requeue",
            start_timeout_s=self._spec.launch.start_timeout_s,
            stop_timeout_s=recovery.stop_timeout_s,
        )

    # -- the start of the attempt ------------------------------------------------------------------

    def _open(self, ask: Ask, record: Callable[..., Record]) -> None:
        if self._status.terminal:
            self._dismiss_finished(self._status)
            return
        self.token = claim_attempt(self._run, self._say)
        self._ledger = record(self._run, f"attempt-{self.token.attempt}", say=self._say)
        context = self._context
        self._record(Kind.ATTEMPT_STARTED, **attempt_facts(context))
        self._avoiding = Avoiding(
            self._run, self._frozen, record=self._record, say=self._say, wall_clock=self._wall_clock
        )
        # Folded again: an attempt before may have ended without a word, and counts all the same.
        history = self._folded().ends
        self._ending = Ending(
            context,
            self._run,
            self._frozen,
            self._scheduler,
            self.token,
            history,
            self._avoiding,
            record=self._record,
            say=self._say,
            ask=ask,
        )
        if self._status.cancel_requested:
            self._end_attempt(FailureClass.CANCELLED, "cancelled before this start")
            return
        if history:
            # Who wrote the last end could not always ask the budget: a survivor, or nobody.
            last = history[-1]
            decision = decide(
                last.failure_class,
                last.committed_step,
                history[:-1],
                self._spec.recovery,
                action=rule_action(last.action),
            )
            if decision.verdict is Verdict.STOP:
                self._ending.forget_last()
                self._end_attempt(last.failure_class, last.evidence)
                return
        self._limit.set(self._scheduler.end_time(), self._clock(), self._wall_clock())

    def _dismiss_finished(self, status: RunStatus) -> None:
        """A start that finds a terminal verdict exits at once."""
        finished = status.state is RunState.FINISHED
        self.outcome = Outcome(
            EXIT_OK if finished else EXIT_DO_NOT_RESTART,
            f"the run is {status.state} already ({status.evidence or 'no evidence recorded'}): "
            "nothing to do",
        )

    def _record(self, kind: str, **facts: Any) -> None:
        if self._ledger is not None:
            self._ledger.append(kind, self.token, **facts)
            if kind == Kind.ATTEMPT_ENDED:
                self._ledger.flush()  # before its intent, which others carry out

    def _folded(self) -> RunStatus:
        """The run's status now, without a look at the disk: what others write changes nothing."""
        return fold([*self._past, *(() if self._ledger is None else self._ledger.noted)])

    # -- the machine's actions ---------------------------------------------------------------------

    def _do(self, actions: Sequence[restart.Action]) -> None:
        for action in actions:
            match action:
                case restart.Start(number, nodes):
                    self._start_generation(number, nodes)
                case restart.SetFlag():
                    self._tell("stop")
                case restart.SetTarget(step):
                    self._record(Kind.STOP_AGREED, target_step=step, reason=self._signal)
                    self._say(f"stop agreed: all run to step {step}, save it and leave")
                    self._tell("target", step=step)
                case restart.Kill(why):
                    self._say(f"ending the workers: {why}")
                    self._tell("kill")
                case restart.GiveUp(nodes):
                    for node in nodes:
                        self._roster.note_lost(node, "sent no end of its killed workers")
                case restart.Decide():
                    self._end_generation()
                case restart.StoppedIdle():
                    self._ending.start_signalled(self._signal or "", self._committed)
                    self._poll_ending()
                case restart.TooFew(missing, arrived):
                    self._end_as_too_few(missing, arrived)

    def _tell(self, kind: str, **facts: Any) -> None:
        """Tell every node of the live generation that is not lost."""
        for node in self._machine.active:
            if node not in self._machine.lost:
                self._tell_one(node, kind, **facts)

    def _tell_one(self, node: str, kind: str, **facts: Any) -> None:
        if self._live is not None:
            token = str(self._live.token)
            self._socket.send(node, {"type": kind, "token": token, **facts})

    # -- a generation ------------------------------------------------------------------------------

    def _start_generation(self, number: int, nodes: Sequence[str]) -> None:
        assert self.token is not None
        if self._rejects_unfit(nodes):
            self._do(self._machine.withdraw(self._clock()))
            return
        members = [self._roster[node] for node in nodes]
        plan = plan_for(self._spec, self._plan, len(nodes))
        assert plan is not None, "the machine knows no other sizes"
        found: CannotStart | tuple[int, ...] | None
        try:
            self._own(Token(self.token.attempt, number))
            found = generations.misfits(members, plan, self._spec)
            if found is None:
                found = generations.fix_checkpoints(
                    self._run, self.token, self._status, self._condemn
                )
            if not isinstance(found, CannotStart):
                log_dir = self._run.generation_dir(self.token.attempt, self.token.generation)
                make_dir(log_dir.parent, exist_ok=True)
                make_dir(log_dir, exist_ok=True)
        except Fenced as fenced:
            self._over(self._ending.fenced(str(fenced)))
            return
        except OSError as error:
            self._start_later(error)
            return
        self._refused_since = None
        if isinstance(found, CannotStart):
            self._end_attempt(
                found.failure_class, found.evidence, unrecoverable=found.unrecoverable
            )
            return
        self._committed = found[0] if found else None
        live = generations.lay_out(
            self.token,
            members,
            plan,
            self._spec,
            found,
            skipped_batches=self._status.skipped_batches,
            preflight=self._roster.fitness.ranks_due,
        )
        self._roster.fitness.ranks_due = False
        self._record(
            Kind.GENERATION_STARTED,
            world_size=plan.world_size,
            nodes=list(nodes),
            devices=sorted({str(d["model"]) for member in members for d in member.devices}),
            resume_step=found[0] if found else None,
            master=live.master,
        )
        self._live = live
        for node, message in live.starts.items():
            self._socket.send(node, message)

    def _own(self, token: Token) -> None:
        """Claim a generation's token, once. Raises Fenced; OSError where nothing can be made."""
        if token == self.token:
            return
        try:
            claim(self._run, token)
        except OSError:
            # Nobody else claims generations of this attempt: what is there, this start has made.
            if not (self._run.tokens_dir / str(token)).is_dir():
                raise
        self.token = token
        self._ending.token = token

    def _start_later(self, error: OSError) -> None:
        """The file system refuses what a start needs: try again, with the nodes there are then."""
        now = self._clock()
        if self._refused_since is None:
            self._refused_since = now
            self._say(f"the generation could not be started ({error}); trying again")
        if now > self._refused_since + STORAGE_PATIENCE_S:
            self.fail(error)
        else:
            self._do(self._machine.withdraw(now, STORAGE_RETRY_S))

    def _rejects_unfit(self, nodes: Sequence[str]) -> bool:
        """Whether any of these nodes must not train, by what all of them said of themselves."""
        unfit = self._roster.unfit(nodes)
        for node, reason in unfit.items():
            self._machine.reject(node, self._clock())
            self._avoid(node, FailureClass.DEVICE, f"pre-flight: {reason}")
        return bool(unfit)

    def _end_generation(self) -> None:
        """All its workers have ended, or their nodes were given up: class and verdict."""
        live = self._live
        assert live is not None
        lost = self._machine.lost
        end = GenerationEnd(
            workers=tuple(live.ends.values()),
            silent={m.node: m.done_step for m in live.members if m.node in lost},
            signal_name=self._signal,
            target=self._machine.target,
            committed=self._committed,
            never_started=live.never_started(lost),
        )
        failure = first_failure(end.workers, self._rules)
        if failure is not None and self._signal is None:
            self._hold_against_node(failure, live)

        def blame(found: Classified) -> Classified:
            if live.hung is not None and self._signal is None:
                return Classified(FailureClass.HANG, live.hung.evidence, node=live.hung.node)
            if found.failure is None or not found.by_failure:
                return found
            return self._blame_checkpoint(live, found, found.failure)

        self._ending.start(
            end,
            self._committed,
            blame,
            can_continue=lambda: self._machine.can_continue,
            unrecoverable=failure is not None and self._steps_over_data(failure, live),
        )
        self._poll_ending()

    def _steps_over_data(self, failure: Failure, live: Generation) -> bool:
        """A loss that diverged: note the batches to step over; whether the guard has given up."""
        if failure.failure_class is not FailureClass.DIVERGED:
            return False
        words = live.ends[failure.rank].last_words or {}
        facts = words.get("facts") or {}
        if facts.get("action") != "rollback":
            return True
        self._record(
            Kind.DATA_SKIPPED,
            first_batch=facts.get("first_batch"),
            last_batch=facts.get("last_batch"),
            from_step=facts.get("from_step"),
            reason=facts.get("reason"),
        )
        return False

    def _hold_against_node(self, failure: Failure, live: Generation) -> None:
        """A device that failed: its node is checked anew, and left out when it fails once more, or
        at once where a rule says so."""
        excludes = failure.action == "exclude"
        if failure.failure_class is not FailureClass.DEVICE and not excludes:
            return
        node = live.ends[failure.rank].node
        self._roster.fitness.ask_again(self._clock())
        if self._roster.fitness.failed_before(node) or excludes:
            self._avoid(node, failure.failure_class, failure.evidence)
            self._machine.reject(node, self._clock())

    def _avoid(self, node: str, failure_class: FailureClass, reason: str) -> None:
        """Keep later starts, of all the user's runs, off a node."""
        if self._avoiding.exclude(node, failure_class, reason):
            self._ending.avoids_nodes = True

    def _blame_checkpoint(
        self, live: Generation, found: Classified, failure: Failure
    ) -> Classified:
        """A crash while loading makes the checkpoint suspect: the next start takes an older one.

        Not where the worker was killed: no checkpoint sends a SIGKILL.
        """
        blamable = failure.failure_class in (FailureClass.UNKNOWN, FailureClass.CHECKPOINT)
        loading = [step for step in live.resume_steps if step not in live.bad_steps]
        killed = live.ends[failure.rank].exit_status == -signal.SIGKILL
        if failure.phase != "load" or not loading or not blamable or killed:
            return found
        reason = f"its load crashed: {failure.evidence}"
        self._condemn(loading[0], reason)
        return Classified(FailureClass.CHECKPOINT, f"step-{loading[0]}: {reason}", failure)

    def _condemn(self, step: int, reason: str) -> None:
        """Never resume from this checkpoint again."""
        if self._live is not None:
            self._live.bad_steps.add(step)
        mark_bad(self._run, step, reason, token=self.token)
        self._record(Kind.CHECKPOINT_BAD, step=step, reason=reason)

    # -- messages ----------------------------------------------------------------------------------

    def on_message(self, node: str, message: Message) -> None:
        """React to one message of a node."""
        now = self._clock()
        kind = message["type"]
        if kind == "ping":  # of a node that stands by: no sign of life of its agent
            self._socket.send(node, {"type": "pong", "over": self.outcome is not None})
            return
        if self.outcome is not None or node in self._machine.lost:
            self._on_late(node, message)
            return
        member = self._roster.heard(node, now)
        if kind == "hello":
            self._register(node, message, now)
        elif kind == "signal":
            self.on_signal(message["name"], node)
        elif kind == "agent_failed":
            self._lose(node, f"its agent failed: {message['reason']}")
        elif kind == "disowned":
            self._on_disowned(node)
        elif kind == "bye":
            self._roster.said_bye(node)
        elif member is None:
            return
        elif kind == "heartbeat":
            self._on_heartbeat(member, message, now)
        elif kind == "preflight":
            self._roster.fitness.told_again(node, message)
        elif self._live is None or message.get("token") != str(self._live.token):
            return
        elif kind == "worker":
            self._on_worker(message["message"])
        elif kind == "begun":
            self._do(self._machine.begun(node, message["step"], now))
        elif kind == "ended":
            self._on_ended(node, message["workers"], now)
        elif kind == "inspected":
            self._live.hang.inspected(node, message["reports"])
        elif kind == "rank_checks":
            self._record(Kind.PREFLIGHT, node=node, seconds=None, checks=message["checks"])
        elif kind == "none_here":
            self._do(self._machine.ended(node, now, failed=True, all_ended=True))
        elif kind == "start_failed":
            self._machine.condemn("workers could not be started", now)
            self._tell("kill")
            self._end_attempt(
                FailureClass(message["failure_class"]),
                f"{node} could not start workers: {message['reason']}",
            )

    def _on_late(self, node: str, message: Message) -> None:
        """What is said after the end, and by a node that was given up: both are to leave."""
        kind = message["type"]
        if kind == "bye":
            self._roster.said_bye(node)
        elif self.outcome is not None:
            if kind == "heartbeat":
                self._acknowledge(node, message)
            if kind in ("heartbeat", "hello"):
                self._send_leave(node)
        elif kind in ("heartbeat", "hello"):
            reason = "this node was given up; what runs goes on without it"
            # It leaves its agent's part, and stands by.
            leave = {"type": "leave", "exit_code": EXIT_STAND_BY, "reason": reason}
            self._socket.send(node, {**leave, "over": False})

    def _register(self, node: str, message: Message, now: float) -> None:
        if node not in self._context.nodes:
            self._socket.send(node, {"type": "leave", "exit_code": 1, "reason": "not a member"})
            return
        self._roster.welcome(node, message, now)
        self._socket.send(node, {"type": "welcome"})

    def _acknowledge(self, node: str, message: Message) -> None:
        self._socket.send(node, {"type": "ack", "sequence": message["sequence"]})

    def _on_heartbeat(self, member: Member, message: Message, now: float) -> None:
        self._acknowledge(member.node, message)
        if now - self._last_tick <= STALL_S:  # else it may have waited here
            self._roster.fitness.beat(member.node, message.get("wall_time"), self._wall_clock())
        if not member.arrived:
            # Not by its hello, which may be long ago: it has not been heard yet by this process.
            member.arrived = True
            self._do(self._machine.arrive(member.node, now))
            return
        live = self._live
        if live is None or member.node not in live.starts or self._machine.phase is Phase.OVER:
            return
        token = message.get("token")
        if token != str(live.token):
            self._remind_start(member.node)
            return
        member.done_step = message.get("done_step", member.done_step)
        member.phases = tuple(message.get("phases", ()))
        for rank, (compute_ns, steps) in message.get("compute", {}).items():
            live.stragglers.sample(int(rank), compute_ns, steps, now)
        asks = not self._machine.killed and live.hang.late(message.get("overdue", ()), now)
        if asks:
            self._say(f"overdue: {live.hang.overdue}; asking all nodes what their workers do")
            self._tell("inspect")
        self._on_ended(member.node, message.get("ended", []), now)
        if self.outcome is not None:
            self._send_leave(member.node)
        elif self._machine.phase is Phase.RUNNING:
            self._remind(member.node)

    def _remind_start(self, node: str) -> None:
        """A broken connection loses what was on its way: the node has not heard of its start."""
        if self._machine.phase is not Phase.RUNNING or self._live is None:
            return
        if self._machine.killed:
            self._tell_one(node, "kill")
        else:
            self._socket.send(node, self._live.starts[node])

    def _remind(self, node: str) -> None:
        """Repeat what a node may not have heard. Each of these words may come many times."""
        machine = self._machine
        if machine.killed:
            self._tell_one(node, "kill")
        elif machine.target is not None:
            self._tell_one(node, "target", step=machine.target)
        elif node in machine.flag_missing:
            self._tell_one(node, "stop")

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
            self._limit.saved_in(facts.get("duration_s"))
            self._committed = max(int(facts["step"]), self._committed or 0)

    def _on_ended(self, node: str, workers: Sequence[dict[str, Any]], now: float) -> None:
        live = self._live
        assert live is not None
        new = [facts for facts in workers if facts["rank"] not in live.ends]
        if not new:  # every heartbeat repeats them
            return
        ends = [
            WorkerEnd.from_report(facts, node, now, killed_by_agent=self._machine.killed)
            for facts in new
        ]
        live.ends.update((end.rank, end) for end in ends)
        failed = any(end.failed for end in ends)
        if failed:
            self._roster.suspect_all(now)
        all_ended = live.node_ended(node)
        is_cause = any(end.is_cause for end in ends) and not self._machine.killed
        self._do(
            self._machine.ended(node, now, failed=failed, all_ended=all_ended, is_cause=is_cause)
        )

    # -- nodes -------------------------------------------------------------------------------------

    def _lose(self, node: str, why: str) -> None:
        if node in self._machine.lost or node not in self._context.nodes:
            return
        if node == self._context.node:
            self.fail(RuntimeError(why))
            return
        self._roster.note_lost(node, why)
        self._do(self._machine.lose(node, self._clock()))

    def _on_disowned(self, node: str) -> None:
        """Slurm will give this node up: nothing may go on there, though everything still works."""
        why = "Slurm has lost it: the slurmstepd of its agent is gone"
        if node != self._context.node:
            self._lose(node, why)
        elif not self._ending.final:
            self._roster.note_lost(node, why)
            self._tell("kill")
            self._end_attempt(FailureClass.NODE_LOST, f"{node}: {why}")

    def _look_at_nodes(self, now: float) -> None:
        for lost in self._roster.tick(now):
            why = f"silent for {lost.silent_s:.1f} s: {lost.why}"
            self._lose(lost.node, why)
            # Where most are gone it is this node that is cut off.
            few = 2 * len(self._machine.lost) <= len(self._context.nodes)
            if lost.machine_is_gone and few and lost.node != self._context.node:
                self._avoid(lost.node, FailureClass.NODE_LOST, why)

    def _look_at_workers(self, live: Generation, now: float) -> None:
        """Hangs and stragglers of the live generation."""
        for slow in live.stragglers.tick(now):
            devices = self._roster[slow.node].devices
            self._record(
                Kind.STRAGGLER,
                rank=slow.rank,
                node=slow.node,
                device=live.device_of(slow.rank, devices),
                ratio=round(slow.ratio, 4),
                window_s=round(slow.window_s, 1),
                change=slow.change,
            )
            told = f"rank {slow.rank} computes {slow.ratio:.2f} times as long as the median"
            self._say(f"{told}, on {slow.node} ({slow.change})")
            if self._spec.recovery.straggler.exclude and slow.change is Change.FOUND:
                self._avoiding.exclude(slow.node, FailureClass.DEVICE, f"straggler: {told}")
        found = live.hang.tick(now)
        if found is None or self._machine.killed:
            return
        live.hung = found
        late = live.hang.overdue or {}
        folder = self._run.generation_dir(live.token.attempt, live.token.generation)
        self._record(
            Kind.HANG_FOUND,
            rank=found.rank,
            node=found.node,
            phase=late.get("phase"),
            for_s=late.get("for_s"),
            limit_s=late.get("limit_s"),
            evidence=found.evidence,
            stacks=str(folder.relative_to(self._run.path) / "stacks-*.txt"),
        )
        self._do(self._machine.condemn(f"hang: {found.evidence}", now))

    # -- stops and time ----------------------------------------------------------------------------

    def on_signal(self, name: str, node: str) -> None:
        """A signal reached an agent: agree on a step, save it, leave.

        The one ahead of the time limit may come long before the last save has to begin.
        """
        if name == LIMIT_SIGNAL and self._limit.asks_again(self._scheduler.end_time, self._clock()):
            return
        self._request_stop(name, node)

    def _request_stop(self, name: str, node: str) -> None:
        if self.outcome is not None or self._signal is not None or self._ending.final:
            return
        self._signal = name
        self._record(Kind.SIGNAL, name=name, node=node)
        self._do(self._machine.request_stop(name, self._clock()))

    def tick(self) -> None:
        """React to time. A stall of our own is not held against the others."""
        now = self._clock()
        stalled = max(0.0, now - self._last_tick - STALL_S)
        self._last_tick = now
        if self.outcome is not None:
            return
        if stalled:
            self._roster.forgive(stalled, now)
        if self._ledger is not None:
            self._ledger.tick()
        self._poll_ending()
        if self.outcome is not None:
            return
        rings = self._limit.rings(now, self._wall_clock())
        if rings is not None:
            self._request_stop(rings, self._context.node)
        self._look_at_nodes(now)
        if self._live is not None and self._machine.phase is Phase.RUNNING:
            self._look_at_workers(self._live, now)
        self._try_to_go_on(now)
        self._do(self._machine.tick(now))

    # -- the end -----------------------------------------------------------------------------------

    def _end_as_too_few(self, missing: Sequence[str], arrived: int) -> None:
        if not self._machine.unfit.isdisjoint(missing):
            failure_class = FailureClass.DEVICE
        elif self._machine.generation:
            failure_class = FailureClass.NODE_LOST
        else:
            failure_class = FailureClass.NOT_ARRIVED
        evidence = self._roster.why_missing(missing)
        if self._machine.generation:
            evidence = f"too few nodes to go on, {arrived} left: {evidence}"
        self._end_attempt(failure_class, evidence)

    def fail(self, error: Exception) -> None:
        """End the attempt for an error of the coordinator's own process."""
        if isinstance(error, EnvironmentFailure):
            failure_class = FailureClass.ENVIRONMENT
        elif isinstance(error, OSError):
            failure_class = FailureClass.STORAGE
        else:
            failure_class = FailureClass.UNKNOWN
        self._tell("kill")
        self._end_attempt(
            failure_class,
            f"the agent on {self._context.node} failed: {type(error).__name__}: {error}",
        )

    def _end_attempt(
        self, failure_class: FailureClass, evidence: str, *, unrecoverable: bool = False
    ) -> None:
        if self.outcome is not None:
            return
        self._ending.start_known(
            failure_class, evidence, self._committed, unrecoverable=unrecoverable
        )
        self._poll_ending()

    def _poll_ending(self) -> None:
        if self.outcome is not None:
            return
        came = self._ending.poll()
        if isinstance(came, Outcome):
            self._over(came)
        elif came is not None:
            self._go_on(came)

    def _go_on(self, decision: Decision) -> None:
        """The next generation inside this attempt."""
        self._status = self._folded()
        now = self._clock()
        self._going_on = decision
        self._try_to_go_on(now)

    def _try_to_go_on(self, now: float) -> None:
        """Start the pause before the next generation, once nodes that are checked anew are done."""
        if self._going_on is None:
            return
        for node in self._roster.fitness.to_ask(self._machine.fit, now):
            request = str(self.token)
            self._socket.send(node, {"type": "preflight", "request": request})
        if self._roster.fitness.awaits(self._machine.fit, now) and self._signal is None:
            return
        decision, self._going_on = self._going_on, None
        self._do(self._machine.decided(go_on=True, delay_s=decision.delay_s, now=now))

    def _over(self, outcome: Outcome) -> None:
        self._machine.decided(go_on=False, delay_s=0.0, now=self._clock())
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
                "over": True,
            },
        )

    @property
    def everyone_left(self) -> bool:
        """Whether every node that is not lost has said that it leaves."""
        return self._roster.all_left_but(self._machine.lost)

    def fileno(self) -> int:
        """Ready when a probe of a node has ended."""
        return self._roster.fileno()

    def close(self) -> None:
        """Close the ledger and the probes."""
        self._roster.close()
        if self._ledger is not None:
            self._ledger.close()
