import pytest

from air_hpc.cli.texts import duration, ratio, scaled, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "unknown"),
        (0.25, "0.2 s"),
        (59.6, "1 min 00 s"),
        (42.4, "42 s"),
        (3600, "1 h 00 min"),
        (200_000, "2 d 07 h"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_sizes_rates_and_shares() -> None:
    assert size(1536) == "1.50 KiB"
    assert size(5 * 2**50) == "5120.00 TiB"
    assert scaled(989.5e12, "FLOP/s") == "989.5 TFLOP/s"
    assert scaled(8.03e9, "") == "8.03 G"
    assert ratio(0.416) == "41.6 %"
    assert ratio(0.00031) == "0.031 %"
    assert ratio(0.0) == "0.0 %"
    assert ratio(None) == "unknown"
