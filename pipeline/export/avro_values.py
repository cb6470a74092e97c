"""`AvroDecoder`: decodes Avro values by their writer's schema into values for Arrow, with fastavro.

A union may have null and one other type. Logical types are supported as far as Arrow and Iceberg have them. A value
must end where its schema ends: bytes after it show that it was written with another schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any, Final

import pyarrow as pa
from fastavro import parse_schema, schemaless_reader
from fastavro.schema import SchemaParseException, UnknownType

from pipeline.export.schema_error import ValueSchemaError, without_prefix

_PRIMITIVES: Final[Mapping[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
_LOGICAL: Final[Mapping[tuple[str, str], pa.DataType]] = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.time64("us"),
    ("long", "time-micros"): pa.time64("us"),
    ("long", "timestamp-millis"): pa.timestamp("us", tz="UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", tz="UTC"),
    ("long", "local-timestamp-millis"): pa.timestamp("us"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
    ("string", "uuid"): pa.string(),
}
_MAX_DECIMAL_DIGITS: Final = 38


class AvroDecoder:
    def __init__(self, schema: Any, confluent_id: int | None = None) -> None:
        """Raises `ValueSchemaError` if the schema cannot be an Arrow type."""
        try:
            self._schema = parse_schema(schema)
        except (SchemaParseException, UnknownType, TypeError, ValueError, KeyError) as error:
            raise ValueSchemaError(f"not an Avro schema: {error}") from error
        self.arrow_type = _arrow_type(self._schema, "", {})
        self._is_uuid = _has_uuid(schema)
        self._confluent_id = confluent_id

    def decode(self, value: bytes) -> Any:
        """Returns the decoded value. Raises `ValueError` if it does not fit the schema."""
        data = BytesIO(without_prefix(value, self._confluent_id))
        try:
            found = schemaless_reader(data, self._schema, None)
        except Exception as error:  # fastavro may raise anything for bytes that do not fit the schema
            raise ValueError(f"does not fit the schema: {type(error).__name__} {error}".rstrip()) from error
        if rest := len(data.getbuffer()) - data.tell():
            raise ValueError(f"{rest} bytes follow the value that the schema describes")
        return _with_uuids_as_text(found) if self._is_uuid else found


def _arrow_type(schema: Any, path: str, named: dict[str, pa.DataType | None]) -> pa.DataType:
    where = path or "the value"
    if isinstance(schema, list):
        others = [one for one in schema if one != "null"]
        if len(others) != 1 or len(schema) > 2:
            raise ValueSchemaError(f"{where}: a union of null and one other type is supported, not {len(schema)} types")
        return _arrow_type(others[0], path, named)
    if isinstance(schema, str):
        return _of_name(schema, where, named)
    kind = schema["type"]
    if not isinstance(kind, str):
        return _arrow_type(kind, path, named)
    logical = schema.get("logicalType")
    if logical == "decimal" and kind in ("bytes", "fixed"):
        if not 0 < schema.get("precision", 0) <= _MAX_DECIMAL_DIGITS:
            raise ValueSchemaError(f"{where}: a decimal has a precision, with at most {_MAX_DECIMAL_DIGITS} digits")
        return _named(pa.decimal128(schema["precision"], schema.get("scale", 0)), schema, named)
    if logical is not None and (kind, logical) in _LOGICAL:
        return _LOGICAL[kind, logical]
    match kind:
        case "record" | "error":
            return _record(schema, path, named)
        case "enum":
            return _named(pa.string(), schema, named)
        case "fixed":
            return _named(pa.binary(), schema, named)
        case "array":
            return pa.list_(pa.field("element", _arrow_type(schema["items"], f"{path}[]", named)))
        case "map":
            return pa.map_(pa.string(), _arrow_type(schema["values"], f"{path}{{}}", named))
    return _of_name(kind, where, named)


def _record(schema: Mapping[str, Any], path: str, named: dict[str, pa.DataType | None]) -> pa.DataType:
    if not schema["fields"]:
        raise ValueSchemaError(f"{path or 'the value'}: a record without fields cannot be a column")
    _name(None, schema, named)
    fields = [
        (one["name"], _arrow_type(one["type"], f"{path}.{one['name']}" if path else one["name"], named))
        for one in schema["fields"]
    ]
    return _named(pa.struct(fields), schema, named)


def _named(arrow_type: pa.DataType, schema: Mapping[str, Any], named: dict[str, pa.DataType | None]) -> pa.DataType:
    _name(arrow_type, schema, named)
    return arrow_type


def _name(arrow_type: pa.DataType | None, schema: Mapping[str, Any], named: dict[str, pa.DataType | None]) -> None:
    """Registers a named type by its full name, which a parsed schema uses for references. None marks a type that is
    still being built."""
    if "name" in schema:
        named[schema["name"]] = arrow_type


def _of_name(name: str, where: str, named: Mapping[str, pa.DataType | None]) -> pa.DataType:
    if name in _PRIMITIVES:
        return _PRIMITIVES[name]
    if name not in named:
        raise ValueSchemaError(f"{where}: the type {name} is not supported")
    found = named[name]
    if found is None:
        raise ValueSchemaError(f"{where}: {name} is within itself, which is not possible for a column")
    return found


def _has_uuid(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return schema.get("logicalType") == "uuid" or any(map(_has_uuid, schema.values()))
    return isinstance(schema, list) and any(map(_has_uuid, schema))


def _with_uuids_as_text(value: Any) -> Any:
    match value:
        case dict():
            return {name: _with_uuids_as_text(one) for name, one in value.items()}
        case list():
            return [_with_uuids_as_text(one) for one in value]
        case None | bool() | int() | float() | str() | bytes():
            return value
    return str(value) if type(value).__name__ == "UUID" else value
