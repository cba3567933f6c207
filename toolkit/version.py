"""The installed version, read on demand, since package metadata takes tens of milliseconds to load."""

from __future__ import annotations


def installed_version() -> str:
    """Return the version of the installed distribution, or `0+unknown` in a source tree that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("accelerator-toolkit")
    except PackageNotFoundError:
        return "0+unknown"
