"""Loads the class of a manager by the name of an entry point, or as `module:Class`.

Third parties may add entry points to the groups."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any


def installed_names(group: str) -> list[str]:
    """Returns the names of the entry points of the group, sorted."""
    return sorted({found.name for found in entry_points(group=group)})


def load_class(group: str, name: str, kind: str, *built_in: str) -> Any:
    """Returns the class that `name` names; `kind` and the names that are `built_in` are for messages.

    Raises `ValueError` when there is no such class, or when it cannot be imported."""
    if ":" in name:
        return _imported(name, name, kind)
    found = {entry_point.value for entry_point in entry_points(group=group, name=name)}
    if not found:
        known = (
            ", ".join(dict.fromkeys([*built_in, *installed_names(group)])) or "none: is the package itself installed?"
        )
        raise ValueError(f"no {kind} is called {name!r}; installed are {known}; module:Class names any other")
    if len(found) > 1:
        raise ValueError(f"several packages call their {kind} {name!r}: {', '.join(sorted(found))}")
    return _imported(found.pop(), name, kind)


def _imported(value: str, name: str, kind: str) -> Any:
    module, _, attribute = value.partition(":")
    what = f"{kind} {name!r}" if name == value else f"{kind} {name!r} ({value})"
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # whatever the code of a third party raises
        raise ValueError(f"{what} cannot be imported: {error}") from error
