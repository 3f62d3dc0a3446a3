"""Where Slurm's programs come from.

Every program is started through an `Install`, so another version (in a folder of its own,
reached by chroot) needs one more constructor here and nothing elsewhere.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import BadArguments, DevclusterError

PACKAGES = {
    "munged": "munge",
    "munge": "munge",
    "unmunge": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "scontrol": "slurm-client",
    "sinfo": "slurm-client",
    "squeue": "slurm-client",
    "slurmdbd": "slurmdbd",
    "sacctmgr": "slurm-client",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "mariadb": "mariadb-client",
    "runuser": "util-linux",
    "useradd": "passwd",
}
CORE = ("munged", "munge", "unmunge", "slurmctld", "slurmd", "scontrol", "sinfo", "squeue")
ACCOUNTING = ("slurmdbd", "sacctmgr", "mariadbd", "mariadb-install-db", "mariadb")
USERS = ("runuser", "useradd")
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Install:
    """One Slurm: the words to put in front of a command, and the folders to search."""

    name: str = "host"
    prefix: tuple[str, ...] = ()
    search_path: str = SEARCH_PATH

    def command(self, program: str, *arguments: str) -> list[str]:
        """The argument list that runs `program` of this install."""
        return [*self.prefix, shutil.which(program, path=self.search_path) or program, *arguments]

    def missing(self, programs: Iterable[str]) -> dict[str, str]:
        """Of `programs`, those not installed, each with the Debian package that has it."""
        return {p: PACKAGES[p] for p in programs if not shutil.which(p, path=self.search_path)}

    def require(self, programs: Iterable[str]) -> None:
        """Raise DevclusterError with the command that installs what is missing."""
        missing = self.missing(programs)
        if missing:
            packages = " ".join(sorted(set(missing.values())))
            raise DevclusterError(
                f"not installed: {', '.join(missing)}. Do: apt-get update && "
                f"apt-get install -y --no-install-recommends {packages}"
            )

    def environment(self, slurm_conf: str = "") -> dict[str, str]:
        """A daemon's environment: nothing of the caller's, which may itself be a Slurm job."""
        clean = {"PATH": self.search_path, "LANG": "C.UTF-8"}
        return clean | ({"SLURM_CONF": slurm_conf} if slurm_conf else {})

    def run(
        self, program: str, *arguments: str, slurm_conf: str = "", timeout_s: float = 60
    ) -> str:
        """The stdout of a program of this install; DevclusterError if it fails or hangs."""
        argv = self.command(program, *arguments)
        try:
            done = subprocess.run(
                argv,
                # TZ: printed times are compared with ours.
                env=self.environment(slurm_conf) | {"TZ": "UTC0"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise DevclusterError(f"`{' '.join(argv)}` gave no answer in {timeout_s:g} s") from None
        except OSError as error:
            raise DevclusterError(f"`{' '.join(argv)}` did not start: {error}") from None
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip() or "(nothing)")[-2000:]
            raise DevclusterError(
                f"`{' '.join(argv)}` ended with code {done.returncode} and said: {said}"
            )
        return done.stdout

    def version(self) -> tuple[int, int]:
        """(year, month) of this Slurm, as in 22.05."""
        text = self.run("slurmd", "-V")
        found = re.search(r"(\d+)\.(\d+)", text)
        if not found:
            raise DevclusterError(f"`slurmd -V` printed no version: {text.strip()!r}")
        return int(found[1]), int(found[2])


def find_install(name: str) -> Install:
    """The install called `name`; only the host's own for now."""
    if name != "host":
        raise BadArguments(f"--slurm {name}: only `host` (the machine's own Slurm) is known")
    return Install()


def require_root() -> None:
    """Raise DevclusterError unless this is root (mknod, munged, useradd, jobs of others)."""
    if os.geteuid() != 0:
        raise DevclusterError("devcluster must run as root: it starts daemons for several users")
