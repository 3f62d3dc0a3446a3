"""A real Slurm for tests: `DevCluster` drives tools/devcluster by its command line.

A cluster lives in a folder of its own below /tmp that ordinary users can enter (pytest's own
temporary folders they cannot). Use the fixture `devcluster` for the shared one of 8 nodes; start
one of your own only for another shape:

    with DevCluster() as cluster:
        cluster.up(nodes=4)
        job = cluster.submit("sleep 60", "-N", "2")
        cluster.wait_for_job(job, "RUNNING")
        cluster.kill_node("n2")
"""

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

TOOL = Path(__file__).resolve().parent.parent / "tools" / "devcluster"
USER = "airhpc"
POLL_S = 0.1

T = TypeVar("T")


def why_no_cluster() -> str:
    """Why this machine can run no devcluster; empty where it can."""
    if os.geteuid() != 0:
        return "needs root, for daemons of several users"
    missing = [p for p in ("slurmctld", "slurmd", "sbatch", "munged") if not shutil.which(p)]
    if missing:
        return f"not installed: {', '.join(missing)} (slurmctld slurmd slurm-client munge)"
    return ""


class DevCluster:
    """One cluster; `down` (or the end of a with block) leaves nothing of it."""

    def __init__(self, state: Path | None = None) -> None:
        self.state = state or Path(tempfile.mkdtemp(prefix="devcluster-", dir="/tmp"))
        self.state.mkdir(parents=True, exist_ok=True)
        self.state.chmod(0o755)
        self.user = USER

    def __enter__(self) -> "DevCluster":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    @property
    def conf(self) -> Path:
        """The cluster's slurm.conf."""
        return Path(os.path.realpath(self.state)) / "etc" / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """What a process needs in its environment to use the cluster."""
        return {"SLURM_CONF": str(self.conf)}

    def tool(self, *words: str, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
        """Run a verb of tools/devcluster on this cluster; raise AssertionError if it fails."""
        verb, *rest = words
        return self._checked(
            [sys.executable, str(TOOL), verb, "--state", str(self.state), *rest],
            timeout_s=timeout_s,
        )

    def up(
        self,
        nodes: int = 8,
        devices_per_node: int = 2,
        *,
        cpus_per_node: int = 8,
        topology: str = "tree",
        accounting: bool = False,
        exclusive: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> "DevCluster":
        """Start it and wait until all nodes are idle. `settings` are lines of slurm.conf."""
        words = ["--nodes", str(nodes), "--devices-per-node", str(devices_per_node)]
        words += ["--cpus-per-node", str(cpus_per_node), "--topology", topology]
        words += ["--accounting"] if accounting else []
        words += ["--exclusive"] if exclusive else []
        for key, value in (settings or {}).items():
            words += ["--set", f"{key}={value}"]
        self.tool("up", *words)
        return self

    def down(self) -> None:
        """End all processes of the cluster and remove its folder."""
        self.tool("down")
        shutil.rmtree(self.state, ignore_errors=True)

    def status(self) -> dict[str, object]:
        """The JSON of `devcluster status`."""
        found: dict[str, object] = json.loads(self.tool("status", "--json").stdout)
        return found

    def kill_node(self, *nodes: str) -> None:
        """The nodes die, with every process of their jobs."""
        self.tool("kill-node", *nodes)

    def isolate_node(self, *nodes: str) -> None:
        """Slurm loses the nodes; their tasks live on."""
        self.tool("isolate-node", *nodes)

    def revive_node(self, *nodes: str) -> None:
        """The nodes take jobs again."""
        self.tool("revive-node", *nodes)

    def drain_node(self, *nodes: str) -> None:
        """The nodes take no further job."""
        self.tool("drain-node", *nodes)

    def clean(self) -> None:
        """Cancel every job and bring every node back, whatever a test has done."""
        self._cancel_all()
        self.revive_node(*self.run(["sinfo", "-h", "-o", "%N"]).stdout.split())
        self.wait_until(self._cancel_all, "the cancelled jobs to be gone")

    def _cancel_all(self) -> bool:
        jobs = self.run(["squeue", "-h", "-o", "%A"]).stdout.split()
        if jobs:  # one may end meanwhile, which scancel calls an error
            self.run(["scancel", *set(jobs)], check=False)
        return not jobs

    def run(
        self,
        command: Sequence[str],
        user: str | None = None,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        check: bool = True,
        timeout_s: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with the cluster's SLURM_CONF, as `user` (default: the caller, root).

        With `user` only PATH, HOME, `env` and SLURM_CONF are in its environment.
        """
        extra = {**(env or {}), **self.env}
        if user is None:
            return self._checked(
                list(command), env={**os.environ, **extra}, cwd=cwd, check=check,
                timeout_s=timeout_s,
            )  # fmt: skip
        home = pwd.getpwnam(user).pw_dir
        clean = {"PATH": os.environ["PATH"], "HOME": home, "LANG": "C.UTF-8", **extra}
        words = [f"{key}={value}" for key, value in clean.items()]
        return self._checked(
            ["runuser", "-u", user, "--", "env", "-i", *words, *command],
            cwd=cwd or Path(home), check=check, timeout_s=timeout_s,
        )  # fmt: skip

    def submit(self, script: str, *options: str, user: str | None = USER) -> str:
        """sbatch a script of shell lines; the job's id. Its log lies in the cluster's folder or,
        for an ordinary user, in the home folder."""
        words = ["sbatch", "--parsable", *options, "--wrap", script]
        cwd = self.state if user is None else None
        return self.run(words, user=user, cwd=cwd).stdout.strip().split(";")[0]

    def job(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` says, by key."""
        text = self.run(["scontrol", "-o", "show", "job", job_id]).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait_for_job(self, job_id: str, *states: str, timeout_s: float = 60) -> dict[str, str]:
        """Wait until the job is in one of `states`; its description then."""
        return self.wait_until(
            lambda: job if (job := self.job(job_id))["JobState"] in states else None,
            f"job {job_id} to be {' or '.join(states)}",
            timeout_s,
        )

    def wait_until(self, look: Callable[[], T | None], what: str, timeout_s: float = 60) -> T:
        """The first true value of `look`; AssertionError with the cluster's state at the end."""
        deadline = time.monotonic() + timeout_s
        while not (value := look()):
            if time.monotonic() > deadline:
                jobs = self.run(["squeue"], check=False).stdout
                nodes = self.run(["sinfo", "-N"], check=False).stdout
                raise AssertionError(f"waited {timeout_s:g} s for {what}\n{jobs}\n{nodes}")
            time.sleep(POLL_S)
        return value

    @staticmethod
    def _checked(
        words: list[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        check: bool = True,
        timeout_s: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            words,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if check and done.returncode:
            raise AssertionError(
                f"{' '.join(words)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
        return done
