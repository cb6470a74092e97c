"""Sizes and durations on a command line."""

from __future__ import annotations

import typer

from tiers.storage.settings import DURATION, SIZE, Quantity


def size_bytes(text: str | int) -> int:
    """Parses a size, or returns a default that is already a number. Raises `typer.BadParameter`."""
    return int(text) if str(text).isdecimal() else _parsed(SIZE, str(text))


def duration_ms(text: str | int) -> int:
    """Parses a duration, or returns a default that is already a number. Raises `typer.BadParameter`.

    A duration has a unit: someone who types 7 may mean days."""
    return text if isinstance(text, int) else _parsed(DURATION, text)


def _parsed(quantity: Quantity, text: str) -> int:
    try:
        return quantity.number(text)
    except ValueError as error:
        units = ", ".join(quantity.units)
        said = f"{text!r}: expected a number and one of the units {units}, such as {quantity.example}"
        raise typer.BadParameter(said) from error
