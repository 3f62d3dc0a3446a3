"""The folder a cluster lives in.

A state folder is made by `up` and emptied by `down`; only names that `up` makes are ever removed,
and only where the marker `cluster.json` says that it is a cluster's.
"""

import contextlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from .errors import BadArguments, DevclusterError
from .processes import Process, read_process

# The longest socket below it is /spool/n1024/n1024_4294967295.4294967295 (46 characters), and
# a socket's path has room for 107 (unix(7)).
MAX_STATE_PATH = 60
FOLDERS = ("etc", "log", "run", "spool", "ctld", "devices", "mysql")


def default_state() -> str:
    """The state folder used when none is named."""
    return os.environ.get("AIR_HPC_DEVCLUSTER") or f"/tmp/air_hpc-devcluster-{os.getuid()}"


@dataclass(frozen=True)
class State:
    """One cluster's folder."""

    root: Path

    @property
    def slurm_conf(self) -> Path:
        """The file that SLURM_CONF names."""
        return self.root / "etc" / "slurm.conf"

    @property
    def marker(self) -> Path:
        """The file that makes the folder a cluster's; holds what was asked for."""
        return self.root / "cluster.json"

    def folder(self, name: str) -> Path:
        """One of FOLDERS."""
        return self.root / name

    def create(self) -> None:
        """Make an empty cluster folder; refuse one that holds something else."""
        if self.root.exists() and not self.marker.exists() and any(self.root.iterdir()):
            raise DevclusterError(
                f"{self.root} is not empty and no cluster of devcluster's: name another --state"
            )
        self.clear()
        self.root.mkdir(parents=True, exist_ok=True, mode=0o755)
        if self.root.stat().st_uid != os.geteuid():
            raise DevclusterError(f"{self.root} belongs to another user: name another --state")
        self.root.chmod(0o755)
        self.marker.write_text("{}\n")
        for name in FOLDERS:
            self.folder(name).mkdir(mode=0o755)
            self.folder(name).chmod(0o755)

    def clear(self, keep_logs: bool = False) -> None:
        """Remove what `create` and the daemons made; nothing else."""
        if not self.marker.exists():
            return
        for name in FOLDERS:
            if not (keep_logs and name == "log"):
                shutil.rmtree(self.folder(name), ignore_errors=True)
        if keep_logs:
            return
        (self.root / "daemons.jsonl").unlink(missing_ok=True)
        self.marker.unlink()
        with contextlib.suppress(OSError):  # not empty: what is left is not ours
            self.root.rmdir()

    def read(self) -> dict[str, object]:
        """What `up` wrote into the marker; empty where there is no cluster."""
        try:
            content = json.loads(self.marker.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise DevclusterError(f"{self.marker} is not readable: {error}") from None
        return content if isinstance(content, dict) else {}

    def write(self, content: dict[str, object]) -> None:
        """Replace the marker's content, whole or not at all."""
        aside = self.marker.with_suffix(".new")
        aside.write_text(json.dumps(content, indent=1) + "\n")
        aside.replace(self.marker)

    def record(self, name: str, process: Process) -> None:
        """Remember a daemon that was started, by pid and start time."""
        line = json.dumps({"name": name, "pid": process.pid, "start": process.start})
        with (self.root / "daemons.jsonl").open("a") as file:
            file.write(line + "\n")

    def recorded(self) -> list[Process]:
        """The remembered daemons that still run; another process with such a pid is left out."""
        found: list[Process] = []
        with contextlib.suppress(FileNotFoundError):
            for line in (self.root / "daemons.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    entry = json.loads(line)
                    process = read_process(entry["pid"])
                    if process and process.start == entry["start"] and process.alive():
                        found.append(process)
        return found


def open_state(text: str) -> State:
    """The state folder called `text`; BadArguments where Slurm could not use such a path."""
    root = Path(os.path.realpath(os.path.abspath(os.path.expanduser(text))))
    problems = []
    if not re.fullmatch(r"[A-Za-z0-9_./+-]+", str(root)):
        problems.append("only letters, digits and _ . / + - may be in its path (slurm.conf)")
    if len(str(root)) > MAX_STATE_PATH:
        problems.append(
            f"its path has {len(str(root))} characters, at most {MAX_STATE_PATH} leave room "
            "for the names of Slurm's sockets"
        )
    if root.exists() and not root.is_dir():
        problems.append("it is no folder")
    if root == Path("/"):
        problems.append("it is the root folder")
    if problems:
        raise BadArguments("\n".join(f"--state {root}: {problem}" for problem in problems))
    return State(root)


def check_reachable(state: State) -> None:
    """Raise BadArguments where other users could not reach the state folder."""
    for parent in state.root.parents:
        if parent.exists() and not parent.stat().st_mode & 0o001:
            raise BadArguments(
                f"--state {state.root}: other users cannot pass {parent} (mode "
                f"{parent.stat().st_mode & 0o777:o}), so no ordinary user could read slurm.conf; "
                f"chmod o+x {parent}, or name a folder below /tmp"
            )
