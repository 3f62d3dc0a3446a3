"""The worker as its agent sees it: a process with a page, a socket and an exit code."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from air_hpc.config.spec import RecoverySpec, RunSpec
from air_hpc.plan.frozen import freeze_run, read_run_yaml, render_run_yaml
from air_hpc.plan.types import Mesh
from air_hpc.probes.matmul import device_name
from air_hpc.probes.ports import free_ports
from air_hpc.rundir.commit import committed_steps, read_checkpoint
from air_hpc.rundir.events import Event, Kind
from air_hpc.rundir.fence import Token
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.spool import effective_samples
from air_hpc.rundir.state import fold
from air_hpc.rundir.words import RunState
from air_hpc.session.messages import MAX_BYTES, decode, socket_pair
from air_hpc.session.page import Page, Word
from air_hpc.session.session import WorkerEnv
from air_hpc.tracking.describe import tags
from tests.train.runs import make_run, next_token, plan_for, small_spec, train_ranks

pytestmark = pytest.mark.torch
ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 200.0
"""Far more than anything here takes: a loaded machine must not fail a test."""


@dataclass
class Worker:
    process: subprocess.Popen[str]
    page: Page
    channel: socket.socket

    def messages_until(self, kind: str) -> list[dict[str, Any]]:
        """What the worker says up to the first message of `kind`."""
        heard: list[dict[str, Any]] = []
        while not heard or heard[-1]["kind"] != kind:
            data = self.channel.recv(MAX_BYTES)
            if not data:
                raise AssertionError(f"{heard}\n{self.process.communicate()}")
            message = decode(data)
            assert message is not None
            heard.append(message)
        return heard

    def end(self) -> tuple[int, str]:
        """Exit code and standard error."""
        _, stderr = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, stderr


FORKED = """
import importlib, os, sys
from air_hpc.train import PRELOAD
for name in PRELOAD:
    importlib.import_module(name)
threads, before = len(os.listdir("/proc/self/task")), set(sys.modules)
from air_hpc.train.main import main
code = main()
print(threads, *sorted(set(sys.modules) - before))
sys.exit(code)
"""
"""A worker as a template forks it: all is imported before; says what still was later."""


@contextmanager
def started_worker(
    run: RunDir,
    resume_steps: tuple[int, ...] = (),
    *,
    preflight: bool = False,
    argv: tuple[str, ...] = ("-m", "air_hpc.train"),
) -> Iterator[Worker]:
    page = Page.create()
    page.write(Word.LEASE_NS, 2**62)
    ours, theirs = socket_pair()
    ours.settimeout(DEADLINE_S)
    env = WorkerEnv(
        run=run,
        token=Token.parse(next_token(run)),
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        node_rank=0,
        resume_steps=resume_steps,
        stop_timeout_s=20.0,
        preflight=preflight,
        page_fd=page.fd,
        socket_fd=theirs.fileno(),
    )
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1, str(os.getpid()))[0]),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, *argv],
        cwd=ROOT,
        env={**os.environ, **address, **env.to_environ()},
        pass_fds=(page.fd, theirs.fileno()),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    try:
        yield Worker(process, page, ours)
    finally:
        process.kill()
        process.communicate()
        ours.close()


def frozen_run(runs_dir: Path, spec: RunSpec) -> RunDir:
    run = make_run(runs_dir)
    text = render_run_yaml(freeze_run(run.run_id, spec, plan_for(spec, Mesh())))
    run.run_yaml.write_text(text, encoding="utf-8")
    return run


def tags_after(run: RunDir, measured: dict[str, Any]) -> dict[str, str]:
    """What MLflow is told of a run whose worker said this."""
    events = [Event(1.0, Kind.MEASURED, facts=measured)]
    return tags(run, fold(events), events, state=RunState.RUNNING, rolled_back=())


def test_a_worker_trains_to_the_end_and_says_what_it_measured(tmp_path: Path) -> None:
    run = frozen_run(tmp_path, small_spec(5))
    with started_worker(run, preflight=True) as worker:
        tried, *heard = worker.messages_until("finished")
        code, _ = worker.end()
    assert code == 0
    assert worker.page.read(Word.COMPUTE_STEPS) == 5
    assert worker.page.read(Word.COMPUTE_NS) > 0
    assert tried["kind"] == "preflight"
    assert [(check["name"], check["ok"]) for check in tried["checks"]] == [("matmul", True)]
    assert [m["kind"] for m in heard] == [
        "measured",
        "training_started",
        "save_begun",
        "committed",
        "save_begun",
        "committed",
        "finished",
    ]
    assert heard[0]["peak_source"] == "measured"
    assert heard[0]["peak_flops_per_device"] > 1e8
    assert heard[0]["torch_version"] == torch.__version__
    assert tags_after(run, heard[0])["air_hpc.device"] == device_name(torch.device("cpu"))
    assert committed_steps(run) == [5, 3]
    newest = read_checkpoint(run.checkpoints_dir / "step-5")
    assert newest.facts["config_hash"] == read_run_yaml(run.run_yaml.read_text()).config_hash
    samples = effective_samples(run)
    assert list(samples) == [1, 2, 3, 4, 5]
    assert {"train/loss", "train/lr", "train/grad_norm"} <= set(samples[5].metrics)
    assert {"perf/tokens_per_second", "perf/step_time_s"} <= set(samples[5].metrics)
    assert list((run.shared_dir / "calibrations").glob("matmul-*.json"))


def test_a_worker_of_a_smaller_world_derives_its_plan(tmp_path: Path) -> None:
    """After an elastic restart nobody tells the worker its mesh: it follows from the world size."""
    spec = small_spec(2, recovery=RecoverySpec(restart="elastic"))
    plan = replace(plan_for(spec, Mesh(dp_replicate=2)), nodes=2, devices_per_node=1)
    run = make_run(tmp_path)
    run.run_yaml.write_text(render_run_yaml(freeze_run("run", spec, plan)), encoding="utf-8")
    with started_worker(run) as worker:
        worker.messages_until("finished")
        assert worker.end()[0] == 0
    assert list(effective_samples(run)) == [1, 2]


def test_a_forked_worker_imports_nothing_more_after_a_restart(tmp_path: Path) -> None:
    """Each of them once imported torch._inductor anew, for a second of CPU time: two cores with
    four workers stood still for it at every restart."""
    spec = small_spec(5)
    run = frozen_run(tmp_path, spec)
    train_ranks(
        0, str(tmp_path / "store"), str(run.path), next_token(run), spec, plan_for(spec, Mesh())
    )
    shutil.rmtree(run.checkpoints_dir / "step-5")
    with started_worker(run, (3,), argv=("-c", FORKED)) as worker:
        worker.messages_until("finished")
        threads, *late = worker.process.communicate()[0].splitlines()[-1].split()
    assert threads == "1"  # or the template would not fork
    assert set(late) <= {"torch.profiler._cupti_monitor"}  # which torch imports with an operation


def test_signals_do_not_end_a_worker_and_an_agreed_stop_does(tmp_path: Path) -> None:
    spec = small_spec(10**9)
    spec = replace(spec, checkpoint=replace(spec.checkpoint, interval_steps=10**6))
    run = frozen_run(tmp_path, spec)
    with started_worker(run) as worker:
        worker.messages_until("training_started")
        for name in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            worker.process.send_signal(name)
        # As an agent does it: the flag first, then the begun step is the target.
        worker.page.write(Word.STOP_FLAG, 1)
        target = worker.page.read(Word.BEGUN_STEP)
        worker.page.write(Word.TARGET_STEP, target)
        stopped = worker.messages_until("stopped")[-1]
        code, _ = worker.end()
    assert (code, stopped["step"], stopped["saved"]) == (0, target, True)
    assert committed_steps(run) == [target]


@pytest.mark.parametrize(
    ("spoil", "failure_class", "code", "said"),
    [
        ("edited", "user_error", 2, "was edited after it was written"),
        ("data", "environment", 1, "data.cache_dir"),
    ],
)
def test_a_failing_worker_says_why_before_it_leaves(
    tmp_path: Path, spoil: str, failure_class: str, code: int, said: str
) -> None:
    spec = small_spec(5)
    if spoil == "data":
        (tmp_path / "file").write_text("")
        spec = replace(spec, data=replace(spec.data, cache_dir=str(tmp_path / "file")))
    run = frozen_run(tmp_path, spec)
    if spoil == "edited":
        text = run.run_yaml.read_text()
        run.run_yaml.write_text(text.replace("steps: 5", "steps: 6"))
    with started_worker(run) as worker:
        error = worker.messages_until("error")[-1]
        ended = worker.end()
    assert ended[0] == code
    assert error["failure_class"] == failure_class
    assert said in error["message"]
    assert said in ended[1]
    assert "Traceback" not in ended[1]


def test_a_loss_that_diverges_is_told_with_the_batches_to_step_over(tmp_path: Path) -> None:
    spec = small_spec(50)
    spec = replace(spec, optimizer=replace(spec.optimizer, lr=1e35))
    run = frozen_run(tmp_path, spec)
    with started_worker(run) as worker:
        heard = worker.messages_until("error")
        code, said = worker.end()
    alarm = next(message for message in heard if message["kind"] == "loss_alarm")
    error = heard[-1]
    assert (code, error["failure_class"]) == (1, "diverged")
    facts = error["facts"]
    assert facts["action"] == alarm["action"] == "rollback"
    assert (facts["first_batch"], facts["last_batch"]) == (0, facts["bad_step"] - 1)
    assert facts["from_step"] == 0
    assert alarm["reason"] in error["message"]
    assert "nan" in error["message"]
    assert "Traceback" not in said
    assert committed_steps(run) == []


def test_a_worker_without_an_agent_says_so() -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("AIR_HPC_")}
    done = subprocess.run(
        [sys.executable, "-m", "air_hpc.train"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "started by its agent" in done.stderr
    assert "Traceback" not in done.stderr
