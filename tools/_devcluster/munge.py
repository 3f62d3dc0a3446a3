"""munged on its default socket: one for the machine, whoever started it.

With another socket slurmdbd's clients fail, so all clusters share this one. A munged that was
there before is used and never stopped; one that a cluster started is stopped by the last cluster
that goes.
"""

import os
import pwd
import secrets
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

from .errors import DevclusterError
from .install import Install
from .processes import Process, process_table
from .shared import SHARED, Claim, locked, read_claims, write_claims
from .state import State

KEY = Path("/etc/munge/munge.key")
FOLDERS = ((Path("/run/munge"), 0o755), (Path("/var/log/munge"), 0o700),
           (Path("/var/lib/munge"), 0o711))  # fmt: skip
RECORD = SHARED / "munged"


def answers(install: Install) -> bool:
    """Whether a credential can be made now."""
    try:
        install.run("munge", "-n", timeout_s=10)
    except DevclusterError:
        return False
    return True


def ensure_munged(install: Install, state: State) -> None:
    """Leave a working munged; remember that this cluster uses it."""
    with locked("claims"):
        claims = read_claims()
        claims[str(state.root)] = replace(claims.get(str(state.root), Claim()), munge=True)
        write_claims(claims)
        if answers(install):
            return
        _start(install)


def release_munged(state: State) -> None:
    """Forget this cluster's claims; stop munged if we started it and no cluster is left."""
    with locked("claims"):
        claims = read_claims()
        claims.pop(str(state.root), None)
        write_claims(claims)
        process = started_munged()
        if process and not any(claim.munge for claim in claims.values()):
            process.send(signal.SIGTERM)
            deadline = time.monotonic() + 5
            while process.alive() and time.monotonic() < deadline:
                time.sleep(0.02)
            RECORD.unlink(missing_ok=True)


def started_munged() -> Process | None:
    """The munged that a cluster of this machine started, if it still runs."""
    try:
        pid, start = map(int, RECORD.read_text().split())
    except (OSError, ValueError):
        return None
    process = Process(pid=pid, start=start)
    return process if process.alive() else None


def _start(install: Install) -> None:
    try:
        owner = pwd.getpwnam("munge")
    except KeyError:
        raise DevclusterError(
            "there is no user munge: apt-get install --reinstall munge makes it"
        ) from None
    for folder, mode in FOLDERS:
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, owner.pw_uid, owner.pw_gid)
        folder.chmod(mode)
    if not KEY.exists():
        KEY.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(1024))
        shutil.chown(KEY, owner.pw_uid, owner.pw_gid)
    before = {process.pid for process in process_table().values() if process.name == "munged"}
    # Threads: 1,024 slurmd check their credentials with this one daemon.
    install.run("runuser", "-u", "munge", "--", *install.command("munged", "--num-threads", "10"))
    deadline = time.monotonic() + 10
    while not answers(install):
        if time.monotonic() > deadline:
            raise DevclusterError(
                "munged was started and makes no credential: see /var/log/munge/munged.log"
            )
        time.sleep(0.1)
    for process in process_table().values():
        if process.name == "munged" and process.pid not in before and process.alive():
            RECORD.write_text(f"{process.pid} {process.start}\n")
