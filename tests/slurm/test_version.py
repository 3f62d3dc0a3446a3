import pytest

from air_hpc.errors import EnvironmentFailure
from air_hpc.slurm.version import SlurmVersion, parse_version


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("slurm-wlm 22.05.8", SlurmVersion(22, 5, 8)),
        ("slurm 24.11.5\n", SlurmVersion(24, 11, 5)),
        ("slurm 20.11.4", SlurmVersion(20, 11, 4)),
        ("slurm 26.05.0-0rc1", SlurmVersion(26, 5, 0)),
    ],
)
def test_versions_as_printed(text: str, expected: SlurmVersion) -> None:
    assert parse_version(text) == expected


def test_versions_are_ordered_as_released() -> None:
    texts = ["24.11.5", "22.05.8", "26.05.5", "23.02.0", "23.11.10", "20.11.4", "23.11.9"]
    ordered = sorted(map(parse_version, texts))
    assert list(map(str, ordered)) == [
        "20.11.4", "22.05.8", "23.02.0", "23.11.9", "23.11.10", "24.11.5", "26.05.5",
    ]  # fmt: skip


def test_no_version_is_an_error_of_the_environment() -> None:
    with pytest.raises(EnvironmentFailure, match="no Slurm version"):
        parse_version("command not found")
