"""Quantities as text: formatting with units, and reading of whole numbers. GiB is 2**30 bytes and is printed as GiB."""

from __future__ import annotations

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
# Python refuses to read integers of more than 4,300 digits; no count, port or identity has more than these.
_MOST_DIGITS = 18


def format_bytes(num_bytes: float) -> str:
    """Return a size in the largest binary unit in which it is at least 1.

    >>> format_bytes(85_017_493_504)
    '79.18 GiB'
    >>> format_bytes(512)
    '512 B'
    """
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(count: float) -> str:
    """Return a count with a decimal suffix, as is usual for parameter counts.

    >>> format_count(8_030_261_248)
    '8.03 B'
    >>> format_count(1536)
    '1.54 K'
    """
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {suffix}"
    return f"{count:.0f}"


def format_seconds(seconds: float) -> str:
    """Return a duration as h:mm:ss, or with tenths below a minute.

    >>> format_seconds(3.21)
    '3.2 s'
    >>> format_seconds(3725)
    '1:02:05'
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def whole_number(text: str | None) -> int | None:
    """Return the whole number that decimal digits say; None for any other text, and for more digits than any count has.

    >>> whole_number("29500"), whole_number("-1"), whole_number("9" * 5000)
    (29500, None, None)
    """
    if text is None or not (text.isascii() and text.isdecimal()) or len(text) > _MOST_DIGITS:
        return None
    return int(text)
