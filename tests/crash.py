"""Crashes made on purpose: between any two system calls, or with what was not yet durable dropped.

`intercept` puts a hook in front of every call of `os` that changes the file system, however it is
reached (pathlib, shutil). Three things are built on it:

    run_killed   runs an action in a forked child and kills it with SIGKILL at its n-th call
    Recorder     notes the calls of an action, for `after_power_loss` to replay without some of them
    (in tests)   a scheduler that interleaves several writers call by call

A child also watches the interpreter's audit events, so a change that bypasses the hook is an error
of the harness and not a hole in the test.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CALLS = (
    "open",
    "write",
    "fsync",
    "rename",
    "replace",
    "mkdir",
    "rmdir",
    "unlink",
    "remove",
    "link",
)
_AUDITED = {
    "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate",
}  # fmt: skip
_CHANGING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_inside = threading.local()

Hook = Callable[..., Any]
"""hook(name, original, args, kwargs): does the call, or does not."""


@contextmanager
def intercept(hook: Hook) -> Iterator[None]:
    """Send every changing call through `hook` while the context lasts."""
    originals = {name: getattr(os, name) for name in CALLS}

    def wrapped(name: str) -> Callable[..., Any]:
        original = originals[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & _CHANGING_FLAGS:
                return original(*args, **kwargs)
            _inside.depth = getattr(_inside, "depth", 0) + 1
            try:
                return hook(name, original, args, kwargs)
            finally:
                _inside.depth -= 1

        return call

    for name in CALLS:
        setattr(os, name, wrapped(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    changes = event in _AUDITED or (event == "open" and args[2] & _CHANGING_FLAGS)
    if changes and not getattr(_inside, "depth", 0):
        os._exit(70)


def run_killed(action: Callable[[], object], at_call: int) -> bool:
    """Run `action` in a child that dies at its `at_call`-th changing call (0 is the first).

    A write is cut in half. Returns False when the action was through before that.
    """
    pid = os.fork()
    if pid == 0:
        code = 71
        try:
            count = -1

            def hook(name: str, original: Any, args: Any, kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count == at_call:
                    if name == "write":
                        original(args[0], bytes(args[1])[: len(args[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            sys.addaudithook(_audit)
            with intercept(hook):
                action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    code = os.WEXITSTATUS(status)
    assert code != 70, "a change of the file system bypassed the hook"
    assert code == 0, "the action failed by itself; its traceback is above"
    return False


# -- power loss ---------------------------------------------------------------


@dataclass
class Node:
    """A file (data) or a directory (entries: name to inode number)."""

    data: bytes | None = None
    entries: dict[str, int] | None = None


@dataclass
class Change:
    """One call that changed something; `inode` is what must be fsynced to make it durable."""

    kind: str
    inode: int
    name: str = ""
    target: int = 0
    new_name: str = ""
    data: bytes = b""


@dataclass
class Sync:
    """One fsync."""

    inode: int


@dataclass
class Recorder:
    """What an action did to the tree below `root`, in order, and marks put in between."""

    root: Path
    start: dict[int, Node] = field(default_factory=dict)
    trace: list[Change | Sync | str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for folder, folders, files in os.walk(self.root):
            entries = {n: os.stat(os.path.join(folder, n)).st_ino for n in (*folders, *files)}
            self.start[os.stat(folder).st_ino] = Node(entries=entries)
            for name in files:
                self.start[entries[name]] = Node(data=Path(folder, name).read_bytes())

    def mark(self, text: str) -> None:
        """Note that something was promised by now."""
        self.trace.append(text)

    def hook(self, name: str, original: Any, args: Any, kwargs: Any) -> Any:
        """For `intercept`."""
        if name == "fsync":
            self.trace.append(Sync(os.fstat(args[0]).st_ino))
            return original(*args, **kwargs)
        if name == "write":
            written = original(*args, **kwargs)
            inode = os.fstat(args[0]).st_ino
            self.trace.append(Change("write", inode, data=bytes(args[1])[:written]))
            return written
        parent, entry = self._place(args[0], kwargs.get("dir_fd"))
        if name == "open":
            existed = os.path.lexists(args[0]) if kwargs.get("dir_fd") is None else True
            fd = original(*args, **kwargs)
            if not existed:
                self.trace.append(Change("create", parent, entry, os.fstat(fd).st_ino))
            return fd
        if name == "mkdir":
            original(*args, **kwargs)
            self.trace.append(Change("mkdir", parent, entry, os.stat(args[0]).st_ino))
        elif name in ("rename", "replace"):
            target, new = self._place(args[1], None)
            assert target == parent, "the model knows renames inside one directory only"
            inode = os.stat(args[0]).st_ino
            original(*args, **kwargs)
            self.trace.append(Change("rename", parent, entry, inode, new))
        else:
            original(*args, **kwargs)
            self.trace.append(Change("remove", parent, entry))
        return None

    @staticmethod
    def _place(path: Any, dir_fd: int | None) -> tuple[int, str]:
        if dir_fd is not None:
            return os.fstat(dir_fd).st_ino, os.fspath(path)
        folder, name = os.path.split(os.fspath(path))
        return os.stat(folder).st_ino, name


def after_power_loss(recorder: Recorder, length: int, keep: float, rng: random.Random) -> Tree:
    """The tree after the first `length` entries of the trace and then a loss of power.

    What was fsynced since is there; every other change is there with probability `keep`, and data
    that was not fsynced may be there in full, in part, or as zeros.
    """
    nodes = {
        inode: Node(node.data, None if node.entries is None else dict(node.entries))
        for inode, node in recorder.start.items()
    }
    trace = recorder.trace[:length]
    for position, change in enumerate(trace):
        if not isinstance(change, Change):
            continue
        durable = any(
            isinstance(later, Sync) and later.inode == change.inode
            for later in trace[position + 1 :]
        )
        _apply(nodes, change, durable or rng.random() < keep, durable, rng)
    return Tree(nodes, recorder.root.stat().st_ino)


def _apply(
    nodes: dict[int, Node], change: Change, kept: bool, durable: bool, rng: random.Random
) -> None:
    if change.kind == "create":
        nodes[change.target] = Node(data=b"")
    elif change.kind == "mkdir":
        nodes[change.target] = Node(entries={})
    if not kept:
        return
    node = nodes[change.inode]
    if change.kind == "write":
        assert node.data is not None
        loss = 0 if durable else rng.randrange(3)
        data = change.data
        node.data += (data, data[: len(data) // 2], bytes(len(data)))[loss]
        return
    entries = node.entries
    assert entries is not None
    if change.kind in ("create", "mkdir"):
        entries[change.name] = change.target
    elif change.kind == "remove":
        entries.pop(change.name, None)
    elif entries.get(change.name) == change.target:
        del entries[change.name]
        entries[change.new_name] = change.target


@dataclass
class Tree:
    """A tree of files, to be put on disk."""

    nodes: dict[int, Node]
    root: int

    def write(self, path: Path, inode: int | None = None) -> None:
        """Make it at `path`, which must not exist."""
        node = self.nodes[self.root if inode is None else inode]
        if node.entries is None:
            path.write_bytes(node.data or b"")
            return
        path.mkdir(mode=0o700)
        for name, child in node.entries.items():
            self.write(path / name, child)
