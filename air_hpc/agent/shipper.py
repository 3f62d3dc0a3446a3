"""The process that feeds MLflow, kept apart so that neither it nor MLflow can disturb training."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping

from air_hpc.agent.starters import WorkerStart, spawn_helper
from air_hpc.rundir.atomic import make_dir, open_file
from air_hpc.rundir.layout import RunDir
from air_hpc.session.process import kill_group


class Shipper:
    """A running `python -m air_hpc.tracking RUN_DIR`; it ends when its stdin is closed."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def start(
        cls, run: RunDir, attempt: int, python: str, environ: Mapping[str, str]
    ) -> Shipper | None:
        """Start it with its output in `attempts/<k>/shipper.log`; None when it cannot start."""
        try:
            folder = run.attempts_dir / str(attempt)
            make_dir(folder, exist_ok=True)
            log = open_file(folder / "shipper.log", os.O_WRONLY | os.O_APPEND)
        except OSError:
            return None
        try:
            argv = [python, "-m", "air_hpc.tracking", str(run.path)]
            start = WorkerStart(argv, environ, (), log)
            return cls(spawn_helper(start, stdin=subprocess.PIPE))
        except OSError:
            return None
        finally:
            os.close(log)

    def drain(self, timeout_s: float) -> bool:
        """Let it ship what is left, killed after `timeout_s`; whether it ended by itself."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            kill_group(self._process.pid)
            self._process.wait(5)
            return False
        return True
