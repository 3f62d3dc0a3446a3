from __future__ import annotations

import socket
from pathlib import Path

import pytest

from air_hpc.errors import EnvironmentFailure
from air_hpc.probes.ports import (
    ephemeral_range,
    free_ports,
    port_is_free,
    spread,
    usable_ports,
)


def test_a_taken_port_is_not_free_and_is_walked_past() -> None:
    (first,) = free_ports(1, "a", host="127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen(1)
        assert not port_is_free(first, "127.0.0.1")
        assert first not in free_ports(2, "a", host="127.0.0.1")


def test_ports_lie_outside_the_ephemeral_range() -> None:
    assert set(usable_ports((32768, 60999))) == set(range(20_000, 32_768))
    assert set(usable_ports((1024, 65535))) == set(range(10_000, 20_000))
    assert all(port < 32768 for port in free_ports(50, "b", ephemeral=(32768, 60999)))


@pytest.mark.parametrize("count", [1, 7, 7919, 12_000])
def test_a_walk_meets_every_port_once(count: int) -> None:
    ports = range(20_000, 20_000 + count)
    assert sorted(spread("seed", ports)) == list(ports)


def test_other_seeds_begin_elsewhere() -> None:
    assert len({next(spread(f"job{n}", range(20_000, 32_000))) for n in range(10)}) == 10


def test_no_free_port_is_an_error_that_says_where_it_looked() -> None:
    with pytest.raises(EnvironmentFailure, match="no 1 free TCP ports"):
        free_ports(1, "c", host="203.0.113.1")  # an address that is not ours


def test_the_kernel_range_is_read_and_has_a_default(tmp_path: Path) -> None:
    source = tmp_path / "range"
    source.write_text("40000\t50000\n")
    assert ephemeral_range(source) == (40000, 50000)
    assert ephemeral_range(tmp_path / "none") == (32768, 60999)
