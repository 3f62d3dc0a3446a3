import pytest

from air_hpc.errors import EnvironmentFailure
from air_hpc.slurm.hostlist import expand, fold


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[01-02,10]", ["n01", "n02", "n10"]),
        ("gpu[1-2],cpu1", ["gpu1", "gpu2", "cpu1"]),
        ("rack[1-2]n[1-2]", ["rack1n1", "rack1n2", "rack2n1", "rack2n2"]),
        ("b2,a[1,3],b1", ["b2", "a1", "a3", "b1"]),
        ("(null)", []),
    ],
)
def test_names_come_in_the_order_of_the_list(text: str, names: list[str]) -> None:
    """Sorted names once gave another node than SLURM_NODEID 0 the coordinator's part."""
    assert list(expand(text)) == names


def test_a_malformed_list_is_said_to_be_one() -> None:
    with pytest.raises(EnvironmentFailure, match="not a hostlist"):
        expand("n[1-")


def test_folding_and_expanding_keep_the_names() -> None:
    assert fold(["n3", "n1", "n2"]) == "n[1-3]"
    assert fold([]) == ""
