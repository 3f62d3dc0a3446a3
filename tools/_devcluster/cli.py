"""The verbs of devcluster. Exit codes: 0 done, 1 the environment is not as needed, 2 bad input."""

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

from . import cluster, faults, report
from .errors import BadArguments, DevclusterError
from .install import find_install
from .nodes import known_nodes
from .spec import ClusterSpec, build_spec
from .state import default_state, open_state

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: list[str]) -> int:
    """Run one verb; every expected failure is a line on stderr and an exit code."""
    options = build_parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `up` cleans up behind itself
    try:
        options.run(options)
    except DevclusterError as error:
        for line in str(error).splitlines():
            print(f"devcluster: {line}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return 1
    except OSError as error:  # a full disk, a folder that may not be written ...
        print(f"devcluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("devcluster: interrupted", file=sys.stderr)
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="devcluster", description="A real Slurm of many nodes on this machine, for tests."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    _add_up(verbs)
    verb = _verb(verbs, "down", run_down, "end the cluster and all that it started")
    verb.add_argument("--keep-logs", action="store_true", help="leave the logs in the folder")
    verb = _verb(verbs, "status", run_status, "daemons, nodes by state, jobs")
    verb.add_argument("--json", action="store_true", help="print one JSON object")
    _verb(verbs, "env", run_env, "print the export lines, for eval")
    for name, run, text in (
        ("kill-node", run_kill, "a node dies: its slurmd and every process of its jobs"),
        ("isolate-node", run_isolate, "Slurm loses a node whose tasks live on"),
        ("drain-node", run_drain, "a node takes no further jobs"),
    ):
        _node_verb(verbs, name, run, text)
    text = "start a node's slurmd, undrain it, wait until it takes jobs"
    verb = _node_verb(verbs, "revive-node", run_revive, text)
    verb.add_argument("--timeout", type=float, default=90, metavar="SECONDS",
                      help="for the nodes to be back (default %(default)s)")  # fmt: skip
    verb.add_argument("--at-once", action="store_true",
                      help="do not wait until Slurm has seen a dead node's loss")  # fmt: skip
    return parser


def _verb(
    verbs: Verbs, name: str, run: Callable[[argparse.Namespace], None], text: str
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    verb.set_defaults(run=run)
    verb.add_argument(
        "--state",
        default=default_state(),
        metavar="FOLDER",
        help="the cluster's folder (default: $AIR_HPC_DEVCLUSTER, or %(default)s)",
    )
    return verb


def _node_verb(
    verbs: Verbs, name: str, run: Callable[[argparse.Namespace], None], text: str
) -> argparse.ArgumentParser:
    verb = _verb(verbs, name, run, text)
    verb.add_argument("nodes", nargs="+", metavar="NODE", help="n3, n[1-4] ...")
    return verb


def _add_up(verbs: Verbs) -> None:
    default = ClusterSpec()
    up = _verb(verbs, "up", run_up, "start a cluster, wait until all nodes are idle")
    up.add_argument("--nodes", type=int, default=default.nodes, metavar="N")
    up.add_argument("--devices-per-node", type=int, default=default.devices_per_node, metavar="G",
                    help="fake GPUs of each node (default %(default)s)")  # fmt: skip
    up.add_argument("--cpus-per-node", type=int, default=default.cpus_per_node, metavar="C",
                    help="CPUs that a node claims to have (default %(default)s)")  # fmt: skip
    up.add_argument("--topology", default="tree", metavar="flat|tree|FILE",
                    help="FILE is a topology.conf (default %(default)s)")  # fmt: skip
    up.add_argument("--accounting", action="store_true",
                    help="slurmdbd and mariadb, accounts, QOS, enforced limits")  # fmt: skip
    up.add_argument("--user", default=default.user, metavar="NAME",
                    help="the ordinary user, made if missing (default %(default)s)")  # fmt: skip
    up.add_argument("--array-max", type=int, default=default.array_max, metavar="N",
                    help="MaxArraySize (default %(default)s)")  # fmt: skip
    up.add_argument("--exclusive", action="store_true",
                    help="a job always gets whole nodes (OverSubscribe=EXCLUSIVE)")  # fmt: skip
    up.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE",
                    help="a line of slurm.conf, in place of ours; may be repeated")  # fmt: skip
    up.add_argument("--slurm", default="host", metavar="VERSION",
                    help="which Slurm; only `host` for now")  # fmt: skip
    up.add_argument("--timeout", type=float, default=0, metavar="SECONDS",
                    help="for all nodes to be idle (default 60 + 0.25 a node)")  # fmt: skip
    form = up.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--print-env", action="store_true", help="print only the export lines")


def checked(*parts: Callable[[], object]) -> tuple[Any, ...]:
    """What each part makes of the arguments; BadArguments with the problems of all of them."""
    made, problems = [], []
    for part in parts:
        try:
            made.append(part())
        except BadArguments as error:
            problems.append(str(error))
    if problems:
        raise BadArguments("\n".join(problems))
    return tuple(made)


def run_up(options: argparse.Namespace) -> None:
    """`up`: on stdout the export lines, for people the rest on stderr."""
    names = (field.name for field in dataclasses.fields(ClusterSpec))
    wanted = {name: getattr(options, name) for name in names}
    install, spec, state = checked(
        lambda: find_install(options.slurm),
        lambda: build_spec(**wanted),
        lambda: open_state(options.state),
    )
    timeout_s = options.timeout or 60 + spec.nodes / 4
    started = cluster.up(install, spec, state, timeout_s)
    if options.json:
        result = {
            "slurm_conf": str(state.slurm_conf),
            "state_folder": str(state.root),
            "already_up": started.already_up,
            "seconds": round(started.seconds, 1),
            "spec": spec.to_json(),
        }
        print(json.dumps(result))
        return
    if not options.print_env:
        said = "runs already" if started.already_up else f"is up after {started.seconds:.1f} s"
        cluster.say(
            f"the cluster {said}: {spec.nodes} nodes, {spec.devices_per_node} GPUs and "
            f"{spec.cpus_per_node} CPUs each, partitions low (default) and high; to use it:"
        )
    print(report.environment_lines(state))


def run_down(options: argparse.Namespace) -> None:
    """`down`."""
    state = open_state(options.state)
    ended = cluster.down(state, options.keep_logs)
    cluster.say(f"ended {ended} processes of {state.root}" if ended else "nothing was running")


def run_status(options: argparse.Namespace) -> None:
    """`status`: exit code 0 whatever the state is."""
    found = report.status(find_install("host"), open_state(options.state))
    if options.json:
        print(json.dumps(found.to_json()))
        return
    print(f"{found.state}: {found.state_folder}")
    for name, pid in (found.daemons or {}).items():
        print(f"  {name}: {f'pid {pid}' if pid else 'not running'}")
    if found.slurmd is not None:
        missing = ", ".join((found.slurmd_missing or [])[:20])
        print(f"  slurmd: {len(found.slurmd)} run" + (f", missing: {missing}" if missing else ""))
    for name, nodes in (found.nodes or {}).items():
        shown = ", ".join(nodes[:16]) + (" ..." if len(nodes) > 16 else "")
        print(f"  {len(nodes)} {name}: {shown}")
    for job in found.jobs or []:
        print("  job {id} {name} of {user}: {state} in {partition} on {nodes}".format(**job))


def run_env(options: argparse.Namespace) -> None:
    """`env`."""
    state = open_state(options.state)
    report.require_cluster(state)
    print(report.environment_lines(state))


def run_kill(options: argparse.Namespace) -> None:
    """`kill-node`."""
    state = open_state(options.state)
    nodes = known_nodes(report.require_cluster(state), options.nodes)
    cluster.say(f"killed {faults.kill_nodes(state, nodes)} processes of {' '.join(nodes)}")


def run_isolate(options: argparse.Namespace) -> None:
    """`isolate-node`."""
    state = open_state(options.state)
    nodes = known_nodes(report.require_cluster(state), options.nodes)
    cluster.say(f"killed {faults.isolate_nodes(state, nodes)} daemons of {' '.join(nodes)}")


def run_revive(options: argparse.Namespace) -> None:
    """`revive-node`."""
    state = open_state(options.state)
    spec = report.require_cluster(state)
    nodes = known_nodes(spec, options.nodes)
    faults.revive_nodes(find_install(spec.slurm), state, nodes, options.timeout, options.at_once)
    cluster.say(f"{' '.join(nodes)} take jobs again")


def run_drain(options: argparse.Namespace) -> None:
    """`drain-node`."""
    state = open_state(options.state)
    spec = report.require_cluster(state)
    nodes = known_nodes(spec, options.nodes)
    faults.drain_nodes(find_install(spec.slurm), state, nodes)
    cluster.say(f"{' '.join(nodes)} are draining")
