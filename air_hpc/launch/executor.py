"""A small subclass of submitit's Slurm executor: it names our own command and pickles nothing.

What submitit does for us: rendering options as #SBATCH lines and the sequence of writing a script,
calling sbatch and reading its answer. What is different here, and tested: no wckey, no option that
is not asked for (submitit renders a default time, stderr file and `no_requeue: False` as a flag);
the script is written where the caller says, durable before sbatch is called; sbatch runs once, in
a scrubbed environment with a deadline; its answer is read past banners; and `submit` of a function,
which would pickle it, is refused.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor, _as_sbatch_flag

from air_hpc.errors import BadInput
from air_hpc.launch.options import Options
from air_hpc.launch.quote import header_problem
from air_hpc.rundir.atomic import write_atomic
from air_hpc.slurm import command, environment, jobs

SCRIPT_MODE = 0o700


def header_lines(chosen: Options) -> list[str]:
    """The #SBATCH lines of these options, in their order, as submitit renders each.

    Raises BadInput for a value that sbatch would not read back exactly.
    """
    bad = [p for name, v in chosen if isinstance(v, str) and (p := header_problem(v, name))]
    if bad:
        raise BadInput(bad)
    return [str(_as_sbatch_flag(name, value)) for name, value in chosen]


class AgentExecutor(SlurmExecutor):  # type: ignore[misc]
    """Writes one script and submits it; see the module's docstring."""

    def __init__(
        self, script: Path, chosen: Options, *, timeout_s: float, sbatch_args: Sequence[str] = ()
    ) -> None:
        """`script` is where the script is to lie; `sbatch_args` stand on the command line only."""
        super().__init__(folder=script.parent)
        self.script = script
        self.chosen = chosen
        self.timeout_s = timeout_s
        self.sbatch_args = tuple(sbatch_args)

    @classmethod
    def affinity(cls) -> int:
        """Scripts can be rendered without Slurm too; sbatch itself says when it is missing."""
        return 2

    def _internal_process_submissions(self, delayed_submissions: Any) -> Any:
        raise NotImplementedError("functions are never pickled: use `submit_script`")

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return "\n".join(["#!/bin/bash", *header_lines(self.chosen), "", command])

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", "--parsable", *self.sbatch_args, str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        return jobs.job_id_of(string if isinstance(string, str) else string.decode())

    def write(self, body: str) -> None:
        """Write the script, durable before this returns."""
        text = self._make_submission_file_text(body, uid="")
        write_atomic(self.script, text.encode(), mode=SCRIPT_MODE)

    def submit_script(self) -> tuple[str, str]:
        """Run sbatch once on the written script: the job id, and all that sbatch printed.

        Raises CommandFailure (refused), CommandTimeout (no answer: it may have been submitted).
        """
        result = command.run_once(
            self._make_submission_command(self.script),
            timeout_s=self.timeout_s,
            environ=environment.scrubbed(os.environ),
        )
        return self._get_job_id_from_submission_command(
            result.stdout
        ), result.stdout + result.stderr
