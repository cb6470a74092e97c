"""`ValueSchemaError` and what both kinds of schema share: Confluent's framing of a value."""

from __future__ import annotations

from struct import Struct

_PREFIX = Struct(">bI")


class ValueSchemaError(ValueError):
    """What of a schema cannot be used, for the user."""


def without_prefix(value: bytes, confluent_id: int | None) -> bytes:
    """`confluent_id` None: there is no prefix. Raises `ValueError`."""
    if confluent_id is None:
        return value
    if len(value) < _PREFIX.size or value[0] != 0:
        raise ValueError("no prefix of Confluent's wire format")
    _, schema_id = _PREFIX.unpack_from(value)
    if schema_id != confluent_id:
        raise ValueError(f"written with the schema {schema_id}, not {confluent_id}")
    return value[_PREFIX.size :]
