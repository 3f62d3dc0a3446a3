"""Finds `conf/` and `sbatch_templates/`, in a checkout and in an installed wheel alike.

Both folders stand at the top level of the repository and ship inside the wheel as
`air_hpc/conf` and `air_hpc/sbatch_templates`. Everything that needs one asks here.
"""

from __future__ import annotations

from pathlib import Path

from air_hpc.errors import EnvironmentFailure

_PACKAGE = Path(__file__).resolve().parent


def resource_dir(name: str) -> Path:
    """The folder `name` (`conf` or `sbatch_templates`); raises EnvironmentFailure if absent."""
    candidates = (_PACKAGE / name, _PACKAGE.parent / name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise EnvironmentFailure(
        f"the folder {name} of this installation is missing",
        tried=", ".join(map(str, candidates)),
        next_step="reinstall air_hpc",
    )


def conf_dir() -> Path:
    """The folder of config groups that ship with the project."""
    return resource_dir("conf")


def templates_dir() -> Path:
    """The folder of batch script templates that ship with the project."""
    return resource_dir("sbatch_templates")
