"""What a worker knows of the exception that ends it, as plain facts: the agent decides the class.

The facts are types by name, texts, the system's error and where it was raised; never an object of
the worker's. They are bounded, since they travel with a heartbeat.
"""

from __future__ import annotations

import errno
import os
import sysconfig
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

MOST_CAUSES = 4
MESSAGE_CHARS = 2000
_OWN_PACKAGE = __name__.partition(".")[0]
_LIBRARY_PARTS = ("site-packages", "dist-packages")


def error_facts(error: BaseException) -> dict[str, Any]:
    """The facts of an exception.

    `type`, `message`; `exceptions`: its type and those it derives from, as a traceback prints them
    (`torch.OutOfMemoryError`, `ValueError`); `errno` by name (ENOSPC) or None; `causes`: the errors
    that it was raised from (`raise ... from`), as `type: message`; `frame`: `file`, `line`,
    `function` and `origin` of the innermost frame that is no library's (or, where there is none, of
    the innermost): `user` code, this `platform`'s, or `library`.
    """
    number = getattr(error, "errno", None)
    return {
        "type": type(error).__name__,
        "message": str(error)[:MESSAGE_CHARS],
        "exceptions": [
            name_of(kind) for kind in type(error).__mro__ if issubclass(kind, BaseException)
        ],
        "errno": errno.errorcode.get(number) if isinstance(number, int) else None,
        "causes": [f"{type(c).__name__}: {c}"[:MESSAGE_CHARS] for c in _causes(error)],
        "frame": _frame_facts(error.__traceback__),
    }


def name_of(kind: type[BaseException]) -> str:
    """A type as a traceback prints it: built-in ones without their module."""
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen = {id(error)}
    cause = error.__cause__
    while cause is not None and id(cause) not in seen and len(seen) <= MOST_CAUSES:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__


def _frame_facts(trace: TracebackType | None) -> dict[str, Any] | None:
    frames: list[tuple[FrameType, int]] = []
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    if not frames:
        return None
    ours = [(frame, line) for frame, line in frames if origin_of(frame) != "library"]
    frame, line = (ours or frames)[-1]
    return {
        "file": frame.f_code.co_filename,
        "line": line,
        "function": frame.f_code.co_name,
        "origin": origin_of(frame),
    }


def origin_of(frame: FrameType) -> str:
    """Whose code a frame runs: `platform`, `library` (installed, or of Python itself) or `user`.

    By the module's name first: the code snapshot of somebody who works on this project holds it.
    """
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if package == _OWN_PACKAGE:
        return "platform"
    path = frame.f_code.co_filename
    if path.startswith("<") or any(part in path.split(os.sep) for part in _LIBRARY_PARTS):
        return "library"
    standard = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    if any(path.startswith(folder + os.sep) for folder in standard):
        return "library"
    return "user"
