"""`ValueSchemaError`, and the Confluent framing of values, which both kinds of schema share."""

from __future__ import annotations

from struct import Struct

_PREFIX = Struct(">bI")


class ValueSchemaError(ValueError):
    """A schema cannot be used. The message is for the user."""


def without_prefix(value: bytes, confluent_id: int | None) -> bytes:
    """Returns the value without Confluent's prefix. If `confluent_id` is None, values have no prefix. Raises
    `ValueError`."""
    if confluent_id is None:
        return value
    if len(value) < _PREFIX.size or value[0] != 0:
        raise ValueError("the prefix of Confluent's wire format is missing")
    _, schema_id = _PREFIX.unpack_from(value)
    if schema_id != confluent_id:
        raise ValueError(f"written with the schema {schema_id}, not {confluent_id}")
    return value[_PREFIX.size :]
