"""`python -m air_hpc`."""

import sys

from air_hpc.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
