"""The environment that Slurm's commands are run in.

sbatch takes options from SBATCH_* and SLURM_*, srun from SRUN_* and SLURM_*, and squeue, sacct,
sinfo and scontrol change what they print by variables of their own. Started from inside an
allocation they would inherit another job's choices (a foreign SLURM_CPU_BIND makes a job several
times slower without a word). So every command runs in a scrubbed environment, and what a user
meant as a default (SBATCH_ACCOUNT, ...) is read once, here, and recorded in the run.
"""

from __future__ import annotations

from collections.abc import Mapping

KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Without these a command may not find, or may not be let in by, its own cluster."""

SCRUBBED_PREFIXES = (
    "SLURM_",
    "SBATCH_",
    "SRUN_",
    "SALLOC_",
    "SQUEUE_",
    "SACCT_",
    "SACCTMGR_",
    "SINFO_",
    "SCONTROL_",
    "SCANCEL_",
    "PMI_",
    "PMIX_",
)

USER_DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_RESERVATION": "reservation",
}
"""Variables of the sbatch manual page that a user sets as a default, and the launch key of each."""


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without what Slurm's commands would read as options; KEPT stays."""
    return {
        name: value
        for name, value in environ.items()
        if name in KEPT or not name.startswith(SCRUBBED_PREFIXES)
    }


def for_parsing(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a command whose output is parsed: scrubbed, in the C locale.

    Not for sbatch: with `--export=ALL` the locale would follow the job.
    """
    return {**scrubbed(environ), "LC_ALL": "C"}


def user_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Launch keys the user has defaults for in the environment, with their values."""
    return {key: environ[name] for name, key in USER_DEFAULTS.items() if environ.get(name)}
