"""Writes that are there whole or not at all, also after a crash of the machine.

A file is written aside in the same directory, fsynced, renamed over its name, and the directory is
fsynced, so that neither the bytes nor the name can be lost once the call has returned.

What is made is private (0600, 0700), unless it is made inside a directory that a run shares with a
group (mode 2770): then the group can read and write it too, whatever the umask.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from pathlib import Path

ASIDE_PREFIX = ".aside-"
"""What an unfinished write is called; a crash leaves such names behind, and readers skip them."""


def fsync_dir(path: Path) -> None:
    """Make the names inside a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write every byte, whatever a single write(2) takes; raises OSError (ENOSPC, EDQUOT)."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def is_shared(folder: Path) -> bool:
    """Whether what is made in `folder` is shared with its group."""
    return bool(folder.stat().st_mode & stat.S_IWGRP)


def open_file(path: Path, flags: int) -> int:
    """os.open, making the file where it is not there: private, or shared as its folder is."""
    fd = os.open(path, flags | os.O_CREAT, 0o600)
    if is_shared(path.parent):
        with contextlib.suppress(PermissionError):  # another member of the group made it
            os.fchmod(fd, 0o660)
    return fd


def make_dir(path: Path, *, exist_ok: bool = False) -> None:
    """mkdir: private, or shared as its folder is; raises FileExistsError unless `exist_ok`."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not exist_ok:
            raise
        return
    if is_shared(path.parent):
        path.chmod(0o2770)


def write_file(path: Path, data: bytes, mode: int | None = None) -> None:
    """Write a new file and make its bytes durable (its name is not: see `fsync_dir`)."""
    fd = open_file(path, os.O_WRONLY | os.O_EXCL)
    try:
        if mode is not None:
            os.fchmod(fd, mode)
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes, mode: int | None = None) -> None:
    """Replace `path` by `data`: a reader sees the old bytes or the new ones, never a mixture."""
    aside = path.with_name(f"{ASIDE_PREFIX}{path.name}-{secrets.token_hex(4)}")
    try:
        write_file(aside, data, mode)
        os.rename(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def make_exclusive_dir(path: Path) -> bool:
    """Create a directory; False when it is there already. The server decides, not a cache."""
    try:
        make_dir(path)
    except FileExistsError:
        return False
    fsync_dir(path.parent)
    return True


def take_aside(path: Path) -> Path | None:
    """Rename a directory durably to a name that readers skip; None when it is not there."""
    aside = path.with_name(f"{ASIDE_PREFIX}doomed-{secrets.token_hex(4)}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return None
    # Without this a power loss could keep the removal of the files and forget the rename.
    fsync_dir(path.parent)
    return aside


def remove_tree(path: Path) -> None:
    """Remove a directory tree so that its name disappears first: a crash leaves no half of it."""
    aside = take_aside(path)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)
