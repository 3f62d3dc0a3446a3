"""The native loop: one optimizer step after another, from the first or from a checkpoint.

Step n (1 is the first) trains on batch n - 1 of the sample order and leads to the state "after n
steps". A step is: begin it with the session, micro-batches forward and backward, clip, update,
end it. Between two steps lie at most a save and, every `log_interval_steps`, one small reduction
for the global loss; nothing else touches the network or the file system.

The loop ends in one of three ways, each with its last state saved while all wait for it: all steps
are done (FINISHED), a stop was agreed on (STOPPED), or an exception, which is the caller's.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import torch

from air_hpc.checkpoint.loader import resume
from air_hpc.checkpoint.ranks import Ranks
from air_hpc.checkpoint.saver import Saver
from air_hpc.checkpoint.state import Facts, Identity, seed_generators, share_of, training_state
from air_hpc.config.spec import RunSpec
from air_hpc.data.batches import Batches
from air_hpc.errors import EnvironmentFailure
from air_hpc.models.llama import next_token_loss
from air_hpc.parallel.reduce import clip_gradients, gradient_norm, mean_over_data_ranks
from air_hpc.parallel.world import World
from air_hpc.parallel.wrap import Spread, WrapOptions, build_spread
from air_hpc.plan.frozen import config_hash
from air_hpc.plan.types import Plan
from air_hpc.rundir.spool import LOSS, TOKENS_PER_S
from air_hpc.session.session import Session
from air_hpc.train.compute_time import compute_clock
from air_hpc.train.optimizer import build_optimizer, learning_rate, set_learning_rate
from air_hpc.train.rates import StepMeter, rates
from air_hpc.train.setup import attention_backends, open_batches, set_determinism

SAY_INTERVAL_S = 10.0


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
            self.spread = self._build()
            self.parameters = list(self.spread.module.parameters())
            self.optimizer = build_optimizer(self.parameters, spec.optimizer, world.device)
        self.step = 0
        self._computed_steps = 0
        self._compute = compute_clock(world.device)
        self._said = 0.0
        with session.phase("load"):
            self._resume()

    def run(self) -> Ended:
        """Train to the end or to the agreed stop. The session is told nothing of the end yet."""
        saver = self._saver
        last = self.spec.train.steps
        meter = StepMeter()
        self._compute.start()
        try:
            with attention_backends(self.spec.train.deterministic, self.world.device):
                while self.step < last and self.session.begin_step(self.step + 1):
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
        loss = self._forward_backward()
        logs = step % self.spec.train.log_interval_steps == 0 or step == self.spec.train.steps
        norm = None
        if self.spec.optimizer.grad_clip is not None:
            norm = clip_gradients(self.parameters, self.spec.optimizer.grad_clip)
        elif logs:
            norm = gradient_norm(self.parameters)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step = step
        meter.count()
        self._computed_steps += 1
        saves = step % self.spec.checkpoint.interval_steps == 0 and step < self.spec.train.steps
        if logs or saves:
            # What follows the ranks do not do alike, or together.
            self._compute.stop()
        metrics: dict[str, float] = {}
        if logs:
            metrics[LOSS] = float(mean_over_data_ranks(loss, self.world))
            metrics["train/lr"] = rate
            if norm is not None:
                metrics["train/grad_norm"] = float(norm)
            metrics["train/epoch"] = self.batches.epoch_at(step)
            metrics["train/tokens"] = float(step * self.plan.tokens_per_step)
            step_time_s = meter.step_time_s(saver.blocked_s)
            if step_time_s is not None:
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
        if saves:
            saver.save(step, self._state())
        if logs or saves:
            self._compute.start()

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

    def _forward_backward(self) -> torch.Tensor:
        """Gradients of the whole step; returns this rank's mean loss, on the device."""
        device = self.world.device
        tokens = torch.from_numpy(self.batches.step_batch(self.step)).to(device)
        count = tokens.shape[0]
        total = torch.zeros((), device=device)
        for number, part in enumerate(tokens):
            with self.spread.micro_batch(last=number == count - 1):
                with self.spread.autocast():
                    logits = self.spread.module(part[:, :-1])
                    loss = next_token_loss(logits, part[:, 1:]) / count
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    # -- before and after ------------------------------------------------------------------------

    def _open_data(self) -> tuple[Batches, str]:
        return open_batches(self.spec, self.plan, self.session.run, self.world, self.ranks)

    def _build(self) -> Spread:
        options = WrapOptions(
            precision=self.spec.train.precision,
            reshard_after_forward=self.spec.parallelism.reshard_after_forward,
            cpu_offload=self.spec.parallelism.cpu_offload,
            compile=self.spec.train.compile,
        )
        spread = build_spread(
            self.spec.model,
            self.spec.data.sequence_length,
            self.spec.train.seed,
            self.world,
            options,
        )
        shape = (self.plan.micro_batch_size, self.spec.data.sequence_length)
        spread.settle(torch.zeros(shape, dtype=torch.long, device=self.world.device))
        return spread

    def _resume(self) -> None:
        module = self.spread.module
        seed_generators(self.spec.train.seed, 0, self.world.rank)
        resumed = resume(self.session, self.ranks, module, self.optimizer, self.identity)
        if resumed is not None:
            self.step = resumed.step
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

    def _state(self) -> dict[str, object]:
        world = self.world
        state = training_state(self.spread.module, self.optimizer, world.rank, world.device)
        return share_of(state, world.rank, world.world_size)

    def _save_last(self, saver: Saver, *, finished: bool) -> None:
        """Save the present step if it is not saved yet, and once more if that fails.

        A run that has done all its steps goes on trying until the saver gives up: its result would
        be lost. A stop leaves with what it has, inside its grace.
        """
        saver.wait()
        tries = 0
        while saver.newest_step != self.step and self.step > 0 and (finished or tries < 2):
            tries += 1
            saver.save(self.step, self._state(), wait=True)


def train(
    session: Session,
    spec: RunSpec,
    plan: Plan,
    world: World,
    peak_flops_per_device: float | None = None,
) -> Ended:
    """Train a run on this worker and tell its session how it ended.

    Raises EnvironmentFailure where all steps are done but the result could not be saved.
    """
    ended = Trainer(session, spec, plan, world, peak_flops_per_device).run()
    with session.phase("finish"):
        if not ended.finished:
            session.stopped(ended.step, saved=ended.saved)
        elif ended.saved:
            session.finished(ended.step)
        else:
            raise EnvironmentFailure(f"the state after the last step {ended.step} was not saved")
    return ended
