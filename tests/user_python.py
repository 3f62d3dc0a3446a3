"""A Python that an ordinary user may run, with the packages of the one that runs the tests.

The tests' own interpreter may lie in root's home, where others may not look.
"""

import functools
import shutil
import site
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

LIGHT = "air_hpc, yaml, submitit, jinja2, ClusterShell"
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class UserPython:
    """An interpreter and the PYTHONPATH with which it has this checkout and its dependencies."""

    executable: str
    path: str

    @property
    def env(self) -> dict[str, str]:
        """For a process of the user: nothing is written into the checkout."""
        return {"PYTHONPATH": self.path, "PYTHONDONTWRITEBYTECODE": "1"}


@functools.cache
def python_for(user: str, *, checkout: Path = ROOT, modules: str = LIGHT) -> UserPython | None:
    """The first interpreter of this version that `user` can import `modules` with."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = [*site.getsitepackages(), sysconfig.get_paths()["purelib"]]
    candidates = [sys.executable, shutil.which(f"python{version}", path="/usr/bin:/usr/local/bin")]
    for executable in filter(None, candidates):
        for path in (str(checkout), ":".join([str(checkout), *dict.fromkeys(packages)])):
            found = UserPython(executable, path)
            probe = [executable, "-c", f"import {modules}"]
            words = ["runuser", "-u", user, "--", "env", "-i", f"PYTHONPATH={path}", *probe]
            if subprocess.run(words, capture_output=True, cwd="/").returncode == 0:
                return found
    return None
