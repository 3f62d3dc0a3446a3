"""`sync`: send to MLflow what only the run directories hold."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from air_hpc.cli.options import JSON, RUNS_DIR, Option, option_lines, parse
from air_hpc.cli.output import note, print_json, say
from air_hpc.errors import EXIT_ENVIRONMENT, EXIT_OK
from air_hpc.rundir.layout import RunDir
from air_hpc.rundir.words import RunState
from air_hpc.runs.find import default_runs_dir, find_runs
from air_hpc.runs.status import view_runs

if TYPE_CHECKING:
    from air_hpc.tracking.sync import SyncedRun

_ASK_SLURM_S = 60.0

OPTIONS = (
    JSON,
    RUNS_DIR,
    Option(("--uri",), "the MLflow store, instead of the one of each run's config", "text", "URI"),
    Option(("--experiment",), "the MLflow experiment, instead of the config's", "text", "NAME"),
    Option(("-f", "--follow"), "go on until every run is over"),
)

HELP_TEXT = f"""\
usage: python -m air_hpc sync [RUN ...] [options]

Sends metrics, parameters and states to MLflow from the run directories: for runs that train where
no MLflow can be reached, also while they run. Nothing is sent twice. Without a RUN every run of the
folder is synced.

{option_lines(OPTIONS)}

  python -m air_hpc sync
  python -m air_hpc sync latest --uri http://127.0.0.1:5000 --follow
  python -m air_hpc sync --uri sqlite:////home/me/mlflow.db
"""


def main(arguments: Sequence[str]) -> int:
    """Run the verb."""
    parsed = parse(arguments, OPTIONS)
    if parsed.flag("help"):
        say(HELP_TEXT.rstrip())
        return EXIT_OK
    folder = parsed.text("runs_dir")
    runs_dir = Path(folder).expanduser() if folder else default_runs_dir()
    runs = find_runs(runs_dir, parsed.rest)
    as_json = parsed.flag("json")
    if not runs:
        if as_json:
            print_json({"runs": []})
        else:
            note(f"There are no runs in {runs_dir}.")
        return EXIT_OK
    from air_hpc.tracking.sync import sync_runs

    with _stopped_by_signals() as stopped:
        summary = sync_runs(
            runs,
            uri=parsed.text("uri"),
            experiment=parsed.text("experiment"),
            follow=parsed.flag("follow"),
            state_of=ScheduledStates(runs),
            on_run=None if as_json or not parsed.flag("follow") else _tell_progress,
            should_stop=stopped,
            say=note,
        )
    if as_json:
        print_json({"runs": [_json(run) for run in summary.runs]})
    else:
        for run in summary.runs:
            say(_line(run))
    return EXIT_ENVIRONMENT if summary.failed else EXIT_OK


class ScheduledStates:
    """What Slurm knows better than the ledgers, by one question for all runs.

    The answer is kept for a minute: syncing many runs, over and over, must not load the scheduler.
    """

    def __init__(
        self, runs: Sequence[RunDir], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._runs = runs
        self._clock = clock
        self._asked: float | None = None
        self._states: dict[Path, RunState] = {}

    def __call__(self, run: RunDir) -> RunState | None:
        """The run's state where it is not its ledger's own; None: the ledger's word is as good."""
        now = self._clock()
        if self._asked is None or now - self._asked >= _ASK_SLURM_S:
            views = view_runs(self._runs)
            self._asked = now
            self._states = {v.run.path: v.status.state for v in views if v.source != "ledger"}
        return self._states.get(run.path)


@contextmanager
def _stopped_by_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM end the sync after the present pass, whole."""
    stopped: list[int] = []
    before = {
        number: signal.signal(number, lambda received, frame: stopped.append(received))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield lambda: bool(stopped)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell_progress(run: SyncedRun) -> None:
    if run.rows:
        note(_line(run))


def _line(run: SyncedRun) -> str:
    if run.error is not None:
        return f"{run.run_id}  not synced: {run.error}"
    state = f", {run.state}" if run.state is not None else ""
    return f"{run.run_id}  {run.rows} metrics sent to {run.uri}{state}"


def _json(run: SyncedRun) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "uri": run.uri,
        "mlflow_run_id": run.mlflow_run_id,
        "state": None if run.state is None else str(run.state),
        "rows": run.rows,
        "final": run.final,
        "error": run.error,
    }
