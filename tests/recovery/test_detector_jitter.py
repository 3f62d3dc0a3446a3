"""A million hours of nodes under jitter without a false alarm, and real deaths found in time.

What is simulated is the world; the detector is the real one. A node beats every half second, which
is 7.2e9 beats in 10^6 hours. They are not all run, and need not be: the detector does something
for a node only when the node was silent for `suspect_s` (three beats), so a stretch in which no
beat comes that late leaves it in the state in which it began. The stretches that matter are drawn
from the same distribution as if all had been: their number is binomial (beats) or Poisson (stalls),
with the probability of the tail beyond 0.9 s (half a second until the beat is due, and a tick, are
added to it), and their lengths come from the tail. In a part of them several things go wrong at
once, far more often than chance would have it: a stall and then an outage, the observer's own
stall, an alarm for everybody (`suspect_all`).

    outage of a link     per beat, log-normal and Pareto, up to 3 s: what is sent waits (TCP tries
                         again at its own doubling pace), connects are lost. One for longer than
                         `timeout_s` less the last probe is a machine cut off: no false alarm
    stall of an agent    per node and hour, Pareto, up to 10 s (a slow store, a starved core): no
                         beats, but the kernel answers connects
    observer's stall     up to 10 s: nothing is read, nothing is decided
    lost probes          1 in 1000, at random
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from air_hpc.config.spec import RecoverySpec
from air_hpc.recovery.detector import Answer, Detector, DetectorPolicy, Lost

POLICY = DetectorPolicy.from_spec(RecoverySpec())
NODE_HOURS = 1_000_000
BEAT_S = RecoverySpec().heartbeat_interval_s
TICK_S = 0.1
UNUSUAL_S = 0.9
LONGEST_OUTAGE_S = 3.0
LONGEST_STALL_S = 10.0
SURVIVED_S = 2.5
"""An outage that follows a stall, which hid that the machine was alive shortly before."""
PROBE_LOSS = 0.001
ROUND_TRIP_S = 0.001
INCIDENT_AT = 2.0
BATCH = 1000

STALLS_AN_HOUR, STALL_FROM_S, STALL_ALPHA = 1.0, 0.02, 1.1


def pareto_tail(rng: np.random.Generator, count: int, alpha: float, longest: float) -> list[float]:
    """Lengths beyond UNUSUAL_S of a Pareto distribution cut off at `longest`."""
    least = (UNUSUAL_S / longest) ** alpha
    return list(UNUSUAL_S * rng.uniform(least, 1.0, count) ** (-1 / alpha))


def unusual_outages(rng: np.random.Generator) -> list[float]:
    beats = int(NODE_HOURS * 3600 / BEAT_S)
    log_normal = 0.5 * math.erfc(math.log(UNUSUAL_S / 0.002) / 1.2 / math.sqrt(2))
    pareto = (0.001 / UNUSUAL_S) ** 2.2
    count = rng.binomial(beats, log_normal) + rng.binomial(beats, pareto)
    return pareto_tail(rng, int(count), 2.2, LONGEST_OUTAGE_S)


def unusual_stalls(rng: np.random.Generator) -> list[float]:
    probability = (STALL_FROM_S / UNUSUAL_S) ** STALL_ALPHA
    count = rng.poisson(NODE_HOURS * STALLS_AN_HOUR * probability)
    return pareto_tail(rng, int(count), STALL_ALPHA, LONGEST_STALL_S)


@dataclass
class Life:
    """One node in one stretch: when its agent stands still, when its link is out, when it dies."""

    rng: np.random.Generator
    stall: tuple[float, float] = (0.0, 0.0)
    outage: tuple[float, float] = (0.0, 0.0)
    dies_at: float = math.inf
    machine_too: bool = False

    @property
    def settled(self) -> float:
        """When its trouble is over: TCP may wait as long again as it has waited."""
        again = self.outage[1] + (self.outage[1] - self.outage[0]) + 0.3
        return max(self.stall[1], again)

    def arrivals(self, until: float) -> list[float]:
        """When its beats reach the observer, in order, as TCP keeps them."""
        found, last = [], 0.0
        at = float(self.rng.uniform(0, BEAT_S))
        delays = iter(self.rng.lognormal(math.log(0.002), 1.0, int(until / BEAT_S) + 2).tolist())
        while at < min(until, self.dies_at):
            if self.stall[0] <= at < self.stall[1]:
                at = self.stall[1]
                continue
            last = max(last, self._delivered(at) + next(delays))
            if last < self.dies_at or not self.machine_too:
                found.append(last)
            at += BEAT_S
        return found

    def _delivered(self, sent: float) -> float:
        start, end = self.outage
        if start <= sent < end:
            wait = float(self.rng.uniform(0.2, 0.3))
            while sent < end:
                sent, wait = sent + wait, wait * 2
        return sent

    def answer(self, at: float) -> Answer:
        """What a connect comes to."""
        out = self.outage[0] <= at < self.outage[1]
        if out or self.rng.random() < PROBE_LOSS or (self.machine_too and at >= self.dies_at):
            return Answer.SILENT
        return Answer.REFUSED if at >= self.dies_at else Answer.CONNECTED


@dataclass
class Observed:
    """What the detector said in a batch: the lost nodes, with the time."""

    lost: dict[int, tuple[float, Lost]] = field(default_factory=dict)
    probes: int = 0
    last_heard: dict[int, float] = field(default_factory=dict)


def observe(
    lives: list[Life],
    until: float,
    observer_stall: tuple[float, float] = (0.0, 0.0),
    alarm_at: float = math.inf,
) -> Observed:
    """One detector over all `lives`, in the order in which a coordinator's loop calls it."""
    detector, seen = Detector(POLICY), Observed()
    names = [str(index) for index in range(len(lives))]
    for name in names:
        detector.watch(name, 0.0)
    detector.tick(0.0)
    for name in names:
        detector.probed(name, Answer.CONNECTED, 0.0)
    beats = iter(sorted((at, i) for i, life in enumerate(lives) for at in life.arrivals(until)))
    answers: list[tuple[float, int, Answer]] = []
    next_beat = next(beats, None)
    last = 0.0
    for now in _ticks(lives[0].rng, until, observer_stall):
        while next_beat is not None and next_beat[0] <= now:
            detector.heard(names[next_beat[1]], now)
            seen.last_heard[next_beat[1]] = now
            next_beat = next(beats, None)
        while answers and answers[0][0] <= now:
            _, index, answer = heapq.heappop(answers)
            detector.probed(names[index], answer, now)
        if now - last > 1.0:
            detector.forgive(now - last - 1.0, now)
        last = now
        if now >= alarm_at:
            alarm_at = math.inf
            detector.suspect_all(now)
        for action in detector.tick(now):
            index = int(action.node)
            if isinstance(action, Lost):
                seen.lost[index] = now, action
                continue
            seen.probes += 1
            answer = lives[index].answer(now)
            takes = POLICY.probe_timeout_s if answer is Answer.SILENT else ROUND_TRIP_S
            heapq.heappush(answers, (now + takes, index, answer))
    return seen


def _ticks(
    rng: np.random.Generator, until: float, observer_stall: tuple[float, float]
) -> Iterator[float]:
    now = 0.0
    while now < until:
        now += TICK_S + float(rng.exponential(0.003))
        if observer_stall[0] <= now < observer_stall[1]:
            now = observer_stall[1]
        yield now


def stretches(rng: np.random.Generator) -> Iterator[Life]:
    """Every unusual stretch of NODE_HOURS, the shortest of each kind first."""
    found = [(True, length) for length in unusual_outages(rng)]
    found += [(False, length) for length in unusual_stalls(rng)]
    for is_outage, length in sorted(found):
        life = Life(rng)
        begins = INCIDENT_AT + float(rng.uniform(0, 1))
        if is_outage:
            life.outage = begins, begins + length
        else:
            life.stall = begins, begins + length
            if rng.random() < 0.03:
                cut = begins + float(rng.uniform(-1, length))
                life.outage = cut, cut + float(rng.uniform(0.3, SURVIVED_S))
        yield life


def in_batches(lives: Iterator[Life]) -> Iterator[list[Life]]:
    while batch := list(itertools.islice(lives, BATCH)):
        yield batch


def test_no_node_is_lost_in_a_million_hours_of_jitter() -> None:
    rng = np.random.default_rng(1)
    count = probes = silent = 0
    for batch in in_batches(stretches(rng)):
        stall = alarm = math.inf
        if rng.random() < 0.3:
            stall = INCIDENT_AT + float(rng.uniform(-2, 5))
        if rng.random() < 0.2:
            alarm = INCIDENT_AT + float(rng.uniform(-2, 5))
        observer = stall, stall + float(rng.uniform(0.5, 10.0))
        over = max(life.settled for life in batch)
        until = max(over + 1.0, observer[1] + 3.0 if stall < over else 0.0)
        seen = observe(batch, until, observer, alarm)
        assert not seen.lost, [(lost, batch[index]) for index, (_, lost) in seen.lost.items()]
        count += len(batch)
        probes += seen.probes
        silent += sum(life.stall[1] - life.stall[0] > 5.0 for life in batch)
    assert count > 15_000
    assert probes > count / 2
    assert silent > 500


@pytest.mark.parametrize("machine_too", [False, True], ids=["agent", "machine"])
def test_deaths_are_found_in_time_under_the_same_jitter(machine_too: bool) -> None:
    """Within 5 s of the death where its last beat came at once; the agent's in half of that."""
    rng = np.random.default_rng(2)
    lives = [
        Life(rng, dies_at=float(rng.uniform(4, 6)), machine_too=machine_too) for _ in range(4000)
    ]
    for life in lives[::4]:  # on top of trouble that was there before
        if not machine_too:
            begins = life.dies_at - float(rng.uniform(0, 3))
            life.stall = begins, begins + 10.0
        else:
            begins = life.dies_at - float(rng.uniform(0, 2))
            life.outage = begins, begins + LONGEST_OUTAGE_S
    seen = observe(lives, 14.0)
    assert len(seen.lost) == len(lives)
    taken = np.array([seen.lost[i][0] - life.dies_at for i, life in enumerate(lives)])
    since = np.array([seen.lost[i][0] - seen.last_heard[i] for i in range(len(lives))])
    assert taken.max() <= 5.0
    assert since.max() <= POLICY.timeout_s + 3 * TICK_S
    if not machine_too:
        assert np.median(taken) <= 2.0
        assert np.quantile(taken, 0.99) <= 3.0


def test_an_alarm_finds_a_dead_agent_sooner() -> None:
    rng = np.random.default_rng(3)
    lives = [Life(rng, dies_at=5.0) for _ in range(200)] + [Life(rng) for _ in range(200)]
    seen = observe(lives, 10.0, alarm_at=5.1)
    assert sorted(seen.lost) == list(range(200))
    assert max(at for at, _ in seen.lost.values()) <= 5.0 + 2.8
    assert float(np.median([at for at, _ in seen.lost.values()])) <= 5.0 + 1.5


def test_the_simulation_can_fail() -> None:
    """The same worlds, with an outage that the rules cannot tell from a dead machine."""
    rng = np.random.default_rng(4)
    lives = [Life(rng, outage=(4.0, 10.0)) for _ in range(50)]
    assert len(observe(lives, 14.0).lost) == 50
    lives = [Life(rng, stall=(4.0, 25.0)) for _ in range(50)]
    assert len(observe(lives, 26.0).lost) == 50
