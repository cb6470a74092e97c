"""`JsonDecoder`: decodes JSON values by a subset of JSON Schema into values for Arrow.

The subset has objects with `properties`, arrays with `items`, string (also date, date-time and uuid), integer (64
bits), number, boolean, and null beside one of them. `required`, `additionalProperties: false`, `enum` and `const` are
enforced. Annotations are ignored. Other keywords that restrict values are refused, because the decoder could not
enforce them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

import pyarrow as pa

from pipeline.export.schema_error import ValueSchemaError, without_prefix

Convert = Callable[[Any, str], Any]
"""Converts a value, given its path, into a value for `pa.array`. Raises `ValueError`."""

_ANNOTATIONS: Final = frozenset(
    {"$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
)
_HELD: Final = frozenset(
    {"type", "properties", "required", "additionalProperties", "items", "format", "enum", "const", "nullable"}
)
_MAX_LONG: Final = (1 << 63) - 1


class _Field(NamedTuple):
    arrow_type: pa.DataType
    convert: Convert


class JsonDecoder:
    def __init__(self, schema: object, confluent_id: int | None = None) -> None:
        """Raises `ValueSchemaError` if the schema is invalid or outside the subset."""
        try:
            self.arrow_type, self._convert = _field(schema, "")
        except (AttributeError, TypeError, RecursionError) as error:  # for example a list in place of an object
            raise ValueSchemaError(f"not a JSON Schema: {error}") from error
        self._confluent_id = confluent_id

    def decode(self, value: bytes) -> Any:
        """Returns the decoded value. Raises `ValueError` if it does not fit the schema."""
        text = without_prefix(value, self._confluent_id)
        try:
            return self._convert(json.loads(text, parse_constant=_refuse_constant), "")
        except RecursionError:  # also when a value can just be parsed, but not be formatted for the error
            raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _field(schema: object, path: str) -> _Field:
    where = path or "the value"
    if not isinstance(schema, Mapping):
        raise ValueSchemaError(f"{where}: expected a schema, found {schema!r}")
    if unknown := schema.keys() - _ANNOTATIONS - _HELD:
        raise ValueSchemaError(f"{where}: {', '.join(sorted(unknown))} is not supported")
    types = schema.get("type")
    names = [types] if isinstance(types, str) else list(types or ())
    is_nullable = "null" in names or schema.get("nullable") is True
    names = [name for name in names if name != "null"]
    if len(names) != 1:
        raise ValueSchemaError(f"{where}: expected one type, besides null, found {types!r}")
    make = _MAKERS.get(names[0])
    if make is None:
        raise ValueSchemaError(f"{where}: unknown type {names[0]!r}")
    made = make(schema, path)
    return _Field(made.arrow_type, _checked(made.convert, schema, is_nullable))


def _checked(convert: Convert, schema: Mapping[str, Any], is_nullable: bool) -> Convert:
    allowed = list(schema["enum"]) if "enum" in schema else [schema["const"]] if "const" in schema else None

    def checked(value: Any, path: str) -> Any:
        if allowed is not None and value not in allowed:
            raise ValueError(f"{path or 'the value'}: {_short(value)} is not one of {_short(allowed)}")
        if value is None:
            if is_nullable:
                return None
            raise ValueError(f"{path or 'the value'}: null")
        return convert(value, path)

    return checked


def _object(schema: Mapping[str, Any], path: str) -> _Field:
    properties = schema.get("properties") or {}
    if not properties:
        raise ValueSchemaError(f"{path or 'the value'}: an object without properties cannot be a column")
    fields = {name: _field(one, f"{path}.{name}" if path else name) for name, one in properties.items()}
    required = frozenset(schema.get("required", ()))
    if strange := required - fields.keys():
        raise ValueSchemaError(f"{path or 'the value'}: {', '.join(sorted(strange))} is required, but not a property")
    others = schema.get("additionalProperties", True)
    if not isinstance(others, bool):
        raise ValueSchemaError(f"{path or 'the value'}: additionalProperties must be true or false")

    def convert(value: Any, at: str) -> Any:
        if not isinstance(value, dict):
            raise _wrong(value, at, "an object")
        if missing := required - value.keys():
            raise ValueError(f"{at or 'the value'}: {', '.join(sorted(missing))} is missing")
        if not others and (strange := value.keys() - fields.keys()):
            raise ValueError(f"{at or 'the value'}: {', '.join(sorted(strange))} is not expected")
        return {
            name: field.convert(value[name], f"{at}.{name}" if at else name)
            for name, field in fields.items()
            if name in value
        }

    return _Field(pa.struct([(name, field.arrow_type) for name, field in fields.items()]), convert)


def _array(schema: Mapping[str, Any], path: str) -> _Field:
    items = _field(schema.get("items"), f"{path}[]")

    def convert(value: Any, at: str) -> Any:
        if not isinstance(value, list):
            raise _wrong(value, at, "an array")
        return [items.convert(one, f"{at}[{index}]") for index, one in enumerate(value)]

    return _Field(pa.list_(pa.field("element", items.arrow_type)), convert)


def _string(schema: Mapping[str, Any], path: str) -> _Field:
    arrow_type, read = _FORMATS.get(schema.get("format", ""), (pa.string(), str))

    def convert(value: Any, at: str) -> Any:
        if not isinstance(value, str):
            raise _wrong(value, at, "a string")
        try:
            value.encode()
            return read(value)
        except (ValueError, OverflowError):  # OverflowError: the first day of year 1 in a zone east of UTC
            raise _wrong(value, at, str(schema.get("format", "text of Unicode"))) from None

    return _Field(arrow_type, convert)


def _time(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError("no time zone")
    return found.astimezone(UTC)


_FORMATS: Final[Mapping[str, tuple[pa.DataType, Callable[[str], Any]]]] = {
    "date": (pa.date32(), date.fromisoformat),
    "date-time": (pa.timestamp("us", tz="UTC"), _time),
    "uuid": (pa.string(), lambda text: str(UUID(text))),
}


def _integer(schema: Mapping[str, Any], path: str) -> _Field:
    def convert(value: Any, at: str) -> Any:
        # JSON Schema counts 1.0 as an integer.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not -_MAX_LONG - 1 <= value <= _MAX_LONG:
            raise _wrong(value, at, "an integer of 64 bits")
        return value

    return _Field(pa.int64(), convert)


def _number(schema: Mapping[str, Any], path: str) -> _Field:
    def convert(value: Any, at: str) -> Any:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise _wrong(value, at, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ValueError(f"{at or 'the value'}: a number that is too large")
        return number

    return _Field(pa.float64(), convert)


def _boolean(schema: Mapping[str, Any], path: str) -> _Field:
    def convert(value: Any, at: str) -> Any:
        if not isinstance(value, bool):
            raise _wrong(value, at, "true or false")
        return value

    return _Field(pa.bool_(), convert)


_MAKERS: Final[Mapping[str, Callable[[Mapping[str, Any], str], _Field]]] = {
    "object": _object,
    "array": _array,
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
}


def _wrong(value: Any, path: str, expected: str) -> ValueError:
    return ValueError(f"{path or 'the value'}: expected {expected}, found {_short(value)}")


def _short(value: Any) -> str:
    """Returns the value's JSON, shortened: the dead letter has the whole value."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
