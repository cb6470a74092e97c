"""Reads the settings of a storage or metadata manager: strings by dotted keys, which the manager declares.

Built-in and third-party managers use the same functions."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Final, NamedTuple


class UnknownSettingError(ValueError):
    """A manager does not declare this setting. The message names the nearest one that it declares."""

    def __init__(self, what: str, key: str, declared: Collection[str]) -> None:
        nearest = difflib.get_close_matches(key, declared, 1)
        super().__init__(f"{what}; did you mean {nearest[0]}?" if nearest else what)
        self.what = what
        self.key = key
        self.declared = declared


def read_settings(
    manager: str, settings: Mapping[str, str], defaults: Mapping[str, str | None], *, kind: str = "storage manager"
) -> dict[str, str]:
    """Returns `settings` with the missing ones from `defaults`. A setting whose default is None is required.

    The keys of `defaults` are all settings of the manager. `KEY.file` names a file with the value of KEY. Raises
    `ValueError`, whose message names the setting but never quotes a value, because values may be secrets.
    """
    settings = _with_files(settings, defaults)
    for key in settings:
        if key not in defaults:
            raise UnknownSettingError(f"unknown setting {key!r} of the {manager} {kind}", key, list(defaults))
    values: dict[str, str] = {}
    for key, default in defaults.items():
        value = settings.get(key, default)
        if value is None or (default is None and not value):
            raise ValueError(f"setting {key!r} of the {manager} {kind} is missing")
        values[key] = value
    return values


def _with_files(settings: Mapping[str, str], declared: Collection[str]) -> Mapping[str, str]:
    values = dict(settings)
    for file_key in [key for key in settings if key not in declared and key.removesuffix(".file") in declared]:
        key = file_key.removesuffix(".file")
        if key in settings:
            raise ValueError(f"settings {key!r} and {file_key!r} are both set: remove one of them")
        values[key] = read_secret(f"setting {file_key!r}", values.pop(file_key))
    return values


class Quantity(NamedTuple):
    """What a number in the file may count. Text has a unit, and then means a number of the plain unit."""

    plain: str
    example: str
    units: Mapping[str, int]

    def number(self, text: str) -> int:
        """Returns the number that text with a unit means. Raises `ValueError`, which does not quote the text."""
        matched = _WITH_UNIT.fullmatch(text)
        number = Decimal(matched[1]) * self.units[matched[2]] if matched and matched[2] in self.units else None
        if number is None or number % 1:
            raise ValueError(
                f"expected a number of {self.plain}, or a string of a number and one of the units "
                f'{", ".join(self.units)}, for example "{self.example}"'
            )
        return int(number)


_WITH_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")
DURATION: Final = Quantity(
    "milliseconds", "10s", {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
)
SIZE: Final = Quantity(
    "bytes",
    "64MiB",
    {
        "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
        "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
    },
)  # fmt: skip


def read_duration_ms(values: Mapping[str, str], key: str, minimum: int) -> int:
    return read_number(values, key, minimum, DURATION)


def read_size_bytes(values: Mapping[str, str], key: str, minimum: int) -> int:
    return read_number(values, key, minimum, SIZE)


def read_number(values: Mapping[str, str], key: str, minimum: int, quantity: Quantity | None = None) -> int:
    text = values[key]
    try:
        if text.isascii() and text.isdecimal():
            number = int(text)
        elif quantity is not None:
            number = quantity.number(text)
        else:
            raise ValueError("expected a whole number")
    except ValueError as error:
        raise ValueError(f"setting {key!r}: {error}") from None
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


def read_secret(key: str, file: object) -> str:
    """Returns the contents of the file that the setting `key` names, without the last line break.

    Raises `ValueError`."""
    if not isinstance(file, str):
        raise ValueError(f"{key}: expected the path of a file")
    try:
        text = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{key}: {file}: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    secret = text.removesuffix("\n").removesuffix("\r")
    if not secret:
        raise ValueError(f"{key}: {file} is empty")
    return secret
