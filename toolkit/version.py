"""Installed versions, read on demand, since package metadata takes tens of milliseconds to load."""

from __future__ import annotations

# How README.md says to install the toolkit, in a checkout of it: no index has it.
INSTALL = "pip install -e ."


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def installed_version() -> str:
    """Return the version of the toolkit, or `0+unknown` in a source tree that is not installed."""
    return version_of("accelerator-toolkit") or "0+unknown"
