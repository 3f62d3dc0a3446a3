import pytest

from air_hpc.cli.output import print_table
from air_hpc.cli.texts import duration, rate, ratio, scaled, size


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


def test_rates_are_written_in_full() -> None:
    assert (rate(0.51234), rate(382.9), rate(123456.7)) == ("0.512", "383", "123,457")
    assert rate(None) == "unknown"


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ("100", ["RUN   STATE    WHY", f"run1  FAILED   {'because ' * 9}because", "run2  PENDING"]),
        ("30", ["RUN   STATE", "run1  FAILED", f"  {'because ' * 9}because", "run2  PENDING"]),
    ],
)
def test_a_long_text_that_has_no_room_in_its_column_stands_below_its_row(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    columns: str,
    expected: list[str],
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    rows = [("run1", "FAILED", "because " * 9 + "because"), ("run2", "PENDING", "")]
    print_table(("RUN", "STATE", "WHY"), rows)
    assert capsys.readouterr().out.splitlines() == expected
