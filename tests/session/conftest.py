"""Run directories for the tests of the session."""

from tests.rundir.conftest import folder, run

__all__ = ["folder", "run"]
