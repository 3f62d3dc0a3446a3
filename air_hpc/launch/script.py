"""Writes the batch script: a header of #SBATCH lines and a body from `sbatch_templates/`.

The body finds the run directory, sets the site's environment, starts one agent on each node with a
single srun, and afterwards carries out the one word that the coordinator left (requeue, resubmit,
stop). It holds no decision and no value of the training: those are read from the run directory at
each start, so a requeue can never replay something stale. Every value is quoted or refused
(`launch.quote`); templates are rendered with StrictUndefined, so a misspelt name is an error.
"""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

import air_hpc
from air_hpc.config.spec import ClusterSpec, RunSpec
from air_hpc.errors import BadInput, Problem, nearest
from air_hpc.launch import options, quote
from air_hpc.launch.options import Options
from air_hpc.plan.types import Plan
from air_hpc.resources import templates_dir

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME = re.compile(
    r"(TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|PRIVATE_KEY)", re.I
)
_NAME_OF_A_FILE = re.compile(r"_(FILE|PATH|DIR)$|^GOOGLE_APPLICATION_CREDENTIALS$", re.I)
_GIVEN_VALUE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(?!['\"]?[$`])[^\s;&|]")
"""In a line of shell: a name and the beginning of a value that is written out."""

_FROM_A_FILE = "Read it in cluster.setup from a file that only you can read"


@dataclass(frozen=True)
class ScriptPlace:
    """What differs between scripts: where it will lie, and the run (or index of runs) it is for.

    Exactly one of `run_dir` and `index` is set. `title` is one line for people.
    """

    path: Path
    title: str
    run_dir: Path | None = None
    index: Path | None = None


def problems(spec: RunSpec) -> list[Problem]:
    """What is wrong with the cluster config as far as the script is concerned."""
    cluster = spec.cluster
    found = []
    names = template_names()
    if "/" not in cluster.template and cluster.template not in names:
        hint = nearest(cluster.template, names)
        found.append(
            Problem(
                "cluster.template", cluster.template, "no such template", ", ".join(names), hint
            )
        )
    elif "/" in cluster.template and not Path(cluster.template).expanduser().is_file():
        found.append(Problem("cluster.template", cluster.template, "no such file"))
    for name, value in cluster.env.items():
        if not _ENV_NAME.fullmatch(name):
            found.append(Problem(f"cluster.env.{name}", value, "is no name of a variable"))
        elif _is_secret(name):
            what = "looks like a secret, and the script is kept"
            found.append(Problem(f"cluster.env.{name}", "(not shown)", what, hint=_FROM_A_FILE))
    for name in _GIVEN_VALUE.findall("\n".join(cluster.setup)):
        if _is_secret(name):
            what = f"gives {name} a value that looks like a secret, and the script is kept"
            found.append(Problem("cluster.setup", "(not shown)", what, hint=_FROM_A_FILE))
    if cluster.container.kind != "none" and cluster.container.image is None:
        found.append(
            Problem("cluster.container.image", "null", "a container needs one", "an image")
        )
    for key, values in _texts(cluster).items():
        found += [p for value in values if (p := quote.bash_problem(value, key))]
    return found


def _is_secret(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _NAME_OF_A_FILE.search(name)


def template_names() -> list[str]:
    """The templates that ship with the project."""
    return sorted(
        path.name.removesuffix(".sh.j2")
        for path in templates_dir().glob("*.sh.j2")
        if not path.name.startswith("_")
    )


def body(spec: RunSpec, plan: Plan, place: ScriptPlace) -> str:
    """The script without its header. Raises BadInput for a value that cannot be quoted."""
    cluster = spec.cluster
    template = _environment(cluster).get_template(_template_file(cluster))
    text = template.render(
        version=air_hpc.__version__,
        title=place.title,
        run_dir=None if place.run_dir is None else str(place.run_dir),
        index=None if place.index is None else str(place.index),
        script=str(place.path),
        umask="007" if spec.launch.share_group else "077",
        modules=cluster.modules,
        venv=cluster.venv,
        conda_env=cluster.conda_env,
        env=cluster.env,
        setup=cluster.setup,
        network_interface=cluster.network_interface,
        slurm_bin=slurm_bin(),
        package_dir=package_dir(),
        container_partial=_container_partial(cluster),
        container_srun_args=_pyxis_args(spec),
        srun_args=srun_args(spec, plan),
        command=command(spec),
        continuation=silent_continuation(spec),
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def header(chosen: Options) -> str:
    """The first line and the #SBATCH lines, rendered by submitit."""
    from air_hpc.launch.executor import header_lines

    return "\n".join(["#!/bin/bash", *header_lines(chosen)]) + "\n"


def srun_args(spec: RunSpec, plan: Plan) -> list[str]:
    """One agent on each node; an agent that leaves early must not take the others with it."""
    nodes = spec.allocated_nodes
    args = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    cpus = options.cpus_per_node(spec, plan)
    if cpus is not None:
        # srun does not take it over from sbatch from 22.05 on.
        args.append(f"--cpus-per-task={cpus}")
    args += ["--export=ALL", "--kill-on-bad-exit=0", "--wait=0"]
    if spec.outlives_nodes:
        # Else the step ends on all nodes when Slurm gives one up.
        args.append("--no-kill")
    return [*args, *spec.cluster.srun_args]


def silent_continuation(spec: RunSpec) -> str:
    """What the script does of itself where the agents were killed and left no word.

    Nothing in an allocation, which is the user's own, or where the next job of a chain waits.
    """
    asks = spec.cluster.kind == "slurm" and spec.launch.continuation in ("requeue", "resubmit")
    return spec.launch.continuation if asks else "none"


def command(spec: RunSpec) -> str:
    """What each srun task runs: the agent, inside the container where there is one."""
    agent = [interpreter(spec.cluster), "-m", "air_hpc.agent"]
    if spec.cluster.container.kind == "apptainer":
        agent = [*_apptainer(spec), *agent]
    return quote.bash_words(agent) + ' "$RUN_DIR"'


def interpreter(cluster: ClusterSpec) -> str:
    """The Python of the job: the config's, the environment's, or the one that submits."""
    if cluster.python is not None:
        return cluster.python
    if cluster.container.kind != "none":
        return "python3"
    if cluster.venv is not None:
        return f"{cluster.venv}/bin/python"
    if cluster.conda_env is not None:
        return "python"
    return sys.executable


def package_dir() -> str | None:
    """Where this package is imported from when it is a checkout; None when it is installed."""
    root = Path(air_hpc.__file__).resolve().parent.parent
    return None if "site-packages" in root.parts or "dist-packages" in root.parts else str(root)


def slurm_bin() -> str:
    """The folder of sbatch on this machine, for jobs whose own PATH lacks it."""
    found = shutil.which("sbatch")
    return str(Path(found).parent) if found else "/usr/bin"


def _apptainer(spec: RunSpec) -> list[str]:
    container = spec.cluster.container
    words = ["apptainer", "exec"]
    words += {"cuda": ["--nv"], "rocm": ["--rocm"]}.get(spec.accelerator.kind, [])
    for mount in _mounts(spec):
        words += ["--bind", mount]
    return [*words, container.image or ""]


def _pyxis_args(spec: RunSpec) -> list[str]:
    container = spec.cluster.container
    if container.kind != "pyxis":
        return []
    mounts = ",".join(m if ":" in m else f"{m}:{m}" for m in _mounts(spec))
    return [f"--container-image={container.image}", f"--container-mounts={mounts}"]


def _mounts(spec: RunSpec) -> list[str]:
    """The runs folder at its own path (and a checkout's), then what the config asks for."""
    own = [str(Path(spec.runs_dir).expanduser().absolute())]
    checkout = package_dir()
    if checkout is not None:
        own.append(checkout)
    return [*own, *spec.cluster.container.mounts]


def _container_partial(cluster: ClusterSpec) -> str:
    kind = cluster.container.kind
    return "_no_container.sh.j2" if kind == "none" else f"_{kind}.sh.j2"


def _template_file(cluster: ClusterSpec) -> str:
    if "/" in cluster.template:
        return Path(cluster.template).name
    return f"{cluster.template}.sh.j2"


def _texts(cluster: ClusterSpec) -> dict[str, list[str]]:
    container = cluster.container
    return {
        "cluster.modules": list(cluster.modules),
        "cluster.venv": [cluster.venv or ""],
        "cluster.conda_env": [cluster.conda_env or ""],
        "cluster.env": list(cluster.env.values()),
        "cluster.setup": list(cluster.setup),
        "cluster.python": [cluster.python or ""],
        "cluster.srun_args": list(cluster.srun_args),
        "cluster.network_interface": [cluster.network_interface or ""],
        "cluster.container": [container.image or "", *container.mounts],
    }


def _environment(cluster: ClusterSpec) -> jinja2.Environment:
    folders = [templates_dir()]
    if "/" in cluster.template:
        folders.insert(0, Path(cluster.template).expanduser().absolute().parent)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    filters: dict[str, Any] = {
        "q": quote.bash,
        "words": quote.bash_words,
        "words_after": lambda words: "".join(f" {quote.bash(word)}" for word in words),
        "comment": _checked,
        "one_line": _checked,
        "env_name": _checked_name,
    }
    environment.filters.update(filters)
    return environment


def _checked(text: str) -> str:
    quote.bash(text)
    return text


def _checked_name(name: str) -> str:
    if not _ENV_NAME.fullmatch(name):
        raise BadInput.single("cluster.env", name, "is no name of a variable")
    return name
