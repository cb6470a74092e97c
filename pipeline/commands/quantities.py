"""Parsers for sizes and durations on the command line, with the units of the configuration."""

from __future__ import annotations

from typing import Any

import typer
from pydantic import TypeAdapter, ValidationError

from tiers.config.settings import DurationMs, SizeBytes


def size_bytes(text: str | int) -> int:
    """Parses a size, or returns a default that is already a number. Raises `typer.BadParameter`."""
    return _parsed(SizeBytes, text)


def duration_ms(text: str | int) -> int:
    """Parses a duration, or returns a default that is already a number. Raises `typer.BadParameter`."""
    return _parsed(DurationMs, text)


def _parsed(kind: Any, text: str | int) -> int:
    try:
        return int(TypeAdapter(kind).validate_python(int(text) if str(text).isdecimal() else text))
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise typer.BadParameter(f"{text!r}: {said}") from error
