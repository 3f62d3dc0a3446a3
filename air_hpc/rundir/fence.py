"""Tokens: what fences an older writer off.

Each generation of a run claims a token (attempt, generation) before its workers start, by an
exclusive mkdir, which the file server decides. The highest token is the current one. Whatever is
written (a checkpoint, an event, a spool) carries its writer's token.

A node that Slurm has given up may still be writing. Two things keep such a writer out. Before it
commits it looks whether its token is still the highest (`still_newest`). And since no look can be
the last instruction before a rename, a claim also *inherits*: the new generation lists the
checkpoints that it accepts from the past (`record_inherited`), and from then on a checkpoint with
an older token counts only if it stands in that list. A late commit of an older writer is thereby
void however the instructions interleave.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
from dataclasses import dataclass
from functools import total_ordering

from air_hpc.errors import AirHpcError, EnvironmentFailure
from air_hpc.rundir.atomic import make_exclusive_dir, write_atomic
from air_hpc.rundir.layout import RunDir

_NAME = re.compile(r"(\d+)\.(\d+)")
_INHERITED = "inherited.json"


class Fenced(AirHpcError):
    """A newer generation owns the run: this process must write nothing more and leave."""


@total_ordering
@dataclass(frozen=True)
class Token:
    """(attempt, generation), ordered; written `attempt.generation`."""

    attempt: int
    generation: int

    def __lt__(self, other: Token) -> bool:
        return (self.attempt, self.generation) < (other.attempt, other.generation)

    def __str__(self) -> str:
        return f"{self.attempt}.{self.generation}"

    @classmethod
    def parse(cls, text: str) -> Token:
        """The token that `text` names; raises ValueError for anything else."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise ValueError(f"not a token: {text!r} (attempt.generation)")
        return cls(int(match[1]), int(match[2]))


def tokens(run: RunDir) -> list[Token]:
    """All claimed tokens, oldest first."""
    found = []
    for name in os.listdir(run.tokens_dir):
        if _NAME.fullmatch(name):
            found.append(Token.parse(name))
    return sorted(found)


def newest_token(run: RunDir) -> Token | None:
    """The current token, or None for a run that never started a generation."""
    claimed = tokens(run)
    return claimed[-1] if claimed else None


def next_attempt(run: RunDir) -> int:
    """The number of the attempt that starts now (1 for the first).

    Two starts that read the same number are told apart by the claim: one of them gets it.
    """
    newest = newest_token(run)
    return 1 if newest is None else newest.attempt + 1


def claim(run: RunDir, token: Token) -> None:
    """Make `token` the run's current one; raises Fenced if it is taken or no longer the highest."""
    if not make_exclusive_dir(run.tokens_dir / str(token)):
        raise Fenced(f"token {token} of {run.run_id} is claimed already")
    require_newest(run, token)


def claim_next_attempt(run: RunDir) -> Token:
    """Claim the first generation of a new attempt, past any other start that races with us."""
    attempt = next_attempt(run)
    while True:
        token = Token(attempt, 1)
        if make_exclusive_dir(run.tokens_dir / str(token)):
            require_newest(run, token)
            return token
        attempt += 1


def still_newest(run: RunDir, token: Token) -> bool:
    """Whether `token` is the highest one, as the file server sees it now.

    A directory is made and removed first: that changes the directory's attributes, so that a
    network file system's client drops what it had cached of its names before they are listed. On a
    full disk, where nothing can be made, the directory's time is set instead: who makes room must
    know whether the run is its own.
    """
    probe = run.tokens_dir / f".probe-{secrets.token_hex(4)}"
    try:
        probe.mkdir(mode=0o700)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.utime(run.tokens_dir)
    else:
        with contextlib.suppress(FileNotFoundError):
            probe.rmdir()
    return newest_token(run) == token


def require_newest(run: RunDir, token: Token) -> None:
    """Raise Fenced unless `token` is the current one."""
    if not still_newest(run, token):
        raise Fenced(f"token {token} of {run.run_id} is fenced off by {newest_token(run)}")


@dataclass(frozen=True)
class Inherited:
    """The checkpoints that a generation accepted from the past: {step: digest of its manifest}."""

    token: Token
    checkpoints: dict[int, str]


def record_inherited(run: RunDir, token: Token, checkpoints: dict[int, str]) -> None:
    """Fix which older checkpoints count from now on. Called once, after the claim."""
    body = {"token": str(token), "checkpoints": {str(k): v for k, v in checkpoints.items()}}
    write_atomic(run.tokens_dir / str(token) / _INHERITED, json.dumps(body).encode())


def newest_inherited(run: RunDir) -> Inherited | None:
    """The list of the newest generation that made one, or None before the first.

    Raises EnvironmentFailure when that list cannot be read: what counts is then unknown.
    """
    for token in reversed(tokens(run)):
        path = run.tokens_dir / str(token) / _INHERITED
        try:
            body = json.loads(path.read_bytes())
            checkpoints = {int(k): str(v) for k, v in body["checkpoints"].items()}
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EnvironmentFailure(
                f"cannot tell which checkpoints count: {path} is damaged ({error})",
                tried=f"read {path}",
                next_step=f"restore the file, or remove it to accept the list before {token}",
            ) from None
        return Inherited(token, checkpoints)
    return None
