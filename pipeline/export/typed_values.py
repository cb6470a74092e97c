"""`TypedValues`: converts the column `value` by a schema. Values that do not fit become dead letters; none is dropped.

A value that cannot be decoded is null, and the column `dead_letter` holds its bytes and the error. A null value is null
in both columns. The schema is one file: a subset of JSON Schema, or an Avro schema. A schema with features beyond the
subset is refused when it is read, and not at the first record.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from pipeline.export.avro_values import AvroDecoder
from pipeline.export.json_values import JsonDecoder
from pipeline.export.schema_error import ValueSchemaError

DEAD_LETTER = pa.struct([("value", pa.binary()), ("error", pa.string())])
KINDS = ("json", "avro")


class ValueDecoder(Protocol):
    arrow_type: pa.DataType

    def decode(self, value: bytes) -> Any:
        """Returns the value in a form that `pa.array` takes for `arrow_type`. Raises `ValueError` for the user."""


@dataclass(frozen=True)
class TypedValues:
    """A value schema. If `confluent_id` is set, values start with Confluent's five bytes, and only values with that
    schema id are accepted."""

    kind: str
    schema_text: str
    confluent_id: int | None = None

    @cached_property
    def _decoder(self) -> ValueDecoder:
        schema = json.loads(self.schema_text)
        if self.kind == "avro":
            return AvroDecoder(schema, self.confluent_id)
        return JsonDecoder(schema, self.confluent_id)

    def __reduce__(self) -> tuple[Any, ...]:
        return TypedValues, (self.kind, self.schema_text, self.confluent_id)

    def schema(self, plain: pa.Schema) -> pa.Schema:
        """Returns `plain` with a typed column `value` and a column `dead_letter`. Raises `ValueSchemaError`."""
        index = plain.get_field_index("value")
        typed = plain.set(index, pa.field("value", self._decoder.arrow_type))
        return typed.insert(index + 1, pa.field("dead_letter", DEAD_LETTER))

    def typed(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
        """Returns the batch with typed values, and the number of dead letters."""
        index = batch.schema.get_field_index("value")
        values: list[Any] = []
        letters: list[dict[str, object] | None] = []
        for value in batch.column(index).to_pylist():
            found, error = (None, None) if value is None else self._decoded(value)
            values.append(found)
            letters.append(None if error is None else {"value": value, "error": error})
        column = self._column(values, letters, batch.column(index))
        arrays = [*batch.columns[:index], column, pa.array(letters, DEAD_LETTER), *batch.columns[index + 1 :]]
        typed = pa.RecordBatch.from_arrays(arrays, schema=self.schema(batch.schema))
        return typed, sum(letter is not None for letter in letters)

    def _decoded(self, value: bytes) -> tuple[Any, str | None]:
        try:
            return self._decoder.decode(value), None
        except ValueError as error:
            return None, _text(error)

    def _column(self, values: list[Any], letters: list[dict[str, object] | None], raw: pa.Array) -> pa.Array:
        """Converts all values at once. If Arrow refuses one of them, converts them one by one to find it."""
        arrow_type = self._decoder.arrow_type
        try:
            return pa.array(values, arrow_type)
        except (pa.ArrowException, OverflowError, ValueError, TypeError):
            pass
        for row, value in enumerate(values):
            try:
                pa.array([value], arrow_type)
            except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
                values[row] = None
                letters[row] = {"value": raw[row].as_py(), "error": _text(error)}
        return pa.array(values, arrow_type)


def _text(error: Exception) -> str:
    """Returns the error's text. Text that is not valid Unicode may come from the value and is replaced."""
    return str(error).encode(errors="replace").decode()


def read_value_schema(text: str, confluent_id: int | None = None) -> TypedValues:
    """Reads the schema of `json:FILE` or `avro:FILE`. Raises `ValueSchemaError`."""
    kind, colon, file = text.partition(":")
    if not colon or not file or kind not in KINDS:
        raise ValueSchemaError(f"expected json:FILE or avro:FILE, not {text!r}")
    try:
        values = TypedValues(kind, Path(file).read_text(), confluent_id)
        values.schema(pa.schema([("value", pa.binary())]))
    except OSError as error:
        raise ValueSchemaError(f"{file}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueSchemaError(f"{file}: not JSON: {error}") from error
    except ValueSchemaError as error:
        raise ValueSchemaError(f"{file}: {error}") from error
    return values
