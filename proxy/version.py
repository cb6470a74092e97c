"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """Returns "unknown" if there are the sources alone, without an installation."""
    try:
        return version("tidegate")
    except PackageNotFoundError:
        return "unknown"
