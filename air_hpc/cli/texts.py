"""Numbers, sizes and times as people read them. What is not known is `unknown` or `-`."""

from __future__ import annotations

UNKNOWN = "unknown"


def duration(seconds: float | None) -> str:
    """`42 s`, `3 min 20 s`, `5 h 03 min`, `2 d 04 h`."""
    if seconds is None:
        return UNKNOWN
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    minutes, secs = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {secs:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02d} h"


def size(count: float | None) -> str:
    """Bytes with a binary unit: `1.5 GiB`."""
    if count is None:
        return UNKNOWN
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError("the last unit takes everything")


def scaled(count: float | None, unit: str) -> str:
    """A number with a decimal prefix: `989.5 TFLOP/s`, `8.03 G`."""
    if count is None:
        return UNKNOWN
    value = float(count)
    for prefix in ("", "k", "M", "G", "T", "P", "E"):
        if abs(value) < 1000 or prefix == "E":
            return f"{value:.4g} {prefix}{unit}".rstrip()
        value /= 1000
    raise AssertionError("the last prefix takes everything")


def rate(per_s: float | None) -> str:
    """How many a second, in full: `382`, `12,345`; a slow one keeps three digits."""
    if per_s is None:
        return UNKNOWN
    return f"{per_s:.3g}" if abs(per_s) < 100 else f"{per_s:,.0f}"


def ratio(value: float | None) -> str:
    """A share in percent; a small one keeps two digits."""
    if value is None:
        return UNKNOWN
    return f"{100 * value:.2g} %" if 0 < value < 0.001 else f"{100 * value:.1f} %"


def number(value: float | None, digits: int = 4) -> str:
    """A number with a few digits."""
    return UNKNOWN if value is None else f"{value:.{digits}g}"


def or_dash(value: object) -> str:
    """A table's cell."""
    return "-" if value is None else str(value)
