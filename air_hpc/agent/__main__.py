"""The agent's process: `python -m air_hpc.agent RUN_DIR`."""

import sys

from air_hpc.agent.main import main

sys.exit(main())
