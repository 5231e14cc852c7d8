"""How numbers are shown in the live view and in reports; "-" stands for an unknown value."""

from __future__ import annotations


def figure(value: float | None) -> str:
    """Return all digits before the point and a few after it: 0, 0.0012, 0.012, 0.12, 1.23, 12.3, 12345."""
    if not value:
        return "-" if value is None else "0"
    bounds = ((0.01, 4), (0.1, 3), (10.0, 2), (100.0, 1))
    return f"{value:.{next((digits for below, digits in bounds if abs(value) < below), 0)}f}"


def decimal(value: float | None) -> str:
    """Return one decimal: 12.3."""
    return "-" if value is None else f"{value:.1f}"


def small(value: float | None) -> str:
    """Return a value that may be far below 1, to two digits: 0.021, 1.3, 2e-05."""
    return "-" if value is None else f"{value:.2g}" if abs(value) < 10 else count(value)


def percent(value: float | None) -> str:
    """Return whole percents: 83%."""
    return "-" if value is None else f"{value:.0f}%"


def count(value: float | None) -> str:
    """Return a count: 9999, 83K, 1.0M."""
    return "-" if value is None else _scaled(value, 10_000, ".0f")


def rate(value: float | None) -> str:
    """Return a rate a second: 0.5/s, 83/s, 5.1K/s."""
    return "-" if value is None else _scaled(value, 1_000, ".1f" if round(value, 1) < 10 else ".0f") + "/s"


def _scaled(value: float, plain_below: int, plain_format: str) -> str:
    """Return 83456 as 83K, 5100 as 5.1K; below ``plain_below`` in ``plain_format``."""
    if round(value) < plain_below:
        return format(value, plain_format)
    unit = ""
    while round(value) >= 1000 and unit != "G":
        value, unit = value / 1000, {"": "K", "K": "M", "M": "G"}[unit]
    return f"{value:.1f}{unit}" if round(value, 1) < 10 else f"{value:.0f}{unit}"
