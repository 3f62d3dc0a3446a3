"""The restart machine: one attempt as a pure state machine. Events and the clock in, actions out.

An attempt holds an allocation and trains in generations, one at a time:

    ARRIVING   nodes say that they are there; enough of them start the first generation
    RUNNING    a generation's workers run, or what is left of them is being awaited and killed
    DECIDING   it has ended: the caller classifies the end and gives its decision back
    PAUSING    the next generation waits out a back-off
    OVER       nothing starts any more

Every method returns the actions that the caller must carry out, in order. What the machine promises
in whatever order its events come, early, late or twice (a property test holds it to this):

- one generation is alive at a time: the next `Start` comes only after every node of the one before
  has reported the end of its workers, or was given up;
- a `Start` names nodes that arrived, are not lost and are fit, in the allocation's order, and as
  many of them as the policy's largest size that they fill;
- once a stop was asked for nothing is started any more;
- a killed generation is asked for nothing any more: no flag and no target follows its `Kill`;
- every generation ends: whoever is awaited has a deadline.

How long a silent node is waited for before it is lost is the `detector`'s business, what an end is
called is `evidence`'s, and what comes of it `decide`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from air_hpc.recovery import stop as agreement
from air_hpc.recovery.stop import StopAgreement


class Phase(StrEnum):
    """Where an attempt stands."""

    ARRIVING = "arriving"
    RUNNING = "running"
    DECIDING = "deciding"
    PAUSING = "pausing"
    OVER = "over"


@dataclass(frozen=True)
class RestartPolicy:
    """What the machine goes by; all times in seconds.

    `sizes` are the numbers of nodes that a generation may have, largest first; empty: none may.
    """

    sizes: tuple[int, ...]
    start_timeout_s: float
    """How long the nodes of the allocation may take to arrive."""
    stop_timeout_s: float
    """How long a stop may take to be agreed, and again to be saved."""
    restarts_inside: bool = True
    """Whether a generation may follow another one in the same attempt."""
    settle_s: float = 10.0
    """How long a full generation waits for the rest of the allocation to arrive."""
    gather_s: float = 1.0
    """After a first failed worker: how long the others' ends are awaited before they are killed."""
    leave_s: float = 300.0
    """After a first worker that left as agreed. They all end together, but a process can hang in
    its teardown, and would hold the nodes until the time limit."""
    kill_wait_s: float = 10.0
    """After the kill: how long ends are awaited before the nodes that send none are given up."""


@dataclass(frozen=True)
class Start:
    """Start generation `generation` (1 is the attempt's first) on `nodes`."""

    generation: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class SetFlag:
    """Set the stop flag of every worker of the generation."""


@dataclass(frozen=True)
class SetTarget:
    """Tell every node that all run to `step`, save it and leave."""

    step: int


@dataclass(frozen=True)
class Kill:
    """Kill every worker of the generation that is still there."""

    why: str


@dataclass(frozen=True)
class GiveUp:
    """These nodes sent no end of their killed workers: they are lost, heard or not."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Decide:
    """The generation has ended: classify it and answer with `decided`."""


@dataclass(frozen=True)
class StoppedIdle:
    """A stop came while no worker ran: end the attempt."""


@dataclass(frozen=True)
class TooFew:
    """No size of the policy can be filled; `missing` did not arrive, were lost or are unfit."""

    missing: tuple[str, ...]
    arrived: int


Action = Start | SetFlag | SetTarget | Kill | GiveUp | Decide | StoppedIdle | TooFew


@dataclass
class _Generation:
    """The live generation: who is awaited, and the deadlines of its end."""

    nodes: tuple[str, ...]
    stop: StopAgreement
    awaited: set[str] = field(default_factory=set)
    kill_at: float | None = None
    killed_at: float | None = None
    save_by: float | None = None
    members: frozenset[str] = field(init=False)
    """The same nodes, to look one up."""

    def __post_init__(self) -> None:
        self.members = self.stop.members


class RestartMachine:
    """One attempt. `nodes` is the allocation in its own order; `now` is any monotonic clock."""

    def __init__(self, nodes: Iterable[str], policy: RestartPolicy, now: float) -> None:
        self.policy = policy
        self.phase = Phase.ARRIVING
        self.generation = 0
        self._nodes = tuple(nodes)
        # Sets beside the order: thousands of nodes arrive, one event each.
        self._members = frozenset(self._nodes)
        self._coming = set(self._nodes)
        self._arrived: set[str] = set()
        self._lost: set[str] = set()
        self._unfit: set[str] = set()
        self._arrive_by = now + policy.start_timeout_s
        self._full_since: float | None = None
        self._live: _Generation | None = None
        self._resume_at = now
        self.stop_reason: str | None = None

    # -- what is so --------------------------------------------------------------------------------

    @property
    def active(self) -> tuple[str, ...]:
        """The nodes of the present generation, or of the last one."""
        return () if self._live is None else self._live.nodes

    @property
    def fit(self) -> tuple[str, ...]:
        """The nodes that a next generation could take, in the allocation's order."""
        out = self._lost | self._unfit
        return tuple(node for node in self._nodes if node in self._arrived and node not in out)

    @property
    def lost(self) -> frozenset[str]:
        """The nodes that were given up in this attempt."""
        return frozenset(self._lost)

    @property
    def unfit(self) -> frozenset[str]:
        """The nodes that live, and are kept out of what starts next."""
        return frozenset(self._unfit)

    @property
    def killed(self) -> bool:
        """Whether the present generation's workers were told to be killed."""
        return self._live is not None and self._live.killed_at is not None

    @property
    def target(self) -> int | None:
        """The agreed step of the present generation's stop."""
        return None if self._live is None else self._live.stop.target

    @property
    def flag_missing(self) -> tuple[str, ...]:
        """Nodes that were asked to set their flag and have not reported yet."""
        live = self._live
        return live.stop.missing if live is not None and live.stop.requested else ()

    @property
    def next_deadline(self) -> float | None:
        """When the next `tick` is due, if nothing happens before; None where none will act.

        A tick before it does nothing. A caller with a timer need not tick in between.
        """
        live = self._live
        if self.phase is Phase.ARRIVING:
            settled = None if self._full_since is None else self._full_since + self.policy.settle_s
            return self._arrive_by if settled is None else min(settled, self._arrive_by)
        if self.phase is Phase.PAUSING:
            return self._resume_at
        if self.phase is not Phase.RUNNING or live is None:
            return None
        if live.killed_at is not None:
            return live.killed_at + self.policy.kill_wait_s
        due = (live.stop.deadline, live.kill_at, live.save_by)
        return min((at for at in due if at is not None), default=None)

    @property
    def can_continue(self) -> bool:
        """Whether another generation could start in this attempt, as far as nodes go."""
        inside = self.policy.restarts_inside or self.generation == 0
        return inside and self.stop_reason is None and self._size() is not None

    def _size(self) -> int | None:
        count = self._fit_count
        return next((size for size in self.policy.sizes if size <= count), None)

    @property
    def _fit_count(self) -> int:
        return len(self._arrived) - len(self._arrived & (self._lost | self._unfit))

    # -- nodes -------------------------------------------------------------------------------------

    def arrive(self, node: str, now: float) -> list[Action]:
        """A node of the allocation is there. Said again it changes nothing."""
        if node not in self._members or node in self._arrived:
            return []
        self._arrived.add(node)
        self._coming.discard(node)
        return self._try_first(now)

    def lose(self, node: str, now: float) -> list[Action]:
        """A node is given up for this attempt."""
        if node not in self._members or node in self._lost:
            return []
        self._lost.add(node)
        self._coming.discard(node)
        if self.phase is Phase.ARRIVING:
            return self._try_first(now)
        live = self._live
        if self.phase is not Phase.RUNNING or live is None or node not in live.members:
            return []
        live.awaited.discard(node)
        return [*self._kill(f"node {node} is lost", now), *self._check_ended()]

    def reject(self, node: str, now: float) -> list[Action]:
        """A node lives but is not fit: nothing is started on it any more."""
        if node not in self._members or node in self._unfit:
            return []
        self._unfit.add(node)
        self._coming.discard(node)
        return self._try_first(now) if self.phase is Phase.ARRIVING else []

    def _try_first(self, now: float) -> list[Action]:
        """Start once all have arrived, or enough of them for long enough."""
        if self.phase is not Phase.ARRIVING:
            return []
        if not self.policy.sizes or self._fit_count < self.policy.sizes[0]:
            self._full_since = None  # no longer: a node was lost or found unfit meanwhile
        elif self._full_since is None:
            self._full_since = now
        full_since = self._full_since
        settled = full_since is not None and now >= full_since + self.policy.settle_s
        if settled or now >= self._arrive_by or not self._hopeful:
            return self._start_or_give_up(now)
        return []

    @property
    def _hopeful(self) -> bool:
        """Whether a node may still arrive, and waiting for it may still help."""
        least = self.policy.sizes[-1] if self.policy.sizes else 0
        return bool(self._coming) and self._fit_count + len(self._coming) >= least

    def _start_or_give_up(self, now: float) -> list[Action]:
        size = self._size()
        if size is None:
            self.phase = Phase.DECIDING
            fit = set(self.fit)
            return [TooFew(tuple(n for n in self._nodes if n not in fit), len(fit))]
        nodes = self.fit[:size]
        self.generation += 1
        self.phase = Phase.RUNNING
        stop = StopAgreement.among(nodes, self.policy.stop_timeout_s)
        self._live = _Generation(nodes, stop, awaited=set(nodes))
        return [Start(self.generation, nodes)]

    def withdraw(self, now: float, delay_s: float = 0.0) -> list[Action]:
        """The generation that was to start was not: a node of it was rejected at the last moment,
        or what it needs cannot be had for now. It is started again after `delay_s`.

        Only right after its `Start`, before anything was told to a node.
        """
        if self.phase is not Phase.RUNNING:
            return []
        self._live = None
        self.generation -= 1
        # The nodes of a first one have arrived: a start put off only waits for its moment.
        waits = self.generation > 0 or delay_s > 0
        self.phase = Phase.PAUSING if waits else Phase.ARRIVING
        self._resume_at = now + delay_s
        return self.tick(now)

    # -- the live generation -----------------------------------------------------------------------

    def ended(
        self, node: str, now: float, *, failed: bool, all_ended: bool, is_cause: bool = False
    ) -> list[Action]:
        """Workers of a node of this generation have ended; `failed`: any of them not as agreed.

        `is_cause`: no other worker's end can have brought this one about, so none is awaited.
        """
        live = self._live
        if self.phase is not Phase.RUNNING or live is None or node not in live.members:
            return []
        if all_ended:
            live.awaited.discard(node)
        if is_cause and live.awaited:
            return self._kill("without the one that was killed they cannot go on", now)
        wait = self.policy.gather_s if failed else self.policy.leave_s
        live.kill_at = now + wait if live.kill_at is None else min(live.kill_at, now + wait)
        return self._check_ended()

    def condemn(self, why: str, now: float) -> list[Action]:
        """The generation must end (a hang, a node that cannot start its workers)."""
        return self._kill(why, now) if self.phase is Phase.RUNNING else []

    def _kill(self, why: str, now: float) -> list[Action]:
        live = self._live
        if live is None or live.killed_at is not None:
            return []
        live.killed_at = now
        return [Kill(why)]

    def _check_ended(self) -> list[Action]:
        if self._live is None or self._live.awaited or self.phase is not Phase.RUNNING:
            return []
        self.phase = Phase.DECIDING
        return [Decide()]

    # -- stops -------------------------------------------------------------------------------------

    def request_stop(self, reason: str, now: float) -> list[Action]:
        """A signal or a timer asks for the end of the attempt. A second one changes nothing."""
        if self.stop_reason is not None or self.phase is Phase.OVER:
            return []
        self.stop_reason = reason
        if self.phase in (Phase.ARRIVING, Phase.PAUSING):
            self.phase = Phase.DECIDING
            return [StoppedIdle()]
        if self.phase is Phase.RUNNING and self._live is not None and not self.killed:
            return self._agree(self._live.stop.request(reason, now), now)
        return []

    def begun(self, node: str, step: int, now: float) -> list[Action]:
        """A node's flags are set; `step` is the largest that its workers began (-1: none)."""
        if self.phase is not Phase.RUNNING or self._live is None or self.killed:
            return []
        return self._agree(self._live.stop.report(node, step), now)

    def _agree(self, action: agreement.Action | None, now: float) -> list[Action]:
        live = self._live
        assert live is not None
        if action is agreement.Action.SET_FLAG:
            return [SetFlag()]
        if action is agreement.Action.SET_TARGET:
            live.save_by = now + self.policy.stop_timeout_s
            return [SetTarget(live.stop.target or 0)]
        if action is agreement.Action.GIVE_UP:
            missing = ", ".join(live.stop.missing)
            return self._kill(f"no stop agreed: {missing} did not report", now)
        return []

    # -- decisions ---------------------------------------------------------------------------------

    def decided(self, *, go_on: bool, delay_s: float, now: float) -> list[Action]:
        """What came of `Decide`: the next generation after `delay_s`, or the end of the attempt.

        A stop that came meanwhile wins: then nothing is started.
        """
        if self.phase is not Phase.DECIDING:
            return []
        if not go_on:
            self.phase = Phase.OVER
            return []
        if self.stop_reason is not None:
            return [StoppedIdle()]
        self.phase = Phase.PAUSING
        self._resume_at = now + delay_s
        return self.tick(now)

    # -- time --------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        if self.phase is Phase.ARRIVING:
            return self._try_first(now)
        if self.phase is Phase.PAUSING:
            return self._start_or_give_up(now) if now >= self._resume_at else []
        if self.phase is Phase.RUNNING and self._live is not None:
            return self._tick_live(self._live, now)
        return []

    def _tick_live(self, live: _Generation, now: float) -> list[Action]:
        actions = self._agree(live.stop.tick(now), now)
        if live.kill_at is not None and now >= live.kill_at:
            actions += self._kill("the others have ended", now)
        if live.save_by is not None and now >= live.save_by:
            actions += self._kill("the agreed step was not saved before the deadline", now)
        if live.killed_at is not None and now >= live.killed_at + self.policy.kill_wait_s:
            silent = tuple(node for node in live.nodes if node in live.awaited)
            self._lost.update(silent)
            live.awaited.clear()
            actions += [GiveUp(silent), *self._check_ended()]
        return actions
