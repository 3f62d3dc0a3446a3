"""The address of a tracking store: which are taken, and how one is shown.

A server's address that carries a user or a password (`https://user:secret@host`) is refused: it
would end up in run.yaml, logs and tags. MLflow takes them from MLFLOW_TRACKING_USERNAME and
MLFLOW_TRACKING_PASSWORD. What is logged or tagged is scrubbed all the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from air_hpc.errors import BadInput

ALLOWED = "sqlite:///<path>, http://<server>, https://<server>, or a database MLflow knows"
_SERVERS = frozenset({"http", "https"})
_DATABASES = frozenset({"postgresql", "mysql", "mssql", "databricks"})
_USERINFO = re.compile(r"(?<=://)[^/@\s'\"]+@")


@dataclass(frozen=True)
class StoreUri:
    """A checked address. `text` is what MLflow gets; `shown` may be logged and tagged."""

    text: str
    shown: str
    sqlite_path: Path | None = None

    @property
    def is_server(self) -> bool:
        """Whether an MLflow server answers there."""
        return self.text.startswith(("http://", "https://"))


def parse_uri(uri: str) -> StoreUri:
    """Check an address; a relative SQLite path is made absolute.

    Raises:
        BadInput: not a store that is taken (`file:` and plain paths are not: MLflow refuses them).
    """
    scheme = urlsplit(uri).scheme.split("+")[0].lower()
    if scheme == "sqlite":
        return _sqlite(uri)
    if scheme in _SERVERS:
        return _server(uri)
    if scheme in _DATABASES or uri == "databricks":
        return StoreUri(text=uri, shown=scrub(uri))
    if scheme in ("file", ""):
        raise BadInput.single(
            "tracking.uri",
            scrub(uri),
            "MLflow does not keep runs in plain files any more",
            allowed=ALLOWED,
            hint=f"Write sqlite:///{uri.removeprefix('file:').rstrip('/') or 'mlflow'}.db",
        )
    raise BadInput.single("tracking.uri", scrub(uri), "not a tracking store", allowed=ALLOWED)


def _sqlite(uri: str) -> StoreUri:
    path = uri.removeprefix("sqlite:///")
    if path == uri or path in ("", ":memory:"):
        raise BadInput.single(
            "tracking.uri", uri, "a SQLite store needs a file", allowed="sqlite:///<path>"
        )
    absolute = Path(path).expanduser().absolute()
    text = f"sqlite:///{absolute}"
    return StoreUri(text=text, shown=text, sqlite_path=absolute)


def _server(uri: str) -> StoreUri:
    parts = urlsplit(uri)
    userinfo, _, host = parts.netloc.rpartition("@")
    if userinfo:
        raise BadInput.single(
            "tracking.uri",
            scrub(uri),
            "a user or password here would be written into logs and tags",
            allowed="an address without them",
            hint="Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead",
        )
    if not host:
        raise BadInput.single("tracking.uri", uri, "names no server", allowed=ALLOWED)
    text = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
    return StoreUri(text=text, shown=text)


def scrub(text: str) -> str:
    """The text with the user and password of every address in it replaced by `***`."""
    return _USERINFO.sub("***@", text)
