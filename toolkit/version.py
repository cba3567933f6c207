"""The installed version, read when asked for: package metadata costs a start tens of milliseconds."""

from __future__ import annotations


def installed_version() -> str:
    """Return the distribution's version, or `0+unknown` in a source tree that was never installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("accelerator-toolkit")
    except PackageNotFoundError:
        return "0+unknown"
