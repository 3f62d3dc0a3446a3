"""A collective's failure as an error that says where: rank, host, group and operation.

What gloo and NCCL raise names none of these: a plain RuntimeError with a line of their source, or
a port that is nobody's. Within `naming_collectives` it becomes a `CollectiveFailed`, with what
torch's flight recorder knows (on where TORCH_FR_BUFFER_SIZE is set; the agent sets it for each
worker).

Which of the recorded operations it was: the oldest of those still in flight, else the newest. That
is sure where one operation waits at a time; where more are in flight the one that is named may be a
neighbour of the one that failed, since gloo's records do not tell a failed one from a finished one
(torch 2.13). Without a recorder group and operation are unknown, and the error says so.

It is a consequence as a rule: another rank's end, or its silence, is the cause. What NCCL's
watchdog ends by SIGABRT raises nothing here and is found in the log.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed import DistError

from air_hpc.errors import EnvironmentFailure
from air_hpc.session.watch import Membership, memberships, recorded

_MARKS = re.compile(
    r"[/.]gloo/|\bgloo\b|\bNCCL\b|\bnccl[A-Z]|ProcessGroup|Connection (closed|reset) by peer"
    r"|Operation timed out!|Timed out waiting \d+ms"
)
"""What the texts of collective libraries have and others have not. The exception's type does not
tell: gloo raises RuntimeError."""
_TIMED_OUT = re.compile(r"(?i)time(d)?[ -]?out")
_LONGEST_REASON = 200
_SHOWN_RANKS = 16
_MESH = "mesh_"
"""What torch puts before the name of a mesh's axis to describe its group."""
_WORLD = "default_pg"


@dataclass(frozen=True)
class Operation:
    """A collective or point-to-point operation as the flight recorder has it.

    `group` is the mesh axis (two where they are one group; `world`, or torch's own name, where it
    is none), `ranks` its members, `sizes` the
    shapes of what went in, `dtypes` their types, `number` its number in the group.
    """

    name: str
    number: int
    group: str
    ranks: tuple[int, ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()

    def __str__(self) -> str:
        shapes = ", ".join(
            f"{'x'.join(map(str, size)) or 'scalar'} {dtype}"
            for size, dtype in zip(self.sizes, self.dtypes, strict=False)
        )
        members = ", ".join(map(str, self.ranks[:_SHOWN_RANKS]))
        if len(self.ranks) > _SHOWN_RANKS:
            members += f", … {self.ranks[-1]}"
        text = f"{self.name} #{self.number}"
        text += f" ({shapes})" if shapes else ""
        text += f" of group {self.group}"
        return text + (f" (ranks {members})" if members else "")


class CollectiveFailed(EnvironmentFailure):
    """An operation between ranks failed: one of them is gone, silent, or cannot be reached.

    `operation` is None where no flight recorder was on.
    """

    def __init__(self, rank: int, host: str, operation: Operation | None, reason: str) -> None:
        self.rank = rank
        self.host = host
        self.operation = operation
        self.timed_out = _TIMED_OUT.search(reason) is not None
        what = "an unknown operation" if operation is None else str(operation)
        how = "timed out" if self.timed_out else "failed"
        super().__init__(
            f"rank {rank} on {host}: {what} {how}: {_short(reason)}",
            next_step=(
                "see which rank of the group fell silent first, and train.collective_timeout_s"
                if self.timed_out
                else "see which rank of the group ended first: its own end tells why"
            ),
        )


@contextmanager
def naming_collectives(
    rank: int, host: str, axes: Mapping[str, Sequence[str]] | None = None
) -> Iterator[None]:
    """Raise CollectiveFailed in the place of what a collective library raises in this context.

    `axes` are those of each group (`World.axes_of_groups`). Any other exception goes through as it
    is.
    """
    try:
        yield
    except RuntimeError as error:
        if not of_a_collective(error):
            raise
        raise CollectiveFailed(rank, host, _failed_operation(axes or {}), str(error)) from error


def of_a_collective(error: BaseException) -> bool:
    """Whether a collective library raised this: by torch's types, or by the library's words."""
    if isinstance(error, DistError):
        return True
    return isinstance(error, RuntimeError) and _MARKS.search(str(error)) is not None


def _failed_operation(axes: Mapping[str, Sequence[str]]) -> Operation | None:
    try:
        return pick(recorded(), memberships(), axes)
    except Exception:  # whatever the recorder raises, the failure itself must be told
        return None


def pick(
    entries: Sequence[Mapping[str, Any]],
    groups: Mapping[str, Membership],
    axes: Mapping[str, Sequence[str]],
) -> Operation | None:
    """The operation that failed: the oldest in flight, else the newest; None without entries.

    `groups` and `axes` are by the groups' names.
    """
    if not entries:
        return None
    waiting = [e for e in entries if not e.get("retired") and e.get("state") != "completed"]
    entry = waiting[0] if waiting else entries[-1]
    name, description = entry["process_group"]
    group = groups.get(str(name), Membership(str(description)))
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    return Operation(
        name=str(entry.get("profiling_name", "?")).rpartition(":")[2],
        number=int(number),
        group="/".join(axes.get(str(name), ())) or _axis(group.description, str(name)),
        ranks=group.ranks,
        sizes=tuple(tuple(map(int, size)) for size in entry.get("input_sizes", ())),
        dtypes=tuple(str(dtype).lower() for dtype in entry.get("input_dtypes", ())),
    )


def _axis(description: str, name: str) -> str:
    if description == _WORLD:
        return "world"
    if description in ("", "undefined"):
        return name
    return description.removeprefix(_MESH)


def _short(reason: str) -> str:
    """The reason on one line, without the path of the library's source that begins it."""
    line = re.sub(r"^\[[^\]]*/([^\]/]+)\]", r"[\1]", " ".join(reason.split()))
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 2] + " …"
