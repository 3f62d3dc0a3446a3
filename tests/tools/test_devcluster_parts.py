"""The parts of devcluster that need no Slurm."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools._devcluster.configs import Ports, slurm_conf
from tools._devcluster.errors import BadArguments, DevclusterError
from tools._devcluster.install import CORE, Install
from tools._devcluster.processes import Process, kill_all, process_table, read_process
from tools._devcluster.shared import find_ports
from tools._devcluster.spec import ClusterSpec, expand_nodes, topology_problems, tree_topology
from tools._devcluster.state import State


def value_of(text: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", text, flags=re.MULTILINE)


class TestTopology:
    @given(st.integers(1, 4096))
    def test_a_tree_holds_every_node_once_and_one_switch_at_the_top(self, nodes: int) -> None:
        text = tree_topology(nodes)
        named = [n for part in re.findall(r"Nodes=(\S+)", text) for n in expand_nodes(part)]
        assert named == [f"n{number}" for number in range(1, nodes + 1)]
        below = " ".join(re.findall(r"Switches=(\S+)", text))
        children = len(re.findall(r"SwitchName", text)) - 1
        counted = sum(
            int(last or first) - int(first) + 1
            for first, last in re.findall(r"[a-z]\[?(\d+)(?:-(\d+))?", below)
        )
        assert counted == children
        assert topology_problems("tree", text, nodes) == []

    def test_64_nodes_stand_in_leaves_of_4_and_1024_in_8_pods_of_8_leaves(self) -> None:
        assert tree_topology(64).count("SwitchName=leaf") == 16
        big = tree_topology(1024)
        assert "SwitchName=leaf64 LinkSpeed=1 Nodes=n[1009-1024]" in big
        assert "SwitchName=core LinkSpeed=1 Switches=pod[1-8]" in big

    @pytest.mark.parametrize("text", ["", "m1", "n[1-", "n[a]", "n1,", "n[1-2-3]", "n[-2]"])
    def test_what_is_no_list_of_nodes_is_refused(self, text: str) -> None:
        with pytest.raises(BadArguments):
            expand_nodes(text)

    def test_blocks_need_a_newer_slurm_and_that_is_said(self) -> None:
        assert "23.11" in topology_problems("x", "BlockName=b1 Nodes=n[1-2]\n", 2)[0]


class TestSlurmConf:
    @staticmethod
    def conf(spec: ClusterSpec, version: tuple[int, int] = (22, 5)) -> str:
        return slurm_conf(spec, State(Path("/tmp/x")), Ports(10_000), "host", version)

    def test_a_setting_replaces_the_line_with_its_key_whatever_its_case(self) -> None:
        text = self.conf(ClusterSpec(settings=("slurmdtimeout=30", "Prolog=/bin/true")))
        assert value_of(text, "SlurmdTimeout") == []
        assert value_of(text, "slurmdtimeout") == ["30"]
        assert value_of(text, "Prolog") == ["/bin/true"]

    def test_a_cluster_without_gpus_knows_no_gres(self) -> None:
        assert "gpu" not in self.conf(ClusterSpec(devices_per_node=0)).lower()

    def test_each_node_gets_a_port_of_its_own_after_those_of_the_servers(self) -> None:
        assert "Port=[10002-10009]" in self.conf(ClusterSpec(nodes=8))
        assert Ports.count(ClusterSpec(nodes=8)) == 10


class TestPorts:
    def test_a_port_in_use_or_taken_is_left_out(self) -> None:
        first = find_ports(3, set())
        with socket.socket() as user:
            user.bind(("127.0.0.1", first + 1))
            user.listen()
            other = find_ports(3, {first + 2})
        assert other >= first + 3

    def test_no_port_is_one_that_the_kernel_hands_out(self) -> None:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        first = find_ports(1026, set())
        assert first + 1025 < low or first > high


class TestProcesses:
    def test_a_process_with_another_start_time_is_never_signalled(self) -> None:
        child = subprocess.Popen(["sleep", "100"])
        try:
            now = read_process(child.pid)
            assert now is not None
            Process(pid=child.pid, start=now.start - 1).send(signal.SIGKILL)
            assert child.poll() is None
            now.send(signal.SIGKILL)
            assert child.wait() == -signal.SIGKILL
        finally:
            child.kill()

    def test_killing_a_parent_takes_children_that_it_forks_meanwhile(self) -> None:
        script = (
            "import os, time\n"
            "print('on', flush=True)\n"
            "while True:\n"
            "    if os.fork() == 0:\n"
            "        os.setsid(); time.sleep(3); os._exit(0)\n"
            "    time.sleep(0.005)\n"
        )
        marker = f"fork-{os.getpid()}"
        parent = subprocess.Popen(
            [sys.executable, "-c", script, marker], stdout=subprocess.PIPE, text=True
        )
        assert parent.stdout is not None
        parent.stdout.readline()

        def mine(process: Process) -> bool:
            return marker in process.command()

        _, alive = kill_all(lambda table: [p for p in table.values() if mine(p)])
        parent.wait()
        parent.stdout.close()
        assert not alive
        assert not [p for p in process_table().values() if mine(p) and p.alive()]

    def test_a_child_dies_before_its_parent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Else the kernel would wake the stopped child with a SIGHUP, which srun obeys."""
        script = "import subprocess, sys; subprocess.run(['sleep', '100'])"
        parent = subprocess.Popen([sys.executable, "-c", script])
        killed: list[int] = []
        send = Process.send

        def note(process: Process, number: signal.Signals) -> None:
            if number == signal.SIGKILL:
                killed.append(process.pid)
            send(process, number)

        monkeypatch.setattr(Process, "send", note)
        while not (children := [p for p in process_table().values() if p.parent == parent.pid]):
            time.sleep(0.01)
        pids = [parent.pid, children[0].pid]
        kill_all(lambda table: [table[pid] for pid in pids if pid in table])
        parent.wait()
        assert killed == [pids[1], pids[0]]

    def test_a_name_with_spaces_and_brackets_is_read(self, tmp_path: Path) -> None:
        program = tmp_path / "a) S 1 (b"
        program.write_bytes(Path("/bin/sleep").read_bytes())
        program.chmod(0o755)
        child = subprocess.Popen([program, "100"])
        try:
            found = process_table()[child.pid]
            assert found.parent == os.getpid()
        finally:
            child.kill()
            child.wait()


class TestInstall:
    def test_what_is_missing_is_named_with_the_command_that_installs_it(self) -> None:
        with pytest.raises(
            DevclusterError, match=r"apt-get install .* munge slurm-client slurmctld"
        ):
            Install(search_path="/nonexistent").require(CORE)

    def test_a_failed_command_is_told_with_what_it_said(self) -> None:
        with pytest.raises(DevclusterError, match="code 3 and said: oh"):
            Install().run("sh", "-c", "echo oh >&2; exit 3")

    def test_a_daemon_gets_nothing_of_the_callers_environment(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SLURMD_NODENAME", "n1")
        assert set(Install().environment("/x")) == {"PATH", "LANG", "SLURM_CONF"}
