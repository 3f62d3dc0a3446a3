"""Makes thousands of small new files durable at the price of one flush.

Each file of a sweep could be fsynced by itself, at some milliseconds each. Here they are only
written, and one syncfs(2) makes all of them durable before anything relies on them: the submission
is not `ready` before it. For new files only; what replaces a file is `rundir.atomic`'s business.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from air_hpc.errors import EnvironmentFailure
from air_hpc.rundir.atomic import open_file


def write_new(path: Path, text: str, mode: int | None = None) -> None:
    """Write a new file; not durable before `flush`. Raises EnvironmentFailure."""
    try:
        with open(open_file(path, os.O_WRONLY | os.O_EXCL), "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(text.encode())
    except OSError as error:
        raise _failure(path, error) from None


def append(path: Path, line: str) -> None:
    """Append a line; not durable before `flush`. Raises EnvironmentFailure."""
    try:
        with open(open_file(path, os.O_WRONLY | os.O_APPEND), "ab") as file:
            file.write(line.encode() + b"\n")
    except OSError as error:
        raise _failure(path, error) from None


def flush(folder: Path) -> None:
    """Make everything written to the file system of `folder` durable. Raises EnvironmentFailure."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
        if syncfs is None:
            os.sync()
        elif syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise _failure(folder, OSError(number, os.strerror(number)))
    finally:
        os.close(fd)


def _failure(path: Path, error: OSError) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"cannot write {path}: {error.strerror}",
        tried=f"write {path}",
        next_step="check space, inodes and permissions of runs_dir, then repeat the command",
    )
