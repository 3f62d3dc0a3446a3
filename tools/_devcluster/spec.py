"""What a cluster is asked to be, checked: one `ClusterSpec`."""

import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import BadArguments

MAX_NODES = 4096
MAX_DEVICES = 64
LEAF_NODES, BIG_LEAF_NODES, POD_LEAVES, SMALL_TREE_NODES = 4, 16, 8, 64


@dataclass(frozen=True)
class ClusterSpec:
    """The shape of a cluster. Equal specs make equal clusters, but for ports and the folder."""

    nodes: int = 8
    devices_per_node: int = 2
    cpus_per_node: int = 8
    topology: str = ""
    """The text of topology.conf; empty for a flat network."""
    accounting: bool = False
    user: str = "airhpc"
    array_max: int = 1001
    exclusive: bool = False
    settings: tuple[str, ...] = ()
    """Further lines of slurm.conf, KEY=VALUE, each in place of ours with that key."""
    slurm: str = "host"

    def node_names(self) -> list[str]:
        """n1, n2, ..."""
        return [f"n{number}" for number in range(1, self.nodes + 1)]

    def to_json(self) -> dict[str, object]:
        """As it stands in the state folder's marker."""
        return {**asdict(self), "settings": list(self.settings)}


def build_spec(
    *,
    nodes: int,
    devices_per_node: int,
    cpus_per_node: int,
    topology: str,
    accounting: bool,
    user: str,
    array_max: int,
    exclusive: bool,
    settings: list[str],
    slurm: str,
) -> ClusterSpec:
    """The checked spec; BadArguments lists all that is wrong at once."""
    problems = [
        f"--{name} {value}: must be from {low} to {high}"
        for name, value, low, high in (
            ("nodes", nodes, 1, MAX_NODES),
            ("devices-per-node", devices_per_node, 0, MAX_DEVICES),
            ("cpus-per-node", cpus_per_node, 1, 1024),
            ("array-max", array_max, 2, 4_000_001),
        )
        if not low <= value <= high
    ]
    if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,30}", user) or user == "root":
        problems.append(
            f"--user {user!r}: must be an ordinary user's name (a-z, 0-9, _ and -), not root"
        )
    problems += [
        f"--set {setting!r}: must be KEY=VALUE, a line of slurm.conf"
        for setting in settings
        if not re.fullmatch(r"[A-Za-z]\w*=[^\n\r#]*", setting)
    ]
    text = ""
    if topology == "tree":
        text = tree_topology(nodes) if 1 <= nodes <= MAX_NODES else ""
    elif topology != "flat":
        try:
            text = Path(topology).read_text()
        except (OSError, ValueError) as error:
            problems.append(
                f"--topology {topology}: must be flat, tree or a readable topology.conf ({error})"
            )
        problems += topology_problems(topology, text, nodes)
    if problems:
        raise BadArguments("\n".join(problems))
    return ClusterSpec(
        nodes=nodes,
        devices_per_node=devices_per_node,
        cpus_per_node=cpus_per_node,
        topology=text,
        accounting=accounting,
        user=user,
        array_max=array_max,
        exclusive=exclusive,
        settings=tuple(settings),
        slurm=slurm,
    )


def tree_topology(nodes: int) -> str:
    """topology.conf of a tree: up to 64 nodes, leaves of 4 below one spine; above, leaves of 16,
    pods of 8 leaves and one core switch.
    """
    big = nodes > SMALL_TREE_NODES
    per_leaf = BIG_LEAF_NODES if big else LEAF_NODES
    leaves = math.ceil(nodes / per_leaf)
    lines = []
    for leaf in range(leaves):
        names = _range("n", leaf * per_leaf + 1, min(nodes, (leaf + 1) * per_leaf))
        lines.append(f"SwitchName=leaf{leaf + 1} LinkSpeed=1 Nodes={names}")
    if not big:
        lines.append(f"SwitchName=spine LinkSpeed=1 Switches={_range('leaf', 1, leaves)}")
        return "\n".join(lines) + "\n"
    pods = math.ceil(leaves / POD_LEAVES)
    for pod in range(pods):
        below = _range("leaf", pod * POD_LEAVES + 1, min(leaves, (pod + 1) * POD_LEAVES))
        lines.append(f"SwitchName=pod{pod + 1} LinkSpeed=1 Switches={below}")
    lines.append(f"SwitchName=core LinkSpeed=1 Switches={_range('pod', 1, pods)}")
    return "\n".join(lines) + "\n"


def _range(prefix: str, first: int, last: int) -> str:
    return f"{prefix}{first}" if first == last else f"{prefix}[{first}-{last}]"


def topology_problems(name: str, text: str, nodes: int) -> list[str]:
    """What is wrong with a topology file for a cluster of n1 to n<nodes>."""
    problems = []
    known = {f"n{number}" for number in range(1, nodes + 1)}
    covered: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        for value in re.findall(r"\bNodes=(\S+)", line.split("#")[0], flags=re.IGNORECASE):
            try:
                covered.update(expand_nodes(value))
            except BadArguments as error:
                problems.append(f"--topology {name}, line {number}: {error}")
    if unknown := sorted(covered - known):
        problems.append(
            f"--topology {name}: names nodes that are not n1 to n{nodes}: {', '.join(unknown[:5])}"
        )
    if missing := sorted(known - covered):
        problems.append(
            f"--topology {name}: {len(missing)} nodes stand on no switch, {missing[0]} among them"
        )
    if re.search(r"^\s*BlockName=", text, flags=re.MULTILINE | re.IGNORECASE):
        problems.append(f"--topology {name}: topology/block needs Slurm 23.11 or newer")
    return problems


def expand_nodes(text: str) -> list[str]:
    """The names that a list such as `n[1-3,7],n9` holds, in its order.

    BadArguments where it is no such list. Only names of the form n<number> are known: the code
    of the project proper uses ClusterShell, which is not there before an install.
    """
    if not re.fullmatch(r"(n\d+|n\[[\d,-]+\])(,(n\d+|n\[[\d,-]+\]))*", text):
        raise BadArguments(f"{text!r} is no list of nodes such as n1,n[3-5]")
    names = []
    for part in re.findall(r"n\[([\d,-]+)\]|n(\d+)", text):
        for piece in (part[0] or part[1]).split(","):
            first, dash, last = piece.partition("-")
            if not first.isdigit() or (dash and not last.isdigit()):
                raise BadArguments(f"{text!r}: {piece!r} is no number and no range")
            names += [f"n{number}" for number in range(int(first), int(last or first) + 1)]
    return names
