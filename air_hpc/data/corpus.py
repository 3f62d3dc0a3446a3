"""The default corpus: the text of the Python standard library's own sources, as bytes.

Real text, present wherever the project runs, with nothing to download. Files are taken in the
sorted order of their relative paths and joined by a zero byte; tests are left out, since
distributions ship them apart. A token is one byte. The set's folder is named by the interpreter's
version, so that another interpreter never meets a set it would not build itself.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from air_hpc.data.shards import ShardIndex, read_index, write_shards
from air_hpc.errors import EnvironmentFailure

VOCAB_SIZE = 256
_LEFT_OUT = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}


def standard_library_sources(root: Path) -> list[Path]:
    """The source files below `root` that belong to the corpus, in their order."""
    found: list[str] = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _LEFT_OUT]
        relative = os.path.relpath(folder, root)
        found += [os.path.normpath(os.path.join(relative, f)) for f in files if f.endswith(".py")]
    return [root / name for name in sorted(found)]


def corpus_folder(cache_dir: Path) -> Path:
    """Where the corpus of this interpreter is kept under `cache_dir`."""
    build = hashlib.sha256(f"{sys.version}\n{os.__file__}".encode()).hexdigest()[:12]
    return cache_dir / f"python_stdlib-{platform.python_version()}-{build}"


def ensure_corpus(cache_dir: Path, root: Path | None = None) -> tuple[Path, ShardIndex]:
    """The corpus' folder and index, built if it is not there. For one process of the run.

    Raises EnvironmentFailure where there are no sources or no place to write.
    """
    folder = corpus_folder(cache_dir)
    index = read_index(folder)
    if index is None:
        root = Path(os.__file__).resolve().parent if root is None else root
        sources = standard_library_sources(root)
        index = write_shards(folder, _pieces(sources), dtype="uint8", vocab_size=VOCAB_SIZE)
    if index.tokens == 0:
        raise EnvironmentFailure(
            "the standard library has no source files to train on",
            tried=str(root or folder),
            next_step="use an interpreter that ships its .py files",
        )
    return folder, index


def _pieces(sources: list[Path]) -> Iterator[bytes]:
    for source in sources:
        try:
            text = source.read_bytes()
        except OSError:  # a dangling link of a distribution's package; the digest tells the set
            continue
        yield text + b"\x00"
