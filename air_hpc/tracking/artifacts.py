"""The small files of a run that are kept beside its metrics: script, run.yaml, diff, versions.

Every one is text, and shown to whoever may read the store: addresses lose their user and password,
and the values of environment variables whose names speak of secrets are masked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from air_hpc.rundir.layout import RunDir
from air_hpc.tracking.uri import scrub

MAX_BYTES = 1024 * 1024
"""Of one file; a larger one is left out."""

_BESIDE_THE_CODE = ("diff.patch", "code.json")
"""`code` links to the tree of a snapshot; its diff and package versions stand beside the tree."""

_SECRET_NAME = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
"""TOKENIZERS_PARALLELISM=false is none: every `false` of a file would be masked."""


def collect(run: RunDir, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(artifact path, text) of each small file; `env` is the config's `cluster.env`."""
    secrets = [value for name, value in env.items() if _SECRET_NAME.search(name) and value]
    for name, path in _files(run):
        text = _read(path)
        if text is not None:
            for secret in secrets:
                text = text.replace(secret, "***")
            yield name, scrub(text)


def _files(run: RunDir) -> Iterator[tuple[str, Path]]:
    yield "run.yaml", run.run_yaml
    scripts = {path.name: path for path in run.submit_dir.glob("*.sh")}
    shared = _shared_script(run)
    if shared is not None:
        scripts.setdefault(shared.name, shared)
    for name, path in sorted(scripts.items()):
        yield f"submit/{name}", path
    if run.code_dir.is_symlink():
        for name in _BESIDE_THE_CODE:
            yield f"code/{name}", run.code_dir.resolve().parent / name


def _shared_script(run: RunDir) -> Path | None:
    """The script of an array, which its runs share: submission.json says where it is."""
    text = _read(run.submit_dir / "submission.json")
    try:
        named = json.loads(text or "{}").get("script")
    except (ValueError, AttributeError):
        return None
    return Path(named) if isinstance(named, str) else None


def _read(path: Path) -> str | None:
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        return path.read_text(errors="replace")
    except OSError:
        return None
