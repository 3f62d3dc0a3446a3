"""Token shards: flat binary files of token ids with one index, read through memory maps.

A folder holds `index.json` (schema version, dtype, vocabulary, and each shard's file, tokens and
SHA-256) and the shards (`shard-00000.bin`, little-endian). `digest` names the content: it is the
hash of the token stream's description, and a run that resumes refuses another one.

Writing is done by one process, into a folder beside the final one, and made visible by a rename:
a reader finds the whole set or nothing. Two processes that build at once both succeed, one set is
kept. Reading opens each map once; a step touches no file-system metadata. A shard that is shorter
than its index says is a ShardUnreadable when it is opened.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from air_hpc.errors import EnvironmentFailure

SCHEMA_VERSION = 1
INDEX_NAME = "index.json"
_DTYPES: dict[str, np.dtype[Any]] = {
    "uint8": np.dtype("<u1"),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
}


class ShardUnreadable(EnvironmentFailure):
    """A shard is missing, unreadable, or not what its index says; the text names it."""


@dataclass(frozen=True)
class Shard:
    """One file of the set."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class ShardIndex:
    """What a set of shards holds. `vocab_size`: every token id is below it."""

    dtype: str
    vocab_size: int
    shards: tuple[Shard, ...]

    @property
    def tokens(self) -> int:
        """The length of the whole stream."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def digest(self) -> str:
        """A hash of the content: equal for equal streams cut at equal places."""
        parts = [self.dtype, str(self.vocab_size)]
        parts += [f"{shard.tokens}:{shard.sha256}" for shard in self.shards]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def write_shards(
    folder: Path,
    pieces: Iterable[bytes],
    *,
    dtype: str,
    vocab_size: int,
    shard_tokens: int = 64 * 1024 * 1024,
) -> ShardIndex:
    """Write the stream `pieces` (raw token bytes) as the set `folder`, atomically.

    Returns the index of what stands there afterwards: another process's, if it was first.
    Raises EnvironmentFailure where the folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            index = _write_into(aside, pieces, dtype, vocab_size, shard_tokens)
            _put_in_place(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise EnvironmentFailure(
            f"the training data cannot be written: {error}",
            tried=str(folder),
            next_step="set data.cache_dir to a writable folder that all nodes share",
        ) from error
    found = read_index(folder)
    return index if found is None else found


def read_index(folder: Path) -> ShardIndex | None:
    """The index of a set, or None where there is none (or no valid one: it is then built anew)."""
    try:
        document = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))
        if document["schema_version"] != SCHEMA_VERSION or document["dtype"] not in _DTYPES:
            return None
        shards = tuple(
            Shard(str(entry["file"]), int(entry["tokens"]), str(entry["sha256"]))
            for entry in document["shards"]
        )
        return ShardIndex(str(document["dtype"]), int(document["vocab_size"]), shards)
    except (OSError, ValueError, KeyError, TypeError):
        return None


class TokenStream:
    """The shards of a folder as one array of token ids."""

    def __init__(self, folder: Path, index: ShardIndex) -> None:
        dtype = _DTYPES[index.dtype]
        self.tokens = index.tokens
        self._maps = [self._open(folder / shard.file, shard, dtype) for shard in index.shards]
        self._ends = np.cumsum([shard.tokens for shard in index.shards], dtype=np.int64)

    @staticmethod
    def _open(path: Path, shard: Shard, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        try:
            data = np.memmap(path, dtype=dtype, mode="r")
        except (OSError, ValueError) as error:
            raise ShardUnreadable(
                f"a shard of the training data cannot be read: {error}",
                tried=str(path),
                next_step="remove its folder, it is built again",
            ) from error
        if len(data) != shard.tokens:
            raise ShardUnreadable(
                f"a shard of the training data has {len(data)} tokens, its index says "
                f"{shard.tokens}",
                tried=str(path),
                next_step="remove its folder, it is built again",
            )
        return data

    def read(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Tokens [start, start + length), which may cross from one shard into the next."""
        out = np.empty(length, dtype=np.int64)
        done = 0
        shard = int(np.searchsorted(self._ends, start, side="right"))
        while done < length:
            first = int(self._ends[shard - 1]) if shard else 0
            data = self._maps[shard]
            offset = start + done - first
            count = min(length - done, len(data) - offset)
            out[done : done + count] = data[offset : offset + count]
            done += count
            shard += 1
        return out


def _write_into(
    aside: Path, pieces: Iterable[bytes], dtype: str, vocab_size: int, shard_tokens: int
) -> ShardIndex:
    width = _DTYPES[dtype].itemsize
    shards: list[Shard] = []
    buffer = bytearray()
    for piece in pieces:
        buffer += piece
        while len(buffer) >= shard_tokens * width:
            shards.append(_write_shard(aside, len(shards), buffer[: shard_tokens * width], width))
            del buffer[: shard_tokens * width]
    if buffer or not shards:
        shards.append(_write_shard(aside, len(shards), buffer, width))
    index = ShardIndex(dtype, vocab_size, tuple(shards))
    document = {
        "schema_version": SCHEMA_VERSION,
        "dtype": dtype,
        "vocab_size": vocab_size,
        "tokens": index.tokens,
        "digest": index.digest,
        "shards": [vars(shard) for shard in shards],
    }
    _write_synced(aside / INDEX_NAME, json.dumps(document, indent=1).encode())
    return index


def _write_shard(aside: Path, number: int, data: bytearray, width: int) -> Shard:
    name = f"shard-{number:05d}.bin"
    _write_synced(aside / name, data)
    return Shard(name, len(data) // width, hashlib.sha256(data).hexdigest())


def _write_synced(path: Path, data: bytes | bytearray) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _put_in_place(aside: Path, folder: Path) -> None:
    """Rename `aside` to `folder`; a valid set that is there already wins, a broken one goes."""
    if read_index(folder) is None and folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
    aside.chmod(0o755)
    try:
        aside.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or read_index(folder) is None:
            raise
    parent = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
