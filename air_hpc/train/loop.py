"""The native loop: one optimizer step after another, from the first or from a checkpoint.

Step n (1 is the first) trains on batch n - 1 of the sample order and leads to the state "after n
steps". A step is: begin it with the session, micro-batches forward and backward, clip, update,
end it. Between two steps lie at most a save and, every `log_interval_steps`, one small reduction
for the global loss; nothing else touches the network or the file system.

A loss guard looks at what is there anyway, the gradient's norm and the logged loss. On a CPU, and
where it may leave a batch out, before the optimizer steps; else, so that a GPU is not waited for,
at a log step after it, and between log steps once the next step's work is queued. Never later than
a save.

The loop ends in one of three ways, the first two with the last state saved while all wait for it:
all steps are done (FINISHED), a stop was agreed on (STOPPED), or an exception, which is the
caller's.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import torch

from air_hpc.checkpoint.interval import SaveTimer
from air_hpc.checkpoint.loader import resume
from air_hpc.checkpoint.ranks import Ranks
from air_hpc.checkpoint.saver import SaveOutcome, Saver, SavesFail
from air_hpc.checkpoint.state import Facts, Identity, seed_generators, share_of, training_state
from air_hpc.config.spec import RunSpec
from air_hpc.data.batches import Batches
from air_hpc.parallel.engine import Engine
from air_hpc.parallel.options import EngineOptions
from air_hpc.parallel.reduce import clip_gradients, gradient_norm, sum_over_ranks
from air_hpc.parallel.world import World
from air_hpc.plan.frozen import config_hash
from air_hpc.plan.types import Plan
from air_hpc.rundir.spool import LOSS, TOKENS_PER_S
from air_hpc.session.session import Session
from air_hpc.train.compute_time import compute_clock
from air_hpc.train.guard import Guard
from air_hpc.train.optimizer import build_optimizer, learning_rate, set_learning_rate
from air_hpc.train.rates import StepMeter, rates
from air_hpc.train.setup import attention_backends, open_batches, set_determinism
from air_hpc.train.watch import LossWatch

SAY_INTERVAL_S = 10.0
LAST_TRIES = 5
"""To save the state after the last step: it is the run's result."""
LAST_PAUSE_S = 1.0
"""After the first of them; twice as long after each other one."""
STOP_TRIES = 2
"""To save the state at a stop, whose grace is short."""
_GUARD = "guard"
"""The fact of a manifest that holds the guard's state."""


@dataclass(frozen=True)
class _Seen:
    """What was read of a step, None where it was not; whether the optimizer is to step."""

    loss: float | None = None
    norm: float | None = None
    updates: bool = True


@dataclass(frozen=True)
class Ended:
    """How the loop ended: after `step` steps, all of them or not, saved or not."""

    step: int
    finished: bool
    saved: bool


class Trainer:
    """The model, its optimizer and its data on one worker."""

    def __init__(
        self,
        session: Session,
        spec: RunSpec,
        plan: Plan,
        world: World,
        peak_flops_per_device: float | None = None,
    ) -> None:
        self.session = session
        self.spec = spec
        self.plan = plan
        self.world = world
        self.ranks = Ranks(world.rank, world.world_size, world.device, world.control)
        self.peak_flops = (
            None if peak_flops_per_device is None else peak_flops_per_device * world.world_size
        )
        set_determinism(spec.train.deterministic, world.device)
        with session.phase("data"):
            self.batches, data_digest = self._open_data()
        self.identity = Identity(
            data_digest,
            spec.data.sequence_length,
            spec.train.global_batch_size,
            spec.train.seed,
        )
        with session.phase("init"):
            self.engine = self._build()
            self.held = self.engine.held()
            self.optimizer = build_optimizer(self.engine.parameters(), spec.optimizer, world.device)
        self.step = 0
        self._computed_steps = 0
        self._compute = compute_clock(world.device)
        self._said = 0.0
        self._due_step: int | None = None
        self._step_time_s: float | None = None
        with session.phase("load"):
            self._resume()

    def run(self) -> Ended:
        """Train to the end or to the agreed stop. The session is told nothing of the end yet.

        Raises LossDiverged where the guard asks for it, and SavesFail where all steps are done and
        the last state could not be saved.
        """
        saver = self._saver
        last = self.spec.train.steps
        meter = StepMeter()
        self._compute.start()
        try:
            with attention_backends(self.spec.train.deterministic, self.world.device):
                while self.step < last and self.session.begin_step(self.step + 1):
                    saver.check()
                    self._train_step(saver, meter)
            self._save_last(saver, finished=self.step >= last)
        except BaseException:
            saver.abandon()
            raise
        saver.close()
        # Nothing is lost by a stop before the first step.
        saved = self.step in (0, saver.newest_step)
        return Ended(self.step, finished=self.step >= last, saved=saved)

    # -- a step ----------------------------------------------------------------------------------

    def _train_step(self, saver: Saver, meter: StepMeter) -> None:
        step = self.step + 1
        rate = learning_rate(
            self.step, self.spec.train.steps, self.spec.optimizer.lr, self.spec.schedule
        )
        set_learning_rate(self.optimizer, rate)
        loss = self.engine.step(self._tokens())
        self._watch.look_back()
        logs = step % self.spec.train.log_interval_steps == 0 or step == self.spec.train.steps
        norm = None
        if self.spec.optimizer.grad_clip is not None:
            norm = clip_gradients(self.held, self.spec.optimizer.grad_clip)
        elif logs:
            norm = gradient_norm(self.held)
        early = self._guard.decides_early or self._numbers_are_at_hand()
        seen = self._look(step, norm, loss, logs=logs) if early else _Seen()
        if seen.updates:
            self.optimizer.step()
        self.engine.finish_step(updates=seen.updates)
        self.optimizer.zero_grad(set_to_none=True)
        self.step = step
        meter.count()
        self._computed_steps += 1
        pauses = logs or self._save_is_due(step)
        if pauses:
            # What follows the ranks do not do alike, or together.
            self._compute.stop()
        if not early and logs:
            seen = self._look(step, norm, loss, logs=True)
        elif not early and norm is not None:
            self._watch.look_later(step, norm)
        metrics: dict[str, float] = {}
        if seen.loss is not None:
            metrics[LOSS] = seen.loss
            metrics["train/lr"] = rate
            if seen.norm is not None:
                metrics["train/grad_norm"] = seen.norm
            metrics["train/epoch"] = self.batches.epoch_at(step)
            metrics["train/tokens"] = float(step * self.plan.tokens_per_step)
            step_time_s = meter.step_time_s(saver.blocked_s)
            if step_time_s is not None:
                self._step_time_s = step_time_s
                metrics |= rates(
                    step_time_s,
                    self.plan.tokens_per_step,
                    self.plan.flops_per_token,
                    self.peak_flops,
                )
        self.session.end_step(step, metrics)
        if metrics:
            self._say(step, metrics)
        if logs and self._compute.total_ns is not None:
            self.session.computed(self._compute.total_ns, self._computed_steps)
        if self._save_is_due(step) and step < self.spec.train.steps:
            self._save(saver)
        if pauses:
            self._compute.start()

    def _look(
        self, step: int, norm: torch.Tensor | None, loss: torch.Tensor, *, logs: bool
    ) -> _Seen:
        """Read the numbers of a step, let the guard judge them, and hear when to save."""
        loss_value = None
        if logs:
            loss_value = self._reduced(step, loss)
        norm_value = None if norm is None else float(norm)
        updates = self._watch.look(step, norm_value, loss_value)
        return _Seen(loss_value, norm_value, updates)

    def _numbers_are_at_hand(self) -> bool:
        """Whether reading a number off the device waits for nothing."""
        return self.world.device.type == "cpu"

    def _reduced(self, step: int, loss: torch.Tensor) -> float:
        """The mean loss of the step; with it comes rank 0's word on when to save, if needed."""
        if self.spec.checkpoint.interval_steps != "auto":
            return float(sum_over_ranks(loss))
        vote = 0
        if self.session.is_first:
            vote = self._timer.vote(self._step_time_s, self.spec.train.log_interval_steps)
        # The others say nothing, so the sum is rank 0's word.
        pair = torch.stack((loss, torch.full_like(loss, float(vote))))
        mean, told = sum_over_ranks(pair).tolist()
        if told:
            self._due_step = step + round(told) - 1
        return float(mean)

    def _say(self, step: int, metrics: dict[str, float]) -> None:
        """A line for people in rank 0's log, at most one in SAY_INTERVAL_S but for the last."""
        now = time.monotonic()
        last = step == self.spec.train.steps
        if self.session.is_first and (last or now - self._said >= SAY_INTERVAL_S):
            self._said = now
            rate = metrics.get(TOKENS_PER_S)
            speed = "" if rate is None else f", {rate:,.0f} tokens/s"
            loss = metrics[LOSS]
            print(f"step {step} of {self.spec.train.steps}: loss {loss:.4f}{speed}", flush=True)

    def _tokens(self) -> torch.Tensor:
        """This data rank's tokens of the present step."""
        return torch.from_numpy(self.batches.step_batch(self.step)).to(self.world.device)

    # -- before and after ------------------------------------------------------------------------

    def _open_data(self) -> tuple[Batches, str]:
        session = self.session
        return open_batches(
            self.spec,
            self.plan,
            session.run,
            self.world,
            self.ranks,
            session.env.skipped_batches,
        )

    def _build(self) -> Engine:
        engine = Engine(
            self.spec.model,
            self.spec.data.sequence_length,
            self.spec.train.seed,
            self.world,
            EngineOptions.of(self.spec),
            self.plan.accumulation_steps,
            self.plan.micro_batch_size,
        )
        shape = (self.plan.micro_batch_size, self.spec.data.sequence_length)
        engine.settle(torch.zeros(shape, dtype=torch.long, device=self.world.device))
        return engine

    def _resume(self) -> None:
        seed_generators(self.spec.train.seed, 0, self.world.rank)
        resumed = resume(
            self.session,
            self.ranks,
            self.engine.parts,
            self.optimizer,
            self.identity,
            self.plan.mesh,
        )
        if resumed is not None:
            self.step = resumed.step
        self._guard = Guard(
            self.spec.train.guard,
            rollbacks=len(self.session.env.skipped_batches),
            facts=None if resumed is None else resumed.facts.get(_GUARD),
        )
        facts = Facts(
            identity=self.identity,
            config_hash=config_hash(self.spec, self.plan),
            world_size=self.world.world_size,
            mesh=self.plan.mesh,
            device=self.world.device.type,
            torch=torch.__version__,
        )
        self._saver = Saver(
            self.session,
            self.ranks,
            self.spec.checkpoint,
            asdict(facts),
            verified=None if resumed is None else resumed.step,
        )
        self._watch = LossWatch(self.session, self._guard, self.batches, self._saver)
        self._timer = SaveTimer(self.spec.checkpoint, self.plan.nodes)

    # -- saves -----------------------------------------------------------------------------------

    def _save_is_due(self, step: int) -> bool:
        every = self.spec.checkpoint.interval_steps
        return step == self._due_step if every == "auto" else step % every == 0

    def _save(self, saver: Saver, *, wait: bool = False) -> SaveOutcome | None:
        """Save the present step, once nothing is known against it or the save before."""
        self._watch.look_back()
        self._watch.hear_save(saver.wait())
        told = {}
        if self.spec.checkpoint.interval_steps == "auto":
            told["interval_s"] = self._timer.interval_s
        facts = {_GUARD: self._watch.facts}
        outcome = saver.save(self.step, self._state(), facts=facts, told=told, wait=wait)
        self._timer.saved(saver.last_blocking_s or 0.0)
        self._watch.hear_save(outcome)
        return outcome

    def _state(self) -> dict[str, object]:
        world = self.world
        state = training_state(self.engine.parts, self.optimizer, world.rank, world.device)
        return share_of(state, world.stage_rank, world.stage_ranks, self.engine.written_elsewhere())

    def _save_last(self, saver: Saver, *, finished: bool) -> None:
        """Save the present step if it is not saved yet, again if that fails, and again.

        A stop leaves with what it has, inside its grace. A run that has done all its steps would
        lose its result: it tries longer, and raises SavesFail (LossDiverged, where the state holds
        a NaN or Inf and no try can help).
        """
        self._watch.look_back()
        self._watch.hear_save(saver.wait())
        outcome: SaveOutcome | None = None
        for number in range(LAST_TRIES if finished else STOP_TRIES):
            if self.step in (0, saver.newest_step):
                return
            if number and finished:
                time.sleep(LAST_PAUSE_S * 2 ** (number - 1))
            outcome = self._save(saver, wait=True)
            if outcome is not None and outcome.not_finite:
                break  # no other try would find another state
        if not finished or outcome is None or self.step == saver.newest_step:
            return
        if outcome.not_finite:
            raise self._watch.lost_state(outcome)
        raise SavesFail(
            f"the state after the last step {self.step} could not be saved in {LAST_TRIES} tries: "
            f"{outcome.reason}",
            tried=str(self.session.run.checkpoints_dir),
            next_step="free space or quota there; the run resumes from its newest checkpoint",
        )


def train(
    session: Session,
    spec: RunSpec,
    plan: Plan,
    world: World,
    peak_flops_per_device: float | None = None,
) -> Ended:
    """Train a run on this worker and tell its session how it ended.

    Raises as `Trainer.run`.
    """
    ended = Trainer(session, spec, plan, world, peak_flops_per_device).run()
    with session.phase("finish"):
        if not ended.finished:
            session.stopped(ended.step, saved=ended.saved)
        else:
            session.finished(ended.step)
    return ended
