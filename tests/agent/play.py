"""One attempt of a coordinator, played by hand.

Ledger, fence and checkpoints are real; the socket, the scheduler and the clock are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from air_hpc.agent.channel import Message
from air_hpc.agent.coordinator import Coordinator
from air_hpc.agent.environment import JobContext
from air_hpc.agent.record import Record
from air_hpc.plan.frozen import read_run_yaml
from air_hpc.recovery.cause import SlurmWord
from air_hpc.recovery.detector import Answer
from air_hpc.recovery.restart import RestartPolicy
from air_hpc.rundir.events import Event, Kind, read_ledger
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.words import FailureClass, Verdict

NODES = ("n1", "n2")
JOB = "12"
RUNNING = SlurmWord("RUNNING", 0, version=(22, 5))
TIMES = RestartPolicy(sizes=(2,), start_timeout_s=60, stop_timeout_s=20)
GATHER_S, KILL_WAIT_S, LEAVE_S = TIMES.gather_s, TIMES.kill_wait_s, TIMES.leave_s
PREEMPTED = SlurmWord("RUNNING", 0, preempted=True, version=(22, 5))


BASE = (
    "cluster=slurm",
    "launch.nodes=2",
    "launch.devices_per_node=2",
    "launch.start_timeout_s=60",
    "recovery.restart=requeue",
    "recovery.heartbeat_timeout_s=5",
    "recovery.stop_timeout_s=20",
    "train.steps=10",
)


class FakeSocket:
    """Keeps what was sent to whom."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []

    def send(self, node: str, message: Message) -> None:
        self.sent.append((node, message))

    def of(self, kind: str) -> list[tuple[str, Message]]:
        return [(node, message) for node, message in self.sent if message["type"] == kind]

    def to(self, kind: str) -> list[str]:
        return [node for node, _ in self.of(kind)]


class FakeProber:
    """Machines that answer, but for those in `gone`, which refuse, and those in `off`."""

    def __init__(self) -> None:
        self.gone: set[str] = set()
        self.off: set[str] = set()
        self._begun: list[str] = []

    def begin(self, node: str, address: str, port: int) -> None:
        self._begun.append(node)

    def poll(self) -> list[tuple[str, Answer]]:
        begun, self._begun = self._begun, []
        return [(node, self._answer(node)) for node in begun]

    def _answer(self, node: str) -> Answer:
        if node in self.gone:
            return Answer.REFUSED
        return Answer.SILENT if node in self.off else Answer.CONNECTED

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass


class FakeScheduler:
    """Says what a test wants Slurm to say."""

    def __init__(self, word: SlurmWord | None = RUNNING, end_time: float | None = None) -> None:
        self.said = word
        self.end = end_time
        self.asked = 0

    def end_time(self) -> float | None:
        return self.end

    def word(self) -> SlurmWord | None:
        self.asked += 1
        return self.said

    def requeue(self) -> bool:
        raise AssertionError("the coordinator writes an intent, and asks for nothing itself")

    def cancel(self) -> bool:
        raise AssertionError("the coordinator cancels nothing")


class AnsweredAtOnce:
    """A question to the scheduler without a thread."""

    def __init__(self, ask: Callable[[], SlurmWord | None]) -> None:
        self._word = ask()

    def answer(self) -> tuple[bool, SlurmWord | None]:
        return True, self._word


class Play:
    """One attempt, played by hand."""

    def __init__(
        self,
        run: RunDir,
        *,
        scheduler: FakeScheduler | None = None,
        restart_count: int = 0,
        nodes: tuple[str, ...] = NODES,
        local: bool = False,
        record: Callable[..., Record] = Record,
    ) -> None:
        self.run = run
        self.nodes = nodes
        self.now = 1000.0
        self.said: list[str] = []
        self.socket = FakeSocket()
        self.prober = FakeProber()
        self.scheduler = scheduler or FakeScheduler()
        kind: Any = "local" if local else "slurm"
        job = None if local else JOB
        context = JobContext(kind, nodes[0], 0, nodes, job, None, None, restart_count, None)
        self.coordinator = Coordinator(
            context,
            run,
            read_run_yaml(run.run_yaml.read_text()),
            self.socket,  # type: ignore[arg-type]
            self.scheduler,
            say=self.said.append,
            clock=lambda: self.now,
            wall_clock=lambda: self.now + 1e9,
            ask=AnsweredAtOnce,
            prober=self.prober,  # type: ignore[arg-type]
            record=record,
        )

    # -- what nodes say --

    def hello(self, *nodes: str, **facts: Any) -> None:
        for node in nodes:
            message = {
                "type": "hello",
                "index": NODES.index(node) if node in NODES else 9,
                "boot_id": "one",
                "address": "127.0.0.1",
                "ports": [20001, 20002],
                "devices": [{"model": "cpu", "memory_bytes": None}] * 2,
                "facts": {"liveness_port": 9},
                **facts,
            }
            self.coordinator.on_message(node, message)
            if node in self.socket.to("welcome"):  # then it begins to beat
                self.tell(node, "heartbeat", sequence=0)

    def beat(self, *nodes: str, **facts: Any) -> None:
        for node in nodes:
            message = {
                "type": "heartbeat",
                "sequence": 1,
                "token": self.token,
                "done_step": 3,
                "phases": ["step"],
            }
            self.coordinator.on_message(node, {**message, **facts})

    def worker(self, kind: str, **facts: Any) -> None:
        message = {"kind": kind, "rank": 0, **facts}
        self.tell("n1", "worker", rank=0, message=message)

    @property
    def token(self) -> str:
        """The live generation's."""
        return str(self.coordinator.token)

    def tell(self, node: str, kind: str, **facts: Any) -> None:
        """What a node says of the live generation."""
        self.coordinator.on_message(node, {"type": kind, "token": self.token, **facts})

    def ended(self, node: str, *ranks: int, **facts: Any) -> None:
        workers = [
            {
                "rank": rank,
                "exit_status": 0,
                "phase": "finish",
                "done_step": 10,
                "last_words": {"kind": "finished", "step": 10},
                **facts,
            }
            for rank in ranks
        ]
        self.tell(node, "ended", workers=workers)

    def failed(self, node: str, *ranks: int, failure_class: str = "unknown", **facts: Any) -> None:
        words = {"kind": "error", "type": "Error", "message": "it broke"}
        words["failure_class"] = failure_class
        self.ended(node, *ranks, exit_status=1, phase="step", last_words=words, **facts)

    def stopped_all(self, step: int) -> None:
        words = {"kind": "stopped", "step": step, "saved": True}
        for node, ranks in (("n1", (0, 1)), ("n2", (2, 3))):
            self.ended(node, *ranks, last_words=words, done_step=step)

    def finished_all(self) -> None:
        self.ended("n1", 0, 1)
        self.ended("n2", 2, 3)

    def failed_all(self, failure_class: str = "unknown", **facts: Any) -> None:
        self.failed("n1", 0, 1, failure_class=failure_class, **facts)
        self.failed("n2", 2, 3, failure_class=failure_class, **facts)

    def signal(self, name: str, node: str = "n1") -> None:
        self.coordinator.on_message(node, {"type": "signal", "name": name})

    def wait(self, seconds: float, beating: tuple[str, ...] = NODES) -> None:
        """Time passes in ticks of half a second; `beating` nodes send heartbeats, and the machines
        of the others answer nothing."""
        until = self.now + seconds
        self.prober.off = set(self.nodes) - set(beating)
        while self.now < until:
            self.now = min(until, self.now + 0.5)
            self.beat(*beating)
            self.coordinator.tick()

    # -- what came of it --

    @property
    def events(self) -> tuple[Event, ...]:
        return read_ledger(self.run).events

    def event(self, kind: Kind) -> Event:
        (found,) = [event for event in self.events if event.kind == kind]
        return found

    @property
    def end(self) -> tuple[FailureClass, Verdict, str]:
        facts = [event for event in self.events if event.kind == Kind.ATTEMPT_ENDED][-1].facts
        return (
            FailureClass(facts["failure_class"]),
            Verdict(facts["verdict"]),
            str(facts["evidence"]),
        )

    @property
    def exit_code(self) -> int:
        assert self.coordinator.outcome is not None
        return self.coordinator.outcome.exit_code

    def intent(self, restart_count: int = 0) -> str | None:
        path = self.run.intent_file(JOB, restart_count)
        return path.read_text().strip() if path.exists() else None
