"""Slurm's version: probed, never assumed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from air_hpc.errors import EnvironmentFailure
from air_hpc.slurm import command


@dataclass(frozen=True, order=True)
class SlurmVersion:
    """Ordered as Slurm's releases are: SlurmVersion(23, 2, 0) < SlurmVersion(24, 11, 5)."""

    major: int
    minor: int
    micro: int = 0

    def __str__(self) -> str:
        return f"{self.major}.{self.minor:02d}.{self.micro}"


def parse_version(text: str) -> SlurmVersion:
    """The version in `slurm 24.11.5`, `slurm-wlm 22.05.8` or a plain `22.05.8-1`."""
    match = re.search(r"(\d{2})\.(\d{1,2})(?:\.(\d+))?", text)
    if match is None:
        raise EnvironmentFailure(
            f"no Slurm version in {text.strip()!r}",
            tried="scontrol --version",
            next_step="check that scontrol is Slurm's own",
        )
    return SlurmVersion(int(match[1]), int(match[2]), int(match[3] or 0))


def installed(timeout_s: float = command.DEFAULT_TIMEOUT_S) -> SlurmVersion:
    """The version of the commands on this machine; asks no controller."""
    return parse_version(command.read(["scontrol", "--version"], timeout_s=timeout_s))
