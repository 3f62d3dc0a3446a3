"""One experiment of one MLflow store: the only module that imports mlflow, and late.

Every failure of the store comes out as `StoreUnavailable`: whoever ships keeps what it has and
tries again later. A run that another shipper's race or a person took away comes out as `RunLost`.
"""

from __future__ import annotations

import getpass
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from air_hpc.errors import AirHpcError, EnvironmentFailure
from air_hpc.tracking.uri import StoreUri, parse_uri, scrub

MAX_METRICS = 1000
MAX_PARAMS = 100
"""What MLflow's log_batch takes at once (mlflow.utils.validation)."""

RUN_ID_TAG = "air_hpc.run_id"
_CREATED_TAG = "air_hpc.created_ms"
_DUPLICATE_TAG = "air_hpc.duplicate_of"

_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}
_PATIENCE = {
    # Back-off is the shipper's business: MLflow's own would hold a pass for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class StoreUnavailable(AirHpcError):
    """The store did not take a request; the same request may be sent again later."""


class RunLost(AirHpcError):
    """The MLflow run is not there any more, or was deleted as a second one of its air_hpc run."""


class RunDeleted(AirHpcError):
    """A person deleted the MLflow run of this air_hpc run; it is not made again."""


@dataclass(frozen=True)
class Row:
    """One metric at one step. `time_ms` is milliseconds since the epoch."""

    key: str
    value: float
    time_ms: int
    step: int


def batches(rows: Sequence[Row], limit: int = MAX_METRICS) -> Iterator[Sequence[Row]]:
    """Divide rows, in order, into batches of at most `limit` that keep a step's rows together.

    One row of a step in the store then stands for all of them. A step of more than `limit` rows
    is divided all the same.
    """
    start = 0
    while len(rows) - start > limit:
        end = start + limit
        while end > start and rows[end - 1].step == rows[end].step:
            end -= 1
        end = end if end > start else start + limit
        yield rows[start:end]
        start = end
    if start < len(rows):
        yield rows[start:]


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn whatever MLflow and what is below it raise into this module's errors."""
    try:
        yield
    except AirHpcError:
        raise
    except Exception as error:
        text = scrub(" ".join(str(error).split()))[:300]
        code = getattr(error, "error_code", "")
        gone = code == "RESOURCE_DOES_NOT_EXIST" and "Run" in text
        if gone or "must be in the 'active' state" in text:
            raise RunLost(f"{what}: {text}") from None
        raise StoreUnavailable(f"{what}: {text or type(error).__name__}") from None


class Store:
    """A connection to an experiment. Connect before anything else; it may be repeated."""

    def __init__(self, uri: str | StoreUri, experiment: str) -> None:
        """Raises BadInput for an address that is no store."""
        self.uri = uri if isinstance(uri, StoreUri) else parse_uri(uri)
        self.experiment = experiment
        self._client: Any = None
        self._experiment_id = ""

    @property
    def identity(self) -> str:
        """Address and experiment, without secrets: what a position belongs to."""
        return f"{self.uri.shown} {self.experiment}"

    def connect(self) -> None:
        """Import mlflow, reach the store and find or make the experiment.

        Raises:
            EnvironmentFailure: mlflow is not installed, or the experiment is deleted.
            StoreUnavailable: no answer; try again later.
        """
        if self._client is not None:
            return
        _prepare_environment()
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise EnvironmentFailure(
                f"mlflow cannot be imported: {error}",
                next_step="pip install 'air_hpc[tracking]'; the metrics wait in the run directory "
                "for `python -m air_hpc sync`",
            ) from None
        with _translated(f"cannot open {self.uri.shown}"):
            if self.uri.sqlite_path is not None:
                _create_database(self.uri.sqlite_path, MlflowClient)
            client = MlflowClient(tracking_uri=self.uri.text)
            self._experiment_id = self._find_experiment(client)
        self._client = client

    def _find_experiment(self, client: Any) -> str:
        found = client.get_experiment_by_name(self.experiment)
        if found is None:
            try:
                return str(client.create_experiment(self.experiment, self._artifact_location()))
            except Exception as error:
                if getattr(error, "error_code", "") != "RESOURCE_ALREADY_EXISTS":
                    raise
            found = client.get_experiment_by_name(self.experiment)
        if found is None or found.lifecycle_stage != "active":
            raise EnvironmentFailure(
                f"the experiment {self.experiment!r} is deleted in {self.uri.shown}",
                next_step="restore it in MLflow, or set tracking.experiment to another name",
            )
        return str(found.experiment_id)

    def _artifact_location(self) -> str | None:
        """For SQLite a private folder beside the database; a server has its own."""
        path = self.uri.sqlite_path
        if path is None:
            return None
        root = path.parent / "mlartifacts"
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return str(root / quote(self.experiment, safe=""))

    # -- runs --------------------------------------------------------------------------------------

    def find_or_create_run(self, run_id: str, start_time: float) -> str:
        """The id of the one MLflow run of this air_hpc run.

        Two shippers may create at the same moment: each looks again after it created, the oldest
        stays and the others are deleted.
        """
        self.connect()
        with _translated("cannot find or make the run"):
            known = self._active(run_id)
            if not known:
                self._create(run_id, start_time)
                known = self._active(run_id)
            if not known:
                raise StoreUnavailable("the run that was just made is not there")
            oldest, *others = known
            for other in others:
                with suppress(Exception):  # another shipper deletes it too
                    self._client.set_tag(other, _DUPLICATE_TAG, oldest)
                    self._client.delete_run(other)
            return oldest

    def _create(self, run_id: str, start_time: float) -> None:
        self._client.create_run(
            self._experiment_id,
            start_time=int(start_time * 1000),
            run_name=run_id,
            tags={
                RUN_ID_TAG: run_id,
                _CREATED_TAG: f"{time.time_ns() // 1_000_000}",
                "mlflow.user": _user(),
                "mlflow.source.name": "air_hpc",
                "mlflow.source.type": "JOB",
            },
        )

    def _active(self, run_id: str) -> list[str]:
        """The MLflow runs of an air_hpc run, oldest first; RunDeleted when a person deleted it."""
        from mlflow.entities import ViewType

        found = self._client.search_runs(
            [self._experiment_id],
            f"tags.`{RUN_ID_TAG}` = '{run_id}'",
            run_view_type=ViewType.ALL,
            max_results=100,
        )
        active = [run for run in found if run.info.lifecycle_stage == "active"]
        if not active and any(_DUPLICATE_TAG not in run.data.tags for run in found):
            raise RunDeleted(
                f"the MLflow run of {run_id} was deleted; restore it in MLflow to ship it again"
            )
        active.sort(key=lambda run: (run.data.tags.get(_CREATED_TAG, ""), run.info.run_id))
        return [str(run.info.run_id) for run in active]

    def log_rows(self, mlflow_run_id: str, rows: Sequence[Row]) -> None:
        """Send metrics: those of one step together, at most MAX_METRICS in one transaction.

        A step with more metrics than that is divided all the same.
        """
        from mlflow.entities import Metric

        for batch in batches(rows):
            with _translated("metrics were not taken"):
                self._client.log_batch(
                    mlflow_run_id,
                    metrics=[Metric(row.key, row.value, row.time_ms, row.step) for row in batch],
                    synchronous=True,
                )

    def log_params(self, mlflow_run_id: str, params: Mapping[str, str]) -> None:
        """Send params; the same ones again change nothing."""
        from mlflow.entities import Param

        items = sorted(params.items())
        for start in range(0, len(items), MAX_PARAMS):
            with _translated("params were not taken"):
                batch = [Param(key, value) for key, value in items[start : start + MAX_PARAMS]]
                self._client.log_batch(mlflow_run_id, params=batch, synchronous=True)

    def set_tags(self, mlflow_run_id: str, tags: Mapping[str, str]) -> None:
        """Set tags, new or changed."""
        from mlflow.entities import RunTag

        with _translated("tags were not taken"):
            batch = [RunTag(key, value) for key, value in tags.items()]
            self._client.log_batch(mlflow_run_id, tags=batch, synchronous=True)

    def set_status(self, mlflow_run_id: str, status: str, end_time: float | None) -> None:
        """Set the status; with an `end_time` (seconds since the epoch) the run is ended."""
        with _translated("the status was not taken"):
            if end_time is None:
                self._client.update_run(mlflow_run_id, status=status)
            else:
                self._client.set_terminated(mlflow_run_id, status, int(end_time * 1000))

    def present(self, mlflow_run_id: str, key: str) -> set[tuple[int, int]]:
        """The (step, time_ms) of every row of a metric that the store holds."""
        with _translated("metrics could not be read"):
            history = self._client.get_metric_history(mlflow_run_id, key)
            return {(int(row.step), int(row.timestamp)) for row in history}

    def log_text(self, mlflow_run_id: str, name: str, text: str) -> None:
        """Keep a small text as an artifact.

        Raises StoreUnavailable also where the server leaves artifacts to its clients and the place
        is not reachable from here.
        """
        with _translated(f"{name} was not kept"):
            where = self._client.get_run(mlflow_run_id).info.artifact_uri
            if self.uri.is_server and urlsplit(where).scheme in ("", "file"):
                raise StoreUnavailable(
                    "the server keeps artifacts in a folder of its own machine and does not serve "
                    "it (mlflow server --serve-artifacts)"
                )
            self._client.log_text(mlflow_run_id, text, name)


def _prepare_environment() -> None:
    """Before mlflow is imported: no telemetry, no links printed, no git, short waits."""
    os.environ.update(_QUIET)
    for name, value in _PATIENCE.items():
        os.environ.setdefault(name, value)


def _create_database(path: Path, client_class: Any) -> None:
    """Make the SQLite file with its tables aside, and link it into place.

    Two processes that made the tables of one file at once would leave it half migrated. A link
    is made by one of them only; the other finds the file.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".aside-{path.name}-{secrets.token_hex(4)}")
    aside.touch(mode=0o600)
    try:
        client_class(tracking_uri=f"sqlite:///{aside}").search_experiments(max_results=1)
        with suppress(FileExistsError):
            os.link(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
