"""Reads the settings of a storage manager: strings by dotted keys, the same for built-in and third-party managers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping


def read_settings(store: str, settings: Mapping[str, str], defaults: Mapping[str, str | None]) -> dict[str, str]:
    """Returns `settings` with the missing ones from `defaults`. A setting whose default is None is required.

    Raises `ValueError`, whose message names the setting but never quotes a value, because values may be secrets.
    """
    for key in settings:
        if key not in defaults:
            nearest = difflib.get_close_matches(key, defaults, 1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise ValueError(f"unknown setting {key!r} of the {store} storage manager{hint}")
    values: dict[str, str] = {}
    for key, default in defaults.items():
        value = settings.get(key, default)
        if value is None or (default is None and not value):
            raise ValueError(f"setting {key!r} of the {store} storage manager is missing")
        values[key] = value
    return values


def read_number(values: Mapping[str, str], key: str, minimum: int) -> int:
    try:
        number = int(values[key])
    except ValueError:
        raise ValueError(f"setting {key!r}: expected a whole number") from None
    if number < minimum:
        raise ValueError(f"setting {key!r}: {number} is below {minimum}")
    return number


def read_flag(values: Mapping[str, str], key: str) -> bool:
    match values[key].lower():
        case "true":
            return True
        case "false":
            return False
    raise ValueError(f"setting {key!r}: expected true or false")
