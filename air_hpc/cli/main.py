"""Finds the verb, runs it, and turns every error into a message and an exit code.

Exit codes: 0 done, 1 the environment failed, 2 the input is wrong, 93 a verdict not to restart,
130 stopped by Ctrl-C. An error that nobody expected is one line on the screen; its traceback goes
to a file that the line names, or to the screen with AIR_HPC_DEBUG=1.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from air_hpc.errors import (
    EXIT_ENVIRONMENT,
    EXIT_OK,
    AirHpcError,
    BadInput,
    nearest,
)

EXIT_INTERRUPTED: Final = 130
"""What a shell reports for a command that Ctrl-C ended."""

VERBS: Final = {
    "run": "train: start a run here, or submit it (the verb when none is given)",
    "plan": "what a run would take: FLOP, memory, mesh; nothing is started",
    "status": "how runs stand, reconciled with Slurm",
    "why": "what failed first in a run, what was done, what comes next",
    "logs": "what a run printed, by rank, attempt and node; --follow",
    "cancel": "ask runs to save and end",
    "verify": "read a run's checkpoints and say which are what was committed",
    "nodes": "the nodes that your runs avoid; exclude and release them",
    "sync": "send metrics that only the run directories hold to MLflow",
}
_SHELL_OPTIONS: Final = ("-sc", "--shell-completion")

_OVERVIEW = """\
air_hpc trains large models: on this machine, or as batch jobs of a Slurm cluster.

usage: python -m air_hpc [verb] [overrides and options]

{verbs}

  python -m air_hpc                               train a tiny model here, to see it work
  python -m air_hpc plan model=llama_8b parallelism=fsdp launch.nodes=2 launch.devices_per_node=8
  python -m air_hpc cluster=slurm launch.nodes=2  submit the same kind of run to Slurm
  python -m air_hpc cluster=slurm -m optimizer.lr=1e-3,3e-4   submit a sweep
  python -m air_hpc status                        all runs in ./runs
  python -m air_hpc logs latest --follow

Help for a verb: python -m air_hpc VERB --help
Shell completion: eval "$(python -m air_hpc --shell-completion install=bash)"
"""


class Verb(Protocol):
    """What the module of a verb has."""

    def main(self, arguments: Sequence[str]) -> int:
        """Do it; the exit code. Raises AirHpcError."""
        ...


def overview() -> str:
    """The text of `--help` without a verb."""
    width = max(map(len, VERBS))
    return _OVERVIEW.format(verbs="\n".join(f"  {n:<{width}}  {t}" for n, t in VERBS.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code and never raises but for SystemExit."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path or a log line that the terminal has no letters for must not end the command.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _flushed(_dispatch(given))
    except BrokenPipeError:
        # The reader has gone (`... | head`): nothing more to say, and nothing wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        return EXIT_INTERRUPTED
    except AirHpcError as error:
        return _told(error, as_json=_wants_json(given))
    except ModuleNotFoundError as error:
        return _missing_module(error, as_json=_wants_json(given))
    except Exception as error:
        plain = _plainly(error)
        if plain is not None:
            return _told(plain, as_json=_wants_json(given))
        return _unexpected(error, as_json=_wants_json(given))


def _told(error: AirHpcError, *, as_json: bool) -> int:
    from air_hpc.cli.output import tell_error

    tell_error(error, as_json=as_json)
    return error.exit_code


def _plainly(error: Exception) -> AirHpcError | None:
    """What any path, wherever it is looked at, may fail with, in plain words; else None."""
    from air_hpc.errors import EnvironmentFailure

    if isinstance(error, RuntimeError) and "home directory" in str(error):
        return BadInput.single("", "~", "a folder begins with ~ and the name of no user here")
    if isinstance(error, FileNotFoundError) and error.filename is None:
        try:
            os.getcwd()
        except FileNotFoundError:
            return EnvironmentFailure(
                "the folder that this shell is in has been removed", next_step="cd to another one"
            )
    return None


def _flushed(code: int) -> int:
    sys.stdout.flush()
    return code


def _dispatch(given: list[str]) -> int:
    if given in (["--help"], ["-h"], ["help"]):
        sys.stdout.write(overview())
        return EXIT_OK
    if given[:1] == ["help"] and given[1:2] and given[1] in VERBS:
        return _load(given[1]).main(["--help"])
    if given[:1] == ["--version"]:
        import air_hpc

        sys.stdout.write(f"air_hpc {air_hpc.__version__}\n")
        return EXIT_OK
    if given and given[0].partition("=")[0] in _SHELL_OPTIONS:
        return _load("completion").main(given)
    if given[:1] == ["--complete"]:
        return _load("completion").main(given)
    verb, rest = _verb_of(given)
    return _load(verb).main(rest)


def _verb_of(given: list[str]) -> tuple[str, list[str]]:
    if not given or given[0].startswith("-"):
        return "run", given
    first = given[0]
    if first in VERBS:
        return first, given[1:]
    if "=" in first or first.startswith(("~", "+")):
        return "run", given
    raise BadInput.single(
        "verb",
        first,
        "no such verb",
        allowed=", ".join(VERBS) + ", or overrides like model=tiny",
        hint=nearest(first, list(VERBS)),
    )


def _load(name: str) -> Verb:
    module: Verb = importlib.import_module(f"air_hpc.cli.{name}")
    return module


def _wants_json(given: Sequence[str]) -> bool:
    return "--json" in given


def _missing_module(error: ModuleNotFoundError, *, as_json: bool) -> int:
    """A dependency is missing: most often the Python of another environment was called."""
    from air_hpc.cli.output import tell_error
    from air_hpc.errors import EnvironmentFailure

    name = (error.name or "").partition(".")[0]
    if name in ("", "air_hpc"):
        return _unexpected(error, as_json=as_json)
    beside = Path(__file__).resolve().parents[2] / ".venv" / "bin" / "activate"
    there = beside if beside.is_file() else "its bin/activate"
    failure = EnvironmentFailure(
        f"air_hpc needs {name}, which this Python does not have",
        tried=sys.executable,
        next_step=f"use the environment that air_hpc was installed into (source {there}), or "
        "install it for this one (in the project's folder: pip install '.[train,tracking]')",
    )
    tell_error(failure, as_json=as_json)
    return EXIT_ENVIRONMENT


def _unexpected(error: Exception, *, as_json: bool) -> int:
    import tempfile
    import traceback

    from air_hpc.cli.output import note, print_json

    text = "".join(traceback.format_exception(error))
    if os.environ.get("AIR_HPC_DEBUG") == "1":
        note(text.rstrip())
        where = "the traceback is above"
    else:
        with tempfile.NamedTemporaryFile(
            "w", prefix="air_hpc-", suffix=".traceback", delete=False
        ) as file:
            file.write(f"{' '.join(map(repr, sys.argv))}\n{text}")
        where = f"the traceback is in {file.name}; AIR_HPC_DEBUG=1 shows it here"
    summary = " ".join(f"{type(error).__name__}: {error}".split())
    if as_json:
        print_json({"error": summary, "exit_code": EXIT_ENVIRONMENT, "problems": []})
    note(f"An error that air_hpc did not expect: {summary}\n  {where}")
    return EXIT_ENVIRONMENT
