"""The small files of a run that are kept beside its metrics: script, run.yaml, diff, versions.

Every one is text, and shown to whoever may read the store: addresses lose their user and password,
and the values of environment variables whose names speak of secrets are masked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from air_hpc.rundir.layout import RunDir
from air_hpc.tracking.uri import scrub

MAX_BYTES = 1024 * 1024
"""Of one file; a larger one is left out."""

_PLACES = (
    ("run.yaml", "", "."),
    ("submit", "*.sh", "submit"),
    ("submit", "*.sbatch", "submit"),
    ("code", "*.diff", "code"),
    ("code", "*.patch", "code"),
    ("code", "packages*.txt", "code"),
    ("code", "versions*.json", "code"),
    ("code", "environment*.json", "code"),
    ("code", "snapshot*.json", "code"),
)
"""(place in the run directory, names, folder among the artifacts)."""

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


def collect(run: RunDir, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(artifact path, text) of each small file; `env` is the config's `cluster.env`."""
    secrets = [value for name, value in env.items() if _SECRET_NAME.search(name) and value]
    for place, names, folder in _PLACES:
        root = run.path / place
        for path in sorted(root.glob(names)) if names else [root]:
            text = _read(path)
            if text is not None:
                for secret in secrets:
                    text = text.replace(secret, "***")
                yield (path.name if folder == "." else f"{folder}/{path.name}"), scrub(text)


def _read(path: Path) -> str | None:
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        return path.read_text(errors="replace")
    except OSError:
        return None
