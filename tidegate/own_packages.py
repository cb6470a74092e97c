"""Finds out whether Python would import Tidegate's internal packages, or other packages with the same names.

The names are common: a package on `PYTHONPATH`, a folder in the current directory, or an installed distribution may
have them too. The check imports none of the packages.
"""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Final

MARK: Final = "Internal to Tidegate."
"""The docstring of each of our packages has these words. Another distribution may overwrite a package in its place, so
the path of a package does not tell whose it is."""


def check_packages(*names: str) -> None:
    """Raises `ImportError` if a package is there and is not ours. Its message is one line."""
    for name in names:
        found = find_spec(name)
        if found is None:
            continue
        if MARK not in _source(found):
            place = found.origin or next(iter(found.submodule_search_locations or ()), "an unknown place")
            raise ImportError(
                f"Python finds another package `{name}` at {place} in place of Tidegate's: take that folder out of"
                " PYTHONPATH, start in another folder, or install Tidegate into a virtual environment of its own"
            )


def _source(found: ModuleSpec) -> str:
    """Returns the source of a package; "" if there is none that can be read as text."""
    source_of = getattr(found.loader, "get_source", None)
    try:
        source: str | None = source_of(found.name) if source_of else None
    except (ImportError, SyntaxError, UnicodeError):
        return ""
    return source or ""
