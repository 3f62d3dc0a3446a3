"""A run on failing nodes, simulated: how much of its time would be kept training.

Promises: a discrete-event model of one run in which nothing but the platform's own decisions moves
it. Nodes fail and are repaired, saves and restarts take their time; whatever follows from that is
asked of the `RestartMachine` and of `decide`, which run real allocations. The model has no rule of
its own about when a generation starts, ends or goes on, so a change of those rules changes what is
simulated. Equal seeds give equal outcomes.

How it works: events wait in a heap, and the machine is ticked when its `next_deadline` comes.
Between two of them a generation trains and saves in turns, which is arithmetic (`_Segment`): 2,000
nodes for a month take a second or two. Failures have no memory: every node that the run holds fails
at one rate, the spares too. A failure takes the whole node (silent until the detection) or a
worker of it (`node_loss_share`).

    interval_s training | save_s | interval_s training | save_s | ... failure: the work since the
    last whole save is lost; detection_s, the machine's own waits, end_s, restart_s; or a requeue:
    detection_s, end_s, requeue_floor_s, the wait in the queue, restart_s

What may go wrong: it is as good as its inputs. Steps have no length (a stop at the time limit costs
a save only), a load never fails, and failures do not come in bursts, which those of a real cluster
do. ETTR here is the share of the run's whole time, the queue included, in which training was done
and kept; a generation of fewer nodes counts by its share of the full size.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from air_hpc.config.spec import RecoverySpec
from air_hpc.recovery.decide import decide
from air_hpc.recovery.reliability import DAY_S
from air_hpc.recovery.restart import (
    Action,
    Decide,
    Kill,
    Phase,
    RestartMachine,
    RestartPolicy,
    SetFlag,
    SetTarget,
    Start,
    StoppedIdle,
    TooFew,
)
from air_hpc.rundir.state import End
from air_hpc.rundir.words import FailureClass, Verdict

NEVER = 10**9
"""A budget that no simulated run spends."""


def endless(recovery: RecoverySpec | None = None, **changes: object) -> RecoverySpec:
    """A recovery spec (or the default one, changed) with budgets that never stop the run."""
    base = vars(recovery or RecoverySpec()) | changes
    lifted = {"max_failures": NEVER, "max_unknown": NEVER, "max_no_progress": NEVER}
    return RecoverySpec(**(base | lifted))


@dataclass(frozen=True)
class Scenario:
    """What is simulated. Times in seconds; `nodes` are those that train, spares come on top.

    Raises ValueError, with everything that is wrong, for numbers that describe no run.
    """

    nodes: int
    failures_per_node_day: float
    interval_s: float
    """Training between two saves."""
    save_s: float
    """What a save takes from training; it counts once it is over."""
    restart_s: float
    """From a generation's start to its first step: workers, group, load."""
    detection_s: float = 5.0
    """From a failure to the coordinator's knowing of it."""
    end_s: float = 0.0
    """From the kill to the workers' ends."""
    recovery: RecoverySpec = field(default_factory=endless)
    """The policy (`restart`, `spare_nodes`, `min_nodes`) and the budgets."""
    sizes: tuple[int, ...] | None = None
    """What an elastic run may shrink to, largest first (`plan.resize.sizes`); None: any number
    from `nodes` to `min_nodes`."""
    node_loss_share: float = 0.0
    """The share of failures that take the node away; the others end a worker on it."""
    repair_s: float = DAY_S
    """How long a lost node is away, on average (exponential)."""
    idle_nodes: int | None = None
    """Nodes of the cluster beside those first held, to take from at a requeue; None: any number."""
    requeue_floor_s: float = 121.0
    """Slurm's own wait before a requeued job is eligible: `cred_expire` + 1."""
    queue_wait_s: float = 0.0
    """The wait in the queue after that, on average (exponential)."""
    time_limit_s: float | None = None
    """After so long an attempt is stopped and requeued."""
    stop_lead_s: float = 60.0
    """How long ahead of the limit the stop is asked for."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} is at least 0, not {value}"
            for name, value in vars(self).items()
            if isinstance(value, int | float) and not value >= 0
        ]
        problems += [
            f"{name} is above 0, not {value}"
            for name, value in (("nodes", self.nodes), ("interval_s", self.interval_s))
            if value == 0
        ]
        if self.node_loss_share > 1:
            problems.append(f"node_loss_share is at most 1, not {self.node_loss_share}")
        if self.time_limit_s is not None and self.time_limit_s <= self.stop_lead_s:
            problems.append(
                f"time_limit_s={self.time_limit_s} is not above stop_lead_s={self.stop_lead_s}"
            )
        if (self.recovery.min_nodes or 1) > self.nodes:
            problems.append(f"min_nodes={self.recovery.min_nodes} is above nodes={self.nodes}")
        if self.sizes and (
            self.sizes[0] != self.nodes or list(self.sizes) != sorted(set(self.sizes), reverse=True)
        ):
            problems.append(f"sizes fall from nodes={self.nodes}, not {self.sizes}")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def failures_per_s(self) -> float:
        """Failures of the full size, N · r_f."""
        return self.nodes * self.failures_per_node_day / DAY_S

    @property
    def policy(self) -> RestartPolicy:
        """What the machine goes by."""
        sizes: tuple[int, ...] = (self.nodes,)
        if self.recovery.restart == "elastic":
            least = self.recovery.min_nodes or 1
            sizes = self.sizes or tuple(range(self.nodes, least - 1, -1))
        return RestartPolicy(
            sizes=sizes,
            start_timeout_s=300.0,
            stop_timeout_s=self.recovery.stop_timeout_s,
            restarts_inside=self.recovery.restart != "requeue",
        )

    @property
    def restart_cost_s(self) -> float:
        """u0 of the closed form: from a failure to training again, on average over the kinds.

        While spares last, and for the first failure since a commit (later ones back off).
        """
        lost = self.node_loss_share
        requeued = {"requeue": 1.0, "same": lost}.get(self.recovery.restart, 0.0)
        inside = self.detection_s + (1 - lost) * self.policy.gather_s + self.end_s + self.restart_s
        return inside + requeued * (self.requeue_floor_s + self.queue_wait_s)


@dataclass(frozen=True)
class Outcome:
    """What became of a simulated run. The five times sum to `wall_s`."""

    wall_s: float
    kept_s: float
    """Training that was kept."""
    lost_s: float
    """Training that was rolled back."""
    saving_s: float
    down_s: float
    """The allocation was held, and nothing trained."""
    queued_s: float
    productive_s: float
    """`kept_s`, smaller generations counted by their share of the full size."""
    failures: int
    generations: int
    attempts: int
    stopped: str | None
    """Why the budget ended the run early, or None."""

    @property
    def ettr(self) -> float:
        """Effective training time over wall time."""
        return self.productive_s / self.wall_s


def simulate(
    scenario: Scenario,
    *,
    duration_s: float,
    seed: int,
    trace: Callable[[float, Action], None] | None = None,
) -> Outcome:
    """Run a scenario for `duration_s` of its own time; `trace` is told each of the machine's
    actions with its time. The run never finishes by itself, but a spent budget stops it."""
    return _Simulation(scenario, duration_s, seed, trace).run()


@dataclass
class _Segment:
    """Training from `began` on, after `base` of committed work, at `rate` of the full size."""

    began: float
    base: float
    rate: float
    left_at: float | None = None
    """When an agreed stop ended the steps, for a last save."""

    def split(self, now: float, scenario: Scenario) -> tuple[float, float, float]:
        """Until `now`: seconds of training that are saved, that are not, and seconds of saving."""
        until = now if self.left_at is None else self.left_at
        cycle = scenario.interval_s + scenario.save_s
        whole, rest = divmod(until - self.began, cycle)
        open_s = min(rest, scenario.interval_s)
        return (
            whole * scenario.interval_s,
            open_s,
            whole * scenario.save_s + (rest - open_s) + (now - until),
        )


class _Simulation:
    """One run. Methods named `_on_...` are the events of the model, `_do` the machine's actions."""

    def __init__(
        self,
        scenario: Scenario,
        duration_s: float,
        seed: int,
        trace: Callable[[float, Action], None] | None,
    ) -> None:
        self._scenario, self._end, self._trace = scenario, duration_s, trace
        # Apart, so that policies that wait differently meet failures that are alike.
        self._failing = random.Random(f"{seed} failures")
        self._waiting = random.Random(f"{seed} waits")
        self._now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = count()
        self._policy = scenario.policy
        self._held_nodes = scenario.nodes + (
            scenario.recovery.spare_nodes if scenario.recovery.restart == "spare" else 0
        )
        self._cluster = [f"n{i}" for i in range(self._held_nodes + (scenario.idle_nodes or 0))]
        self._down: dict[str, float] = {}
        """Lost nodes, and when each is repaired."""
        self._allocation: list[str] = []
        self._machine: RestartMachine | None = None
        self._history: list[End] = []
        self._segment: _Segment | None = None
        self._broken: FailureClass | None = None
        """What ended the live generation's work, known to the coordinator or not yet."""
        self._committed = 0.0
        self._idle_since = 0.0
        self._spent = dict.fromkeys(("kept", "lost", "saving", "down", "queued", "productive"), 0.0)
        self._failures = self._attempts = self._generations = 0
        self._stopped: str | None = None

    def run(self) -> Outcome:
        """Everything until the end of the time or of the budget."""
        self._at(0.0, self._on_attempt)
        while self._stopped is None:
            due = None if self._machine is None else self._machine.next_deadline
            if due is not None and (not self._heap or due <= self._heap[0][0]):
                if due >= self._end:
                    break
                assert self._machine is not None
                self._now = due
                self._do(self._machine.tick(due))
                continue
            if not self._heap or self._heap[0][0] >= self._end:
                break
            self._now, _, event, args = heapq.heappop(self._heap)
            event(*args)
        if self._stopped is None:
            self._now = self._end
        if self._segment is not None:
            self._leave(keep=True)
        self._rest("queued" if self._machine is None else "down")
        spent = {f"{name}_s": seconds for name, seconds in self._spent.items()}
        return Outcome(
            wall_s=self._now,
            failures=self._failures,
            generations=self._generations,
            attempts=self._attempts,
            stopped=self._stopped,
            **spent,
        )

    def _at(self, when: float, event: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._heap, (when, next(self._order), event, args))

    def _wait(self, mean_s: float) -> float:
        return self._waiting.expovariate(1 / mean_s) if mean_s else 0.0

    @property
    def _token(self) -> tuple[int, int]:
        """What an event of the model belongs to, as the messages of the agents do."""
        return self._attempts, 0 if self._machine is None else self._machine.generation

    # -- where the time goes -----------------------------------------------------------------------

    def _rest(self, what: str) -> None:
        """The time since training ended went to `what`."""
        self._spent[what] += self._now - self._idle_since
        self._idle_since = self._now

    def _leave(self, *, keep: bool) -> None:
        """The live segment is over, with or without a last save."""
        segment = self._segment
        assert segment is not None
        saved_s, open_s, saving_s = segment.split(self._now, self._scenario)
        kept_s = saved_s + (open_s if keep else 0.0)
        self._spent["kept"] += kept_s
        self._spent["lost"] += saved_s + open_s - kept_s
        self._spent["saving"] += saving_s
        self._spent["productive"] += kept_s * segment.rate
        self._committed = segment.base + kept_s * segment.rate
        self._segment, self._idle_since = None, self._now

    # -- attempts ----------------------------------------------------------------------------------

    def _on_attempt(self) -> None:
        """Nodes are given, and all agents register at once."""
        self._down = {node: at for node, at in self._down.items() if at > self._now}
        up = [node for node in self._cluster if node not in self._down]
        missing = self._held_nodes - len(up)
        if missing > 0 and self._scenario.idle_nodes is not None:
            self._at(sorted(self._down.values())[missing - 1], self._on_attempt)
            return
        new = [f"n{i}" for i in range(len(self._cluster), len(self._cluster) + max(0, missing))]
        self._cluster += new
        self._rest("queued")
        self._allocation = (up + new)[: self._held_nodes]
        self._attempts += 1
        self._machine = RestartMachine(self._allocation, self._policy, self._now)
        self._await_failure()
        limit_s = self._scenario.time_limit_s
        if limit_s is not None:
            self._at(self._now + limit_s - self._scenario.stop_lead_s, self._on_limit, self._token)
        for node in self._allocation:
            self._do(self._machine.arrive(node, self._now))

    def _on_limit(self, token: tuple[int, int]) -> None:
        if self._machine is not None and token[0] == self._attempts:
            self._do(self._machine.request_stop("time limit", self._now))

    # -- failures ----------------------------------------------------------------------------------

    def _await_failure(self) -> None:
        up = sum(node not in self._down for node in self._allocation) if self._down else None
        nodes = len(self._allocation) if up is None else up
        rate = nodes * self._scenario.failures_per_node_day / DAY_S
        if rate:
            self._at(self._now + self._failing.expovariate(rate), self._on_failure, self._attempts)

    def _on_failure(self, attempt: int) -> None:
        machine = self._machine
        if machine is None or attempt != self._attempts:
            return
        self._failures += 1
        node = self._failing.choice([n for n in self._allocation if n not in self._down])
        takes_node = self._failing.random() < self._scenario.node_loss_share
        heard = self._now + self._scenario.detection_s
        if takes_node:
            self._down[node] = self._now + self._wait(self._scenario.repair_s)
            self._at(heard, self._on_lost, attempt, node)
        if machine.phase is Phase.RUNNING and not machine.killed and node in machine.active:
            if not takes_node:
                self._at(heard, self._on_worker_ended, self._token, node)
            self._break(FailureClass.NODE_LOST if takes_node else FailureClass.DEVICE)
        self._await_failure()

    def _break(self, failure_class: FailureClass) -> None:
        self._broken = self._broken or failure_class
        if self._segment is not None:
            self._leave(keep=False)

    def _on_lost(self, attempt: int, node: str) -> None:
        if self._machine is not None and attempt == self._attempts:
            self._do(self._machine.lose(node, self._now))

    def _on_worker_ended(self, token: tuple[int, int], node: str) -> None:
        if self._machine is not None and token == self._token and node not in self._down:
            self._do(self._machine.ended(node, self._now, failed=True, all_ended=True))

    # -- what the machine asks for -----------------------------------------------------------------

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if self._trace is not None:
                self._trace(self._now, action)
            later = self._now + self._scenario.end_s
            if isinstance(action, Start):
                self._start(action)
            elif isinstance(action, Kill):
                if self._segment is not None:  # a stop that was not saved in time
                    self._break(FailureClass.TIME_LIMIT)
                self._at(later, self._on_ends, self._token, True)
            elif isinstance(action, SetFlag):
                self._report_begun()
            elif isinstance(action, SetTarget):
                self._last_save()
            elif isinstance(action, Decide | StoppedIdle | TooFew):
                self._decide(action)

    def _start(self, start: Start) -> None:
        self._generations += 1
        dead = not self._down.keys().isdisjoint(start.nodes)
        self._broken = FailureClass.NODE_LOST if dead else None
        self._at(self._now + self._scenario.restart_s, self._on_begin, self._token, start)

    def _on_begin(self, token: tuple[int, int], start: Start) -> None:
        machine = self._machine
        if machine is None or token != self._token or self._broken or machine.killed:
            return
        if machine.phase is Phase.RUNNING and machine.stop_reason is None:
            self._rest("down")
            rate = len(start.nodes) / self._scenario.nodes
            self._segment = _Segment(self._now, self._committed, rate)

    def _living(self) -> list[str]:
        assert self._machine is not None
        return [node for node in self._machine.active if node not in self._down]

    def _on_ends(self, token: tuple[int, int], failed: bool) -> None:
        """The agents that live report the ends of their workers."""
        machine = self._machine
        if machine is None or token != self._token:
            return
        if not failed and self._segment is not None:
            self._leave(keep=True)
        now = self._now
        for node in self._living():
            actions = machine.ended(node, now, failed=failed, all_ended=True)
            if actions:  # looked at here: this line runs for every node of every generation
                self._do(actions)
            if machine.phase is not Phase.RUNNING or machine.generation != token[1]:
                return  # this was the last end that was awaited

    def _report_begun(self) -> None:
        """Flags are set in no time; a broken generation's workers stand in a collective, and all
        the same their agents report."""
        machine, segment = self._machine, self._segment
        assert machine is not None
        step = -1
        if segment is not None:
            saved_s, open_s, _ = segment.split(self._now, self._scenario)
            step = int(segment.base + segment.rate * (saved_s + open_s))
        for node in self._living():
            self._do(machine.begun(node, step, self._now))

    def _last_save(self) -> None:
        """All run to the target and save it, or leave at once where no step was begun."""
        if self._broken:
            return
        save_s = 0.0
        if self._segment is not None:
            self._segment.left_at, save_s = self._now, self._scenario.save_s
        self._at(self._now + save_s, self._on_ends, self._token, False)

    def _decide(self, action: Decide | StoppedIdle | TooFew) -> None:
        """The end's class is what truly happened; the verdict is the platform's own."""
        machine = self._machine
        assert machine is not None
        if machine.stop_reason is not None:
            failure_class = FailureClass.TIME_LIMIT
        elif isinstance(action, TooFew):
            failure_class = FailureClass.NODE_LOST
        else:
            failure_class = self._broken or FailureClass.UNKNOWN
        step = int(self._committed)
        decision = decide(
            failure_class,
            step,
            self._history,
            self._scenario.recovery,
            can_continue=machine.can_continue,
        )
        self._history.append(End(None, failure_class, step))
        goes_on = decision.verdict is Verdict.CONTINUE
        self._do(machine.decided(go_on=goes_on, delay_s=decision.delay_s, now=self._now))
        if goes_on:
            return
        self._rest("down")
        self._machine = None
        if decision.verdict is Verdict.STOP:
            self._stopped = decision.reason
            return
        wait_s = self._scenario.requeue_floor_s + self._wait(self._scenario.queue_wait_s)
        self._at(self._now + decision.delay_s + wait_s, self._on_attempt)
