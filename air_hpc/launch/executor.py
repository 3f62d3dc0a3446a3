"""A small subclass of submitit's Slurm executor: it names our own command and pickles nothing.

What submitit does for us: it renders options as #SBATCH lines and is the seam where sbatch is
called and its answer read. What is different here, and tested: no wckey, and no option that was not
asked for (submitit adds a time, an error file, and `no_requeue: False` as a flag); the script is
durable before sbatch is called; sbatch runs once, in a scrubbed environment, with a deadline; its
answer is read past banners; and `submit` of a function, which would pickle it, is refused.
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
from air_hpc.slurm import command, environment, jobs


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

    def __init__(self, script: Path, *, timeout_s: float, sbatch_args: Sequence[str] = ()) -> None:
        """`script` lies ready; `sbatch_args` stand on the command line only."""
        super().__init__(folder=script.parent)
        self.script = script
        self.timeout_s = timeout_s
        self.sbatch_args = tuple(sbatch_args)

    @classmethod
    def affinity(cls) -> int:
        """Scripts can be rendered without Slurm too; sbatch itself says when it is missing."""
        return 2

    def _internal_process_submissions(self, delayed_submissions: Any) -> Any:
        raise NotImplementedError("functions are never pickled: use `submit_script`")

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", "--parsable", *self.sbatch_args, str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        return jobs.job_id_of(string if isinstance(string, str) else string.decode())

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
