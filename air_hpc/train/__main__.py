"""`python -m air_hpc.train`: one worker, started by its agent.

Signals come before any import that takes time: Slurm sends the job's signals to every process of
it, and the default action of most is to die. The agent hears them and decides; this process only
ever stops through its session.
"""

import signal
import sys

for _name in ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT", "SIGHUP"):
    signal.signal(getattr(signal, _name), signal.SIG_IGN)

from air_hpc.train.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
