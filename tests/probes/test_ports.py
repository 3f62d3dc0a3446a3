from __future__ import annotations

import socket
from pathlib import Path

import pytest

from air_hpc.errors import EnvironmentFailure
from air_hpc.probes.ports import ephemeral_range, find_free_port, port_is_free


def test_a_taken_port_is_not_free_and_is_walked_past() -> None:
    first = find_free_port(1, "127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen(1)
        assert not port_is_free(first, "127.0.0.1")
        assert find_free_port(1, "127.0.0.1") != first


def test_ports_lie_outside_the_ephemeral_range() -> None:
    for start in range(0, 10**6, 99_991):
        port = find_free_port(start, ephemeral=(32768, 60999))
        assert 20_000 <= port < 32768
    assert find_free_port(0, ephemeral=(1024, 65535)) < 20_000


def test_neighbouring_jobs_begin_far_apart() -> None:
    ports = {find_free_port(job, "127.0.0.1") for job in range(1000, 1010)}
    assert len(ports) == 10


def test_no_free_port_is_an_error_that_says_where_it_looked() -> None:
    with pytest.raises(EnvironmentFailure, match="no free port among 3"):
        find_free_port(0, "203.0.113.1", tries=3)  # an address that is not ours


def test_the_kernel_range_is_read_and_has_a_default(tmp_path: Path) -> None:
    source = tmp_path / "range"
    source.write_text("40000\t50000\n")
    assert ephemeral_range(source) == (40000, 50000)
    assert ephemeral_range(tmp_path / "none") == (32768, 60999)
