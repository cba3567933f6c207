"""Sizes, counts and durations as a reader sees them."""

from __future__ import annotations

import pytest

from toolkit.units import GIB, KIB, MIB, TIB, format_bytes, format_count, format_seconds


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (KIB - 1, "1023 B"),
        (KIB, "1.00 KiB"),
        (MIB, "1.00 MiB"),
        (1.5 * GIB, "1.50 GiB"),
        (2 * TIB, "2.00 TiB"),
    ],
)
def test_bytes_are_binary_and_keep_their_sign(size: float, shown: str) -> None:
    assert format_bytes(size) == shown
    assert not size or format_bytes(-size) == f"-{shown}"


@pytest.mark.parametrize(("count", "shown"), [(999, "999"), (1000, "1.00 K"), (8.03e9, "8.03 B"), (1.5e12, "1.50 T")])
def test_counts_are_decimal(count: float, shown: str) -> None:
    assert format_count(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.04, "0.0 s"), (60, "0:01:00"), (3599.6, "1:00:00"), (90_061, "25:01:01")]
)
def test_durations_of_a_minute_have_no_tenths(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown
