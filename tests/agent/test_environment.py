"""Where an agent is, from the environment that srun sets."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from air_hpc.agent.environment import (
    JobContext,
    coordinator_addresses,
    own_address,
    read_job_context,
    thread_affinity,
)
from air_hpc.errors import EnvironmentFailure

SRUN = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "n2",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
}
"""As a task of `srun --ntasks-per-node=1` on 22.05.8 sees it."""
ARRAY = {
    **SRUN,
    "SLURM_JOB_ID": "13",
    "SLURM_ARRAY_JOB_ID": "12",
    "SLURM_ARRAY_TASK_ID": "4",
    "SLURM_RESTART_COUNT": "2",
}


def context(**facts: Any) -> JobContext:
    return read_job_context({**SRUN, **facts})


class TestJobContext:
    def test_without_slurm_it_is_a_local_run_of_one_node(self) -> None:
        local = read_job_context({"HOME": "/root"})
        assert (local.scheduler, local.nodes, local.job_id) == ("local", ("local",), None)
        assert local.is_coordinator
        assert local.start_id == "local.0"
        assert local.requeue_id is None

    def test_a_node_is_its_slurmd_name(self) -> None:
        read = read_job_context(SRUN)
        assert (read.node, read.node_index, read.nodes) == ("n2", 1, ("n1", "n2", "n3"))
        assert not read.is_coordinator
        assert read.requeue_id == "12"
        assert read.start_id == "12.0"

    def test_an_array_element_is_requeued_by_array_and_task(self) -> None:
        read = read_job_context(ARRAY)
        assert read.requeue_id == "12_4"
        assert read.start_id == "13.2"
        assert read.restart_count == 2

    def test_the_element_that_has_the_arrays_own_id_is_still_one_element(self) -> None:
        read = read_job_context({**ARRAY, "SLURM_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "0"})
        assert read.requeue_id == "12_0"

    def test_the_steps_nodes_win_over_the_jobs(self) -> None:
        assert context(SLURM_STEP_NODELIST="n[2-3]", SLURM_NODEID="0").nodes == ("n2", "n3")

    def test_every_start_has_an_id_of_its_own(self) -> None:
        starts = [read_job_context(SRUN), context(SLURM_RESTART_COUNT="1"), read_job_context(ARRAY)]
        assert len({start.start_id for start in starts}) == 3

    @pytest.mark.parametrize("name", ["SLURM_NODEID", "SLURMD_NODENAME"])
    def test_a_missing_variable_is_named(self, name: str) -> None:
        partial = {key: value for key, value in SRUN.items() if key != name}
        with pytest.raises(EnvironmentFailure, match=name) as caught:
            read_job_context(partial)
        assert "srun" in str(caught.value)

    def test_a_job_without_any_node_list_is_refused(self) -> None:
        bare = {key: value for key, value in SRUN.items() if "NODELIST" not in key}
        with pytest.raises(EnvironmentFailure, match="SLURM_JOB_NODELIST"):
            read_job_context(bare)

    def test_a_node_id_that_is_no_number_is_refused(self) -> None:
        with pytest.raises(EnvironmentFailure, match="first"):
            context(SLURM_NODEID="first")


class TestAddresses:
    def resolving(self, monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
        def gethostbyname(name: str) -> str:
            if address is None:
                raise socket.gaierror(-2, "Name or service not known")
            return address

        monkeypatch.setattr(socket, "gethostbyname", gethostbyname)

    def test_one_node_needs_no_network(self) -> None:
        alone = context(SLURM_STEP_NODELIST="n1", SLURM_NODEID="0")
        assert coordinator_addresses(alone) == ["127.0.0.1"]

    def test_the_first_nodes_name_comes_before_sruns_address(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.resolving(monkeypatch, "10.0.0.1")
        far = context(SLURM_LAUNCH_NODE_IPADDR="10.0.9.9")
        assert coordinator_addresses(far) == ["10.0.0.1", "10.0.9.9"]

    def test_a_name_that_does_not_resolve_leaves_sruns_address(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.resolving(monkeypatch, None)
        assert coordinator_addresses(context()) == ["127.0.0.1"]

    def test_a_name_that_resolves_to_loopback_comes_last(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Debian maps a machine's own name to 127.0.1.1."""
        self.resolving(monkeypatch, "127.0.1.1")
        far = context(SLURM_LAUNCH_NODE_IPADDR="10.0.0.1")
        assert coordinator_addresses(far) == ["10.0.0.1", "127.0.1.1"]

    def test_no_address_at_all_says_what_was_tried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.resolving(monkeypatch, None)
        with pytest.raises(EnvironmentFailure, match="n1 has no address"):
            coordinator_addresses(context(SLURM_LAUNCH_NODE_IPADDR=""))

    def test_the_own_address_lies_on_the_way_to_the_coordinator(self) -> None:
        assert own_address("127.0.0.1", None) == "127.0.0.1"

    def test_a_configured_interface_decides(self) -> None:
        assert own_address("192.0.2.1", "lo") == "127.0.0.1"

    def test_an_unknown_interface_lists_those_there_are(self) -> None:
        with pytest.raises(EnvironmentFailure, match=r"cluster\.network_interface=ib99") as caught:
            own_address("127.0.0.1", "ib99")
        assert "lo" in str(caught.value)

    def test_no_route_is_no_traceback(self) -> None:
        with pytest.raises(EnvironmentFailure, match="no route") as caught:
            own_address("255.255.255.255", None)  # broadcasting is refused to this socket
        assert "cluster.network_interface" in str(caught.value)


def test_workers_get_disjoint_equal_pieces_of_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3, 5, 7, 9})
    assert [thread_affinity(i, 2) for i in range(2)] == [{1, 3}, {5, 7}]
    assert thread_affinity(0, 6) is None
