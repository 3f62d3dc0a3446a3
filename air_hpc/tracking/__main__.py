"""The shipper's process: `python -m air_hpc.tracking RUN_DIR`, started by the coordinator's agent.

It ends by itself: when its standard input ends (the agent closes it, or died), or when its parent
is gone, it makes one last pass, bounded in time, and leaves. The job's signals reach every process
of a step; they are ignored here from the first line on, before anything slow is imported.

A store that does not answer is said once, tried again ever more slowly, and never ends the process:
the metrics wait in the spool, and the next attempt or `python -m air_hpc sync` ships them.
"""

from __future__ import annotations

import signal

for _name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGPIPE"):
    signal.signal(getattr(signal, _name), signal.SIG_IGN)

import os  # noqa: E402
import random  # noqa: E402
import select  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from contextlib import suppress  # noqa: E402
from pathlib import Path  # noqa: E402

from air_hpc.errors import EXIT_BAD_INPUT, EXIT_OK, AirHpcError, BadInput  # noqa: E402
from air_hpc.rundir.layout import open_run_dir  # noqa: E402
from air_hpc.tracking.shipper import RunShipper  # noqa: E402
from air_hpc.tracking.store import RunDeleted, Store, StoreUnavailable  # noqa: E402
from air_hpc.tracking.sync import load_frozen, writer_name  # noqa: E402

MAX_BACK_OFF_S = 60.0
LAST_PASS_S = 10.0
"""How long the last pass is tried again when the store does not answer."""

POLL_S = 1.0


class Life:
    """Whether the process is still wanted: its standard input is open and its parent lives."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._open = True

    def wait(self, seconds: float) -> bool:
        """Wait, and say whether to go on; returns early when not."""
        until = time.monotonic() + seconds
        while self._open and os.getppid() == self._parent:
            left = until - time.monotonic()
            if left <= 0:
                return True
            try:
                readable, _, _ = select.select([0], [], [], min(left, POLL_S))
                self._open = not readable or bool(os.read(0, 4096))
            except OSError:
                self._open = False
        return False


def say(text: str) -> None:
    """One line on stderr; a reader that is gone does no harm."""
    with suppress(OSError, ValueError):
        print(f"air_hpc tracking: {text}", file=sys.stderr, flush=True)


def follow(shipper: RunShipper, interval_s: float, life: Life) -> None:
    """Ship until the run is over or nobody wants it any more, then once again."""
    failures = 0
    wanted = life.wait(0)
    while wanted:
        if failures or shipper.changed():
            try:
                if shipper.ship().final:
                    return
                if failures:
                    say("the store answers again; what waited is shipped")
                failures = 0
            except RunDeleted:
                raise
            except (StoreUnavailable, OSError) as error:
                if not failures:
                    say(f"{error}; training is not affected, metrics wait in the run directory")
                failures += 1
        back_off_s = min(MAX_BACK_OFF_S, interval_s * 2 ** min(failures, 10))
        wanted = life.wait(back_off_s * random.uniform(0.75, 1.0) if failures else interval_s)
    last_pass(shipper, already_down=failures > 0)


def last_pass(shipper: RunShipper, *, already_down: bool) -> None:
    """Ship what is left; a store that is down gets a few more tries, one if it was down before."""
    until = time.monotonic() + LAST_PASS_S
    while True:
        try:
            shipper.ship()
            return
        except (StoreUnavailable, OSError) as error:
            if already_down or time.monotonic() > until:
                say(f"{error}; what is left waits for the next attempt or `python -m air_hpc sync`")
                return
            time.sleep(0.5)


def main(argv: list[str]) -> int:
    """Run the process; returns its exit code."""
    if len(argv) != 1:
        say("usage: python -m air_hpc.tracking RUN_DIR")
        return EXIT_BAD_INPUT
    life = Life()
    with suppress(OSError):
        os.nice(5)  # the workers' processors come first
    try:
        run = open_run_dir(Path(argv[0]))
        frozen = load_frozen(run)
        uri = frozen.plan.tracking_uri
        if uri is None:
            return EXIT_OK
        store = Store(uri, frozen.spec.tracking.experiment)
        shipper = RunShipper(run, frozen, store, writer=writer_name(), say=say)
        follow(shipper, frozen.spec.tracking.interval_s, life)
    except BadInput as error:
        say(str(error))
        return EXIT_BAD_INPUT
    except AirHpcError as error:
        say(str(error))
        return error.exit_code
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
